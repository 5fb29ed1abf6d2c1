#!/bin/sh
# Send spans as an agent does for rank 0 of its node. This batch has none, so none is accepted.
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "JOB NODE"
call "$(driver)" ExecutorLinkService/ReportSpans '{"job": '"$(quote "$1")"', "node": '"$(quote "$2")"', "attempt": 1}'
