#!/bin/sh
# Open an attempt as the driver does: fence earlier attempts and decide what is restored. Try it on a
# scratch folder: in a job's own folder it would fence the running attempt.
. "$(dirname "$0")/../common.sh"
usage 3 "$#" "NODE JOB SCRATCH_FOLDER [ATTEMPT]"
call "$(checkpoint "$1")" CheckpointService/OpenAttempt '{
  "job": '"$(quote "$2")"', "uri": '"$(quote "$3")"', "attempt": '"${4:-1}"', "world_size": 1
}'
