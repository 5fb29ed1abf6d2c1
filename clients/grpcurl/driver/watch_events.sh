#!/bin/sh
# Follow the audit log. Go on later from a resume_token that was printed, at any driver.
# arguments: [jobs/NAME | nodes/NAME | "" [RESUME_TOKEN]]
. "$(dirname "$0")/../common.sh"
watch "$(driver)" DriverService/WatchEvents \
  '{"subject": '"$(quote "${1:-}")"', "resume_token": '"$(quote "${2:-}")"'}'
