#!/bin/sh
# Quarantine a node: its job moves to a spare at once. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE REASON"
call "$(driver)" DriverService/EvictNode '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
