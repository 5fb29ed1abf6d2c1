#!/bin/sh
# Evict silent nodes again after the breaker has tripped. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "REASON"
call "$(driver)" DriverService/ResetBreaker '{
  "reason": '"$(quote "$1")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
