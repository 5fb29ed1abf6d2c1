#!/bin/sh
# Show where each rank of a job is, its current operation, and the ranks that it waits for.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetTopology '{"job": '"$(quote "$1")"'}'
