#!/bin/sh
# Explain why a job is in its present phase: what happened, what was done, what you can do.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/ExplainJob '{"name": '"$(quote "$1")"'}'
