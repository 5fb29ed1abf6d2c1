#!/bin/sh
# Which link protocol does the driver speak? Only agents hold this stream open; a hello of a protocol that nobody speaks
# is refused with the answer and joins no node.
. "$(dirname "$0")/../common.sh"
STATUS_FAILED_PRECONDITION=73
status=0
answer=$(call "$(driver)" ExecutorLinkService/Connect \
  '{"hello": {"protocol": {"lowest": 99, "highest": 99}, "node": "nobody"}}' 2>&1) || status=$?
printf '%s\n' "$answer"
[ "$status" -eq "$STATUS_FAILED_PRECONDITION" ]
