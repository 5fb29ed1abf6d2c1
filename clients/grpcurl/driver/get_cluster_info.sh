#!/bin/sh
# Show which driver leads, since when, and the cluster's counts of nodes and jobs.
. "$(dirname "$0")/../common.sh"
call "$(driver)" DriverService/GetClusterInfo '{}'
