#!/bin/sh
# Make ranks of a running job write a trace of some steps ahead (gzipped Chrome JSON, for
# https://ui.perfetto.dev). get_job.sh shows the state of each trace under `profile`. Ranks as in
# 0,3; FIRST_STEP 0: the nearest possible.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB [STEPS [RANKS [FIRST_STEP]]]"
call "$(driver)" DriverService/ProfileJob '{
  "job": '"$(quote "$1")"', "steps": '"${2:-2}"', "ranks": ['"${3:-0}"'], "first_step": '"${4:-0}"',
  "reason": '"$(quote "${REASON:-}")"',
  "request_id": "'"$(request_id)"'"
}'
