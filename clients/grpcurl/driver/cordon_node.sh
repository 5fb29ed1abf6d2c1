#!/bin/sh
# Keep new work off a node; what runs there continues. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE REASON"
call "$(driver)" DriverService/CordonNode '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
