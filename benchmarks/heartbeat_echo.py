"""The bare echo of `heartbeats.py`: a gRPC server that answers each message and does nothing else.

It has the options, the token check, the event loop, the rules of garbage collection and the
messages of a driver. Its only state is who it greets; each heartbeat is parsed and answered with an
acknowledgement.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from megascale.v1 import link_pb2, link_pb2_grpc
from megascale_common.node.process import arm_parent_death
from megascale_common.service.server import RpcServer
from megascale_common.service.start import read_token, write_address
from megascale_driver.shell.loop import THRESHOLDS, freeze_all


class Echo(link_pb2_grpc.ExecutorLinkServiceServicer):
    """Answers a hello with a hello, a heartbeat with its acknowledgement."""

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[link_pb2.ConnectResponse]:
        """One node's stream."""
        async for request in request_iterator:
            if request.HasField("heartbeat"):
                ack = link_pb2.HeartbeatAck(seq=request.heartbeat.seq)
                yield link_pb2.ConnectResponse(heartbeat_ack=ack)
            else:
                yield link_pb2.ConnectResponse(hello=link_pb2.DriverHello(cluster="echo"))

    async def ReportSteps(self, request_iterator: Any, context: Any) -> Any:
        """Nothing reports steps to an echo."""
        raise NotImplementedError


async def _main(token_file: Path, address_file: Path) -> None:
    server = RpcServer(read_token(token_file))
    link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(Echo(), server.server)
    address = await server.start("127.0.0.1:0", ["megascale.v1.ExecutorLinkService"])
    freeze_all()
    gc.set_threshold(*THRESHOLDS)
    write_address("--address-file", address_file, address)
    await asyncio.Event().wait()


if __name__ == "__main__":
    arm_parent_death()
    uvloop.run(_main(Path(sys.argv[1]), Path(sys.argv[2])))
