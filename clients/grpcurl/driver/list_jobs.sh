#!/bin/sh
# List all jobs.
. "$(dirname "$0")/../common.sh"
call "$(driver)" DriverService/ListJobs '{"page_size": 100}'
