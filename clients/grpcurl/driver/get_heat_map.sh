#!/bin/sh
# Show how long each operation takes on each rank, compared with the ranks that do the same work.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "JOB"
call "$(driver)" DriverService/GetHeatMap '{"job": '"$(quote "$1")"', "steps": 50}'
