#!/bin/sh
# Follow the audit log: of jobs/NAME, about nodes/NAME, or ("") of the whole cluster. A printed
# resume_token, given as the second argument, continues a watch at any driver.
. "$(dirname "$0")/../common.sh"
usage 0 "$#" "[SUBJECT [RESUME_TOKEN]]"
watch "$(driver)" DriverService/WatchEvents \
  '{"subject": '"$(quote "${1:-}")"', "resume_token": '"$(quote "${2:-}")"'}'
