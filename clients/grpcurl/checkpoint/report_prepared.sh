#!/bin/sh
# What a rank's daemon tells the committer when the rank's file is durable; the last rank's report commits the step.
# Try it on a scratch attempt of one rank that open_attempt.sh has opened, with an empty file
# attempts/attempt-000001/step-000000005/rank-00000.safetensors (attempt 1, step 5) in its folder: the committer looks.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB STEP [ATTEMPT]"
call "$(checkpoint "$1")" CheckpointService/ReportPrepared '{
  "job": '"$(quote "$2")"', "attempt": '"${4:-1}"', "step": '"$3"', "rank": 0,
  "files": [{"path": "rank-00000.safetensors", "size_bytes": 0, "xxh3": "99aa06d3014798d86001c324468d497f"}]
}'
