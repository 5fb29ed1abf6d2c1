#!/bin/sh
# Show one job: phase and why, attempt, nodes, newest step record.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetJob '{"name": '"$(quote "$1")"'}'
