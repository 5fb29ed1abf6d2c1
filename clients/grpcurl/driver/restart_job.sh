#!/bin/sh
# Begin a new attempt of a job, also of a failed one; it saves first unless NOW=true. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB REASON [FROM_STEP]"
from_step=''
[ -z "${3:-}" ] || from_step=', "from_step": '"$3"
call "$(driver)" DriverService/RestartJob '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "now": '"${NOW:-false}$from_step"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
