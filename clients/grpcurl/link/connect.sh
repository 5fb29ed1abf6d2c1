#!/bin/sh
# Show which link protocol the driver speaks. Only agents hold this stream open: a hello of an unknown
# protocol is refused with an error that names the supported range, and no node joins.
. "$(dirname "$0")/../common.sh"
STATUS_FAILED_PRECONDITION=73
status=0
answer=$(call "$(driver)" ExecutorLinkService/Connect \
  '{"hello": {"protocol": {"lowest": 99, "highest": 99}, "node": "nobody"}}' 2>&1) || status=$?
printf '%s\n' "$answer"
[ "$status" -eq "$STATUS_FAILED_PRECONDITION" ]
