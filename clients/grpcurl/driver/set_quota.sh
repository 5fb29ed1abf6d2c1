#!/bin/sh
# Limit the devices that the jobs of a tenant hold at once. VALIDATE_ONLY=true only shows what would happen.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "TENANT DEVICES REASON"
call "$(driver)" DriverService/SetQuota '{
  "tenant": '"$(quote "$1")"',
  "devices": '"$2"',
  "reason": '"$(quote "$3")"',
  "validate_only": '"${VALIDATE_ONLY:-false}"',
  "request_id": "'"$(request_id)"'"
}'
