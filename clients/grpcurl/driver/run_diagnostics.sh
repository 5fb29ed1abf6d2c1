#!/bin/sh
# Run a node's self-checks now; the node must be idle or a spare. Without names all checks run.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "NODE [CHECK...]"
node=$1
shift
call "$(driver)" DriverService/RunDiagnostics '{"node": '"$(quote "$node")"', "checks": '"$(list "$@")"'}'
