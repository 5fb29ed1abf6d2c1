#!/bin/sh
# What can be called? Services of the driver; or, of a name such as megascale.v1.JobSpec, its shape.
. "$(dirname "$0")/common.sh"
if [ "$#" -eq 0 ]; then
  run_grpcurl "$(driver)" list
else
  run_grpcurl "$(driver)" describe "$1"
fi
