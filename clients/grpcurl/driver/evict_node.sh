#!/bin/sh
# Quarantine a node: its job saves, unless NOW=true, and moves to a spare. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE REASON"
call "$(driver)" DriverService/EvictNode '{
  "name": '"$(quote "$1")"',
  "reason": '"$(quote "$2")"',
  "now": '"${NOW:-false}"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
