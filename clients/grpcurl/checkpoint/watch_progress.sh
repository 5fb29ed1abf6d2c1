#!/bin/sh
# Follow the sealed snapshots and commits of every job on a node: now and after every change.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "NODE"
watch "$(checkpoint "$1")" CheckpointService/WatchProgress '{}'
