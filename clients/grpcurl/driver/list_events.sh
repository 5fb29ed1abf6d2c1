#!/bin/sh
# List the audit log, oldest first: of jobs/NAME, about nodes/NAME, or of the whole cluster.
. "$(dirname "$0")/../common.sh"
usage 0 "$#" "[SUBJECT]"
call "$(driver)" DriverService/ListEvents '{"subject": '"$(quote "${1:-}")"', "page_size": 1000}'
