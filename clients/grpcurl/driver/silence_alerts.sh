#!/bin/sh
# Keep alerts of a node, a job or a reason quiet for some seconds; 0 ends that. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "SUBJECT SECONDS REASON"
call "$(driver)" DriverService/SilenceAlerts '{
  "subject": '"$(quote "$1")"',
  "duration": "'"$2"'s",
  "reason": '"$(quote "$3")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
