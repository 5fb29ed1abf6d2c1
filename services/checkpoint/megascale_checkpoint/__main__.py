"""The checkpoint daemon of one node: ``python -m megascale_checkpoint``.

It ends with its parent. On SIGTERM it gives files in progress DRAIN_S seconds to finish, then
removes its staging memory; after SIGKILL the next daemon of the node removes it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path

import uvloop

from megascale.v1 import checkpoint_pb2_grpc
from megascale_checkpoint.concurrency import Pools
from megascale_checkpoint.memory.staging import StagingFolder, default_base
from megascale_checkpoint.replicas.node_replicas import NodeReplicas
from megascale_checkpoint.replicas.streams import MOST_STREAMS, STREAMS
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.driverless import DriverlessAttempts
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.serve.local_server import LocalServer
from megascale_checkpoint.serve.metrics import CheckpointMetrics
from megascale_checkpoint.serve.service import SERVICE, CheckpointService
from megascale_common.node.addresses import joined
from megascale_common.node.process import arm_parent_death
from megascale_common.service import logs, tasks
from megascale_common.service.channel import present, presented
from megascale_common.service.errors import OptionError
from megascale_common.service.identity import certificates
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.metrics import MetricsServer, bind_option, registry_of
from megascale_common.service.server import RpcServer
from megascale_common.service.start import ends_with_a_sentence, read_token, write_address
from megascale_job.names import is_dns_label

DRAIN_S = 2.0  # below the 3 s after which an agent that stops kills its daemon
RETENTION_S = 10.0  # to remove checkpoints that the last commit made expendable
REPLICA_HOST = "127.0.0.1"
log = logs.get("main")


def main(arguments: list[str] | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT; exit with status 2 if it cannot start."""
    arm_parent_death()
    options = _parse(arguments)
    logs.configure("checkpoint")
    with ends_with_a_sentence("the checkpoint daemon cannot start"):
        token, tls = read_token(options.token_file), certificates.of_options(options)
        present(tls)
        staging = StagingFolder(
            options.staging_folder,
            options.cluster,
            options.node,
            options.incarnation,
            options.staging_limit_bytes,
        )
        stopped = True
        try:
            stopped = uvloop.run(_serve(options, token, tls, staging))
        finally:
            staging.remove()
    if not stopped:
        # A thread that is stuck in a storage would keep the interpreter from ending.
        log.error("ended although a storage does not answer")
        os._exit(1)
    if status := tasks.exit_status():
        raise SystemExit(status)


async def _serve(
    options: argparse.Namespace, token: str, tls: Certificates | None, staging: StagingFolder
) -> bool:
    """Serve until asked to stop; return True if all threads have ended."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    pools, committers = Pools(), CommitterClient(token)
    jobs = Jobs(staging, pools, committers)
    replicas = jobs.replicas = NodeReplicas(jobs, staging, pools, token, options.replica_streams)
    # Without TLS, replicas stay on this host even with --insecure-network: they are whole models.
    host = options.host.strip("[]") if presented() is not None else REPLICA_HOST
    replicas.start(host, options.address_file.with_suffix(".replicas"))
    server = RpcServer(token, tls=tls, insecure_network=options.insecure_network)
    committer = Committer(jobs.registration)
    service = CheckpointService(jobs, committer, options.node, replicas.endpoint)
    checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(service, server.server)
    try:
        openings = DriverlessAttempts(committer, jobs)
        local = LocalServer(options.socket, jobs, openings)
    except OSError as error:
        raise OptionError(
            f"--socket: {options.socket} cannot be used ({error.strerror or error}): "
            "give a short path in a folder that exists and that you may write to"
        ) from None
    metrics = MetricsServer(registry_of("checkpoint", CheckpointMetrics(jobs, staging, replicas)))
    try:
        if options.metrics_bind:
            await metrics.start(options.metrics_bind, options.metrics_address_file)
        address = openings.endpoint = await _start(server, options)
        folders = {"run_folder": str(options.run_folder), "staging": str(staging.path)}
        log.info("checkpoint daemon ready", node=options.node, address=address, **folders)
        accepting = asyncio.create_task(local.serve())
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait([accepting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()
        accepting.cancel()
        # The gRPC server still runs: this daemon may be the committer for its own last reports.
        ended = await jobs.close(DRAIN_S)
        # Memory is freed before retention, because an agent that stops kills the daemon meanwhile.
        await replicas.close()
        await local.close()
        staging.remove()
        # After the last commit, so that a finished job keeps as many checkpoints as its rules say.
        await committer.finish(RETENTION_S)
        return ended
    finally:
        await replicas.close()
        await local.close()
        await server.stop()
        await metrics.stop()
        await committers.close()
        committer.close()
        pools.close()


async def _start(server: RpcServer, options: argparse.Namespace) -> str:
    """Listen on the previous daemon's address, else on any free port, and publish the address."""
    # Other nodes keep the committer's address for a whole attempt, so a daemon that restarts within
    # the attempt must have the same address.
    address, address_file = "", options.address_file
    with contextlib.suppress(OSError):
        previous = address_file.read_text().strip()
        if previous:
            with contextlib.suppress(OptionError):
                address = await server.start(previous, [SERVICE])
    address = address or await server.start(joined(options.host, 0), [SERVICE])
    write_address("--address-file", address_file, address)
    return address


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megascale-checkpoint", description="Checkpoint daemon of one node."
    )
    parser.add_argument("--cluster", type=_label, required=True, help="name of the cluster")
    parser.add_argument("--node", type=_label, required=True, help="name of the node")
    parser.add_argument("--incarnation", required=True, help="id of this start of the node's agent")
    parser.add_argument("--run-folder", type=Path, required=True, help="the cluster's run folder")
    parser.add_argument(
        "--socket", type=Path, required=True, help="unix socket for the node's workers"
    )
    parser.add_argument(
        "--token-file", type=Path, required=True, help="file with the cluster token"
    )
    parser.add_argument(
        "--address-file", type=Path, required=True, help="where to write host:port once it serves"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this host to listen on; without TLS options, any address but loopback "
        "needs --insecure-network",
    )
    parser.add_argument(
        "--insecure-network",
        action="store_true",
        help="trust the network of --host: calls carry the token, and nothing is encrypted",
    )
    parser.add_argument(
        "--staging-folder", type=Path, default=default_base(), help="tmpfs folder of the slots"
    )
    parser.add_argument("--staging-limit-bytes", type=int, help="upper limit of staging memory")
    parser.add_argument(
        "--replica-streams",
        type=_streams,
        default=STREAMS,
        help=f"TCP connections per copy to or from a peer's memory, 1 to {MOST_STREAMS}",
    )
    certificates.add_options(parser)
    parser.add_argument(
        "--metrics-bind",
        type=bind_option,
        default="",
        help="serve /metrics at HOST:PORT; default: no metrics",
    )
    parser.add_argument(
        "--metrics-address-file", type=Path, help="where to write host:port of /metrics"
    )
    options = parser.parse_args(arguments)
    if not options.incarnation or "/" in options.incarnation or options.incarnation.startswith("."):
        parser.error("--incarnation must be a plain name")
    return options


def _streams(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_STREAMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 to {MOST_STREAMS}")
    return int(text)


def _label(text: str) -> str:
    if not is_dns_label(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a DNS-1123 label (a-z, 0-9, '-')")
    return text


if __name__ == "__main__":
    main()
