#!/bin/sh
# Set a rule of the driver to ENFORCE or OBSERVE. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "RULE MODE REASON"
call "$(driver)" DriverService/SetPolicy '{
  "rule": '"$(quote "$1")"',
  "mode": "POLICY_MODE_'"$2"'",
  "reason": '"$(quote "$3")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
