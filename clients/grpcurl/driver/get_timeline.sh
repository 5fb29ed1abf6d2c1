#!/bin/sh
# Send one trace of all ranks of the newest steps on one clock, in parts (base64 of a .json.gz).
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetTimeline '{"job": '"$(quote "$1")"', "steps": 3}'
