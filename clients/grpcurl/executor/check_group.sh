#!/bin/sh
# Check devices of a node together, as the driver does with those of several nodes. Refused while it has an attempt.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NODE DEVICE [DEVICE...]"
node=$1
shift
devices=$(printf '%s,' "$@")
call "$(executor "$node")" ExecutorService/CheckGroup '{"world_size": '"$#"', "devices": ['"${devices%,}"']}'
