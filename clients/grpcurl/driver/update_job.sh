#!/bin/sh
# Give a job a new configuration: SPEC is the JSON of its whole JobSpec, as GetJob returns it, with the changes. RESTART=true begins the next attempt. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "SPEC REASON"
call "$(driver)" DriverService/UpdateJob '{
  "spec": '"$1"',
  "reason": '"$(quote "$2")"',
  "restart": '"${RESTART:-false}"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
