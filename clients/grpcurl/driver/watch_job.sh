#!/bin/sh
# Follow a job: its state, steps and events, until it ends. Go on later from a resume_token that was printed.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB [RESUME_TOKEN]"
watch "$(driver)" DriverService/WatchJob '{"name": '"$(quote "$1")"', "resume_token": '"$(quote "${2:-}")"'}'
