#!/bin/sh
# Report to the committer, as a rank's daemon does, that the rank's file is durable; the report of the
# last rank commits the step. Try it on a scratch attempt of one rank that open_attempt.sh has opened,
# with an empty file attempts/attempt-000001/step-000000005/rank-00000.safetensors (attempt 1, step 5)
# in its folder: the committer checks that it exists.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB STEP [ATTEMPT]"
call "$(checkpoint "$1")" CheckpointService/ReportPrepared '{
  "job": '"$(quote "$2")"', "attempt": '"${4:-1}"', "step": '"$3"', "rank": 0,
  "files": [{"path": "rank-00000.safetensors", "size_bytes": 0, "xxh3": "99aa06d3014798d86001c324468d497f"}]
}'
