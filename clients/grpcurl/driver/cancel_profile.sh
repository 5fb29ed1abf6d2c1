#!/bin/sh
# Cancel the profile of a job in progress; the next one can be requested at once.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB [REASON]"
call "$(driver)" DriverService/CancelProfile '{
  "job": '"$(quote "$1")"', "reason": '"$(quote "${2:-}")"', "request_id": "'"$(request_id)"'"
}'
