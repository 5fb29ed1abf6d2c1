#!/bin/sh
# List the complete checkpoints in a folder, read by a node's daemon, newest first.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB CHECKPOINT_FOLDER"
call "$(checkpoint "$1")" CheckpointService/ListCommits '{"job": '"$(quote "$2")"', "uri": '"$(quote "$3")"'}'
