#!/bin/sh
# Show which driver leads, since when, and the state of the cluster in figures.
. "$(dirname "$0")/../common.sh"
call "$(driver)" DriverService/GetClusterInfo '{}'
