#!/bin/sh
# Show where each rank of a job is, what it is inside of and for whom it waits.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetTopology '{"job": '"$(quote "$1")"'}'
