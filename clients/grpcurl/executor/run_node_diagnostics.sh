#!/bin/sh
# Run a node's self-checks now, at its own agent (works without a driver). Refused while it has an attempt.
. "$(dirname "$0")/../common.sh"
usage 1 "$#" "NODE [CHECK...]"
node=$1
shift
call "$(executor "$node")" ExecutorService/RunNodeDiagnostics '{"checks": '"$(list "$@")"'}'
