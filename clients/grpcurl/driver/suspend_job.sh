#!/bin/sh
# Save a job's state, then stop it and free its nodes until it is resumed. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB REASON"
call "$(driver)" DriverService/SuspendJob '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
