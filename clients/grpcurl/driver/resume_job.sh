#!/bin/sh
# Let a suspended job have nodes again; it continues from its newest checkpoint. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB REASON"
call "$(driver)" DriverService/ResumeJob '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
