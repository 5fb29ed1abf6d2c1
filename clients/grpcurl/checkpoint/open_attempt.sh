#!/bin/sh
# What the driver asks at the start of an attempt: fence earlier attempts, decide what is restored.
# Try it on a scratch folder: in a job's own folder it would fence the attempt that runs.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB SCRATCH_FOLDER [ATTEMPT]"
call "$(checkpoint "$1")" CheckpointService/OpenAttempt '{
  "job": '"$(quote "$2")"', "uri": '"$(quote "$3")"', "attempt": '"${4:-1}"', "world_size": 1
}'
