#!/bin/sh
# List all nodes: disposition, liveness, assignment, devices, self-checks.
. "$(dirname "$0")/../common.sh"
call "$(driver)" DriverService/ListNodes '{"page_size": 1000}'
