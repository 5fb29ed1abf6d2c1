#!/bin/sh
# List the services of the driver; or show the definition of a name such as megascale.v1.JobSpec.
. "$(dirname "$0")/common.sh"
if [ "$#" -eq 0 ]; then
  run_grpcurl "$(driver)" list
else
  run_grpcurl "$(driver)" describe "$1"
fi
