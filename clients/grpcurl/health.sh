#!/bin/sh
# Show the health of a service: SERVING, or on a standby driver NOT_SERVING; "" is the process itself.
# arguments: [SERVICE [ADDRESS]], such as megascale.v1.ExecutorService "$(cat runs/current/nodes/n1/executor.address)"
. "$(dirname "$0")/common.sh"
run_grpcurl -max-time 10 -d '{"service": '"$(quote "${1-megascale.v1.DriverService}")"'}' \
  "${2:-$(driver)}" grpc.health.v1.Health/Check
