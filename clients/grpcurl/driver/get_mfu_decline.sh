#!/bin/sh
# Explain in one sentence with numbers why the steps of a job take longer than before.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetMfuDecline '{"job": '"$(quote "$1")"'}'
