#!/bin/sh
# Report that a platform cannot reach a node, in its own words; it reaches all others.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE CONDITION"
call "$(driver)" DriverService/ReportUnreachableNodes '{
  "nodes": [{"name": '"$(quote "$1")"', "condition": '"$(quote "$2")"'}]
}'
