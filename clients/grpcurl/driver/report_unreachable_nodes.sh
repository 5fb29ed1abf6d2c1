#!/bin/sh
# Report that a platform does not reach a node, in its own words; all others it reaches.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE CONDITION"
call "$(driver)" DriverService/ReportUnreachableNodes '{
  "nodes": [{"name": '"$(quote "$1")"', "condition": '"$(quote "$2")"'}]
}'
