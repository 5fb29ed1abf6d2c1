#!/bin/sh
# List the complete checkpoints of a job, newest first.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/ListCheckpoints '{"job": '"$(quote "$1")"'}'
