#!/bin/sh
# Give up the profile of a job that is in progress; the next one may be requested at once.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB [REASON]"
call "$(driver)" DriverService/CancelProfile '{
  "job": '"$(quote "$1")"', "reason": '"$(quote "${2:-}")"', "request_id": "'"$(request_id)"'"
}'
