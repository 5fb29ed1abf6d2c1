#!/bin/sh
# Print the end of a rank's log, read on the node that runs or ran it. FOLLOW=true continues as it
# grows.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB RANK [LINES [ATTEMPT]]"
watch "$(driver)" DriverService/TailLogs '{
  "job": '"$(quote "$1")"', "rank": '"$2"', "lines": '"${3:-100}"', "attempt": '"${4:-0}"',
  "follow": '"${FOLLOW:-false}"'
}'
