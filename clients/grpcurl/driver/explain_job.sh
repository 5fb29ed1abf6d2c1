#!/bin/sh
# Say in one sentence why a job is where it is.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/ExplainJob '{"name": '"$(quote "$1")"'}'
