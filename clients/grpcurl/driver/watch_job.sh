#!/bin/sh
# Follow a job: its state, steps and events, until it ends. A printed resume_token continues a watch.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB [RESUME_TOKEN]"
watch "$(driver)" DriverService/WatchJob '{"name": '"$(quote "$1")"', "resume_token": '"$(quote "${2:-}")"'}'
