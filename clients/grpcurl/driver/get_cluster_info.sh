#!/bin/sh
# Who leads since when, and how the cluster stands.
. "$(dirname "$0")/../common.sh"
call "$(driver)" DriverService/GetClusterInfo '{}'
