#!/bin/sh
# Show what each rank takes for each operation of a step, beside the ranks that do the same work.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetHeatMap '{"job": '"$(quote "$1")"', "steps": 50}'
