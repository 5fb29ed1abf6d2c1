#!/bin/sh
# Test whether a node can reach and write a storage of checkpoints.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE CHECKPOINT_FOLDER"
call "$(checkpoint "$1")" CheckpointService/CheckStorage '{"uri": '"$(quote "$2")"'}'
