#!/bin/sh
# Print the end of a rank's log on this node, from its own agent (works without a driver).
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB RANK [LINES]"
watch "$(executor "$1")" ExecutorService/TailWorkerLogs \
  '{"job": '"$(quote "$2")"', "rank": '"$3"', "lines": '"${4:-100}"', "follow": '"${FOLLOW:-false}"'}'
