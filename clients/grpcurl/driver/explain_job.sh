#!/bin/sh
# Explain in one sentence why a job is in its present phase.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/ExplainJob '{"name": '"$(quote "$1")"'}'
