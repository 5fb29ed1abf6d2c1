"""Asks a server of this host whether it serves, for probes of a service manager.

``python -m megascale_common.service.health_probe --address-file FILE --token-file FILE``

The exit status is 0 if it serves, 1 if it does not or cannot be reached, 2 for an option that
cannot work. With certificates the probe presents those of the process that it asks: every process
may call itself.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from megascale_common.service.channel import open_channel, present
from megascale_common.service.identity import certificates
from megascale_common.service.start import ends_with_a_sentence, read_token

TIMEOUT_S = 5.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_common.service.health_probe",
        description="Ask a server of this host whether it serves (gRPC health).",
    )
    add = made.add_argument
    add("--address-file", type=Path, required=True, help="where the server has written HOST:PORT")
    add("--token-file", type=Path, required=True, help="file with the cluster token")
    add("--service", default="", help="name of a service; default: the process as a whole")
    certificates.add_options(made)
    return made


def main() -> int:
    """Ask once; the exit status is that of the module's description."""
    options = parser().parse_args()
    with ends_with_a_sentence("health probe"):
        present(certificates.of_options(options))
        token = read_token(options.token_file)
        found = asyncio.run(_status(options.address_file, token, options.service))
    print(found)
    return int(found != "SERVING")


async def _status(address_file: Path, token: str, service: str) -> str:
    try:
        address = address_file.read_text().strip()
    except FileNotFoundError:
        return "it has not written its address yet"
    async with open_channel(address, token) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await stub.Check(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    raise SystemExit(main())
