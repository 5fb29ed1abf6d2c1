#!/bin/sh
# Empty a node: its job saves, leaves it and continues elsewhere. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE REASON"
call "$(driver)" DriverService/DrainNode '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
