#!/bin/sh
# Show what a node is and does now, from its own agent: processes, each rank's step, phase and status
# age.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "NODE"
call "$(executor "$1")" ExecutorService/GetNodeStatus '{}'
