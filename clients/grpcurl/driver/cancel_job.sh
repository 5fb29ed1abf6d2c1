#!/bin/sh
# Stop a job for good, at once; its committed checkpoints stay.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB REASON"
call "$(driver)" DriverService/CancelJob \
  '{"name": '"$(quote "$1")"', "reason": '"$(quote "$2")"', "request_id": "'"$(request_id)"'"}'
