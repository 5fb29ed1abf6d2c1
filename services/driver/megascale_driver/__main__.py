"""Starts a driver.

``python -m megascale_driver --cluster NAME --etcd HOST:PORT --token-file FILE``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import uvloop

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import TlsConfig
from megascale_common.etcd.keeper_process import KeeperProcess
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service import logs, tasks
from megascale_common.service.channel import present
from megascale_common.service.clock import SystemClock
from megascale_common.service.errors import OptionError, ServiceError
from megascale_common.service.identity import certificates
from megascale_common.service.metrics import MetricsServer, bind_option
from megascale_common.service.server import RpcServer
from megascale_common.service.start import (
    build_version,
    ends_with_a_sentence,
    read_token,
    write_address,
)
from megascale_driver.analysis.progress import HangLimits
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.trimmer import DAY_S, Retention
from megascale_driver.nodes.job_network import JobNetwork, add_network_option
from megascale_driver.platform.etcd_check import check_endpoints, require_etcd
from megascale_driver.service.driver_service import DriverService
from megascale_driver.service.link_service import LinkService
from megascale_driver.service.people_port import PeoplePort, add_people_options
from megascale_driver.service.queue_options import add_queue_options
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader
from megascale_driver.shell.loop import (
    LoopWatch,
    collect_periodically,
    freeze_all,
    freezing_with_term,
)
from megascale_driver.shell.metrics import DriverMetrics, Sources
from megascale_driver.telemetry import setup
from megascale_job.names import is_dns_label
from megascale_planner.network.profile import BadProfile

SERVICES = ("megascale.v1.DriverService", "megascale.v1.ExecutorLinkService")
STOP_GRACE_S = 1.0
_log = logs.get(__name__)


def main() -> None:
    """Serve until SIGTERM or SIGINT; exit status 0 then.

    The status is 2 for an option or an environment that cannot work, and 3 without etcd.
    """
    if PARENT_PID_VARIABLE in os.environ:
        # Started by `megascale up` or a test, and not by a service manager: end with the parent.
        arm_parent_death()
    parser = _parser()
    options = parser.parse_args()
    if not is_dns_label(options.cluster):
        parser.error(
            f"--cluster: {options.cluster!r} is not a DNS-1123 label: use a-z, 0-9 and '-'"
        )
    if options.heartbeat_interval_s <= 0:
        parser.error("--heartbeat-interval-s: give a positive number of seconds")
    if not 0 < options.hang_floor_s < math.inf:
        parser.error("--hang-floor-s: give a positive number of seconds")
    if not 0 <= options.sweep_every_s < math.inf:
        parser.error("--sweep-every-s: give a number of seconds, or 0 for no sweep")
    try:
        JobNetwork.of_option(options.network_profile, options.hang_floor_s)
    except BadProfile as error:
        parser.error(f"--network-profile: {error}")
    logs.configure("driver")
    with ends_with_a_sentence("megascale driver"):
        token, tls = read_token(options.token_file), certificates.of_options(options)
        present(tls)
        uvloop.run(_serve(options, token, tls))
    if status := tasks.exit_status():
        raise SystemExit(status)


async def _serve(
    options: argparse.Namespace, token: str, tls: certificates.Certificates | None
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    prefix = options.prefix or f"/megascale/{options.cluster}/v1"
    endpoints = options.etcd.split(",")
    check_endpoints("--etcd", endpoints)
    etcd_tls = _etcd_tls(options)
    async with EtcdClient(endpoints, prefix=prefix.rstrip("/") + "/", tls=etcd_tls) as client:
        with KeeperProcess(endpoints, etcd_tls) as keeper:
            await _serve_until(stop, options, token, client, keeper, tls)


async def _serve_until(
    stop: asyncio.Event,
    options: argparse.Namespace,
    token: str,
    client: EtcdClient,
    keeper: KeeperProcess,
    tls: certificates.Certificates | None,
) -> None:
    # The address is known only once the server has a port; nothing leads before that.
    engine = Engine(_policy(options), SystemClock(), token, "")
    engine.orders.network = JobNetwork.of_option(options.network_profile, options.hang_floor_s)
    server = RpcServer(token, tls=tls)

    async def set_serving(leads: bool) -> None:
        for name in SERVICES:
            await server.set_serving(name, leads)
        await people.set_serving(leads)

    leader = Leader(
        client,
        engine,
        freezing_with_term(set_serving),
        keeper,
        retention=_retention(options),
        sweep_every_s=options.sweep_every_s,
    )
    telemetry = setup.start(options, engine)
    stored = (telemetry.views, telemetry.plans) if telemetry is not None else ()
    service = DriverService(engine, leader, options.cluster, *stored)
    service.add_to(server.server)
    spans = telemetry.intake if telemetry is not None else None
    links = LinkService(engine, leader, options.cluster, spans, options.topology)
    links.add_to(server.server)
    people = PeoplePort(options, token, tls, service)
    try:
        engine.address = await server.start(options.bind, SERVICES, serving=False)
        await people.start()
        metrics = await _serve_metrics(engine, options, telemetry)
        await require_etcd("--etcd", client.endpoints, tls=client.tls)
        if options.address_file is not None:
            write_address("--address-file", options.address_file, engine.address)
    except ServiceError:
        await asyncio.gather(server.stop(0), people.stop(0))
        raise
    _log.info("the driver serves", address=engine.address, build=build_version())
    freeze_all()  # objects from the start live as long as the process: never collect them
    collecting = tasks.repeated(collect_periodically, "collections")
    keeper.start()  # now, because a new term must not wait for its start
    term = asyncio.create_task(leader.run())
    stopping = asyncio.create_task(stop.wait())
    # The term task ends only with a defect, which _shut_down raises again.
    await asyncio.wait((term, stopping), return_when=asyncio.FIRST_COMPLETED)
    collecting.cancel()
    await _shut_down(server, people, engine, term)
    if telemetry is not None:
        await telemetry.close()
    await metrics.stop()


def _policy(options: argparse.Namespace) -> Policy:
    limits = HangLimits(floor_s=options.hang_floor_s)
    return replace(
        Policy.for_interval(options.heartbeat_interval_s, limits),
        quotas=dict(options.quota),
        preempt=options.preemption,
        keep_ended_jobs=options.keep_ended_jobs,
        keep_ended_s=options.keep_ended_days * 86_400.0,
        forget_dead_s=options.forget_dead_hours * 3600.0,
    )


async def _serve_metrics(
    engine: Engine, options: argparse.Namespace, telemetry: setup.Telemetry | None
) -> MetricsServer:
    """Let metrics observe the engine; serve them with --metrics-bind."""
    watch = LoopWatch()
    watch.start()
    sources = Sources()
    if telemetry is not None:
        sources = Sources(
            collectives=telemetry.plans.collectives,
            plans=telemetry.plans.comparisons,
            slow=telemetry.stragglers.ratios,
            hot=telemetry.stragglers.hot_ranks,
            spans=lambda: telemetry.intake.counts,
        )
    figures = DriverMetrics(engine, watch, sources)
    engine.observers.append(figures)
    server = MetricsServer(figures.registry)
    if options.metrics_bind:
        await server.start(options.metrics_bind, options.metrics_address_file)
    return server


async def _shut_down(
    server: RpcServer, people: PeoplePort, engine: Engine, term: asyncio.Task[None]
) -> None:
    """Report NOT_SERVING, resign so that a standby leads at once, let calls end."""
    for name in ("", *SERVICES):
        await server.set_serving(name, False)
    failed = term.done() and not term.cancelled() and term.exception()
    term.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await term
    engine.links.close_all()
    await engine.close()
    await asyncio.gather(server.stop(STOP_GRACE_S), people.stop(STOP_GRACE_S))
    if failed:
        raise failed


def _etcd_tls(options: argparse.Namespace) -> TlsConfig | None:
    """How to reach etcd; raises OptionError for files that cannot be used together."""
    if options.etcd_ca is None:
        if options.etcd_certificate or options.etcd_key:
            raise OptionError("--etcd-ca: give it with --etcd-certificate and --etcd-key")
        return None
    try:
        found = TlsConfig(options.etcd_ca, options.etcd_certificate, options.etcd_key)
        found.credentials()
    except ValueError as error:
        raise OptionError(f"--etcd-certificate, --etcd-key: {error}") from None
    return found


def _add_etcd_tls(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("ca", "authority whose etcd is trusted; etcd is reached with TLS then"),
        ("certificate", "certificate with which the driver shows etcd who it is"),
        ("key", "key of --etcd-certificate"),
    ):
        parser.add_argument(f"--etcd-{name}", type=Path, metavar="PEM", help=what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megascale_driver",
        description="The driver: schedules the jobs of one cluster and recovers them from faults. "
        "Start a second one as a standby; etcd elects the leader.",
    )
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="name of the cluster (DNS-1123 label)"
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where to serve; with port 0 any free one",
    )
    parser.add_argument(
        "--etcd", required=True, metavar="HOST:PORT[,..]", help="members of the etcd cluster"
    )
    parser.add_argument(
        "--sweep-every-s",
        type=float,
        default=0.0,
        metavar="S",
        help="run the full diagnostics of one idle node every so many seconds; 0 (default): never",
    )
    parser.add_argument(
        "--prefix",
        default="",
        metavar="KEY",
        help="prefix of the keys in etcd; default /megascale/NAME/v1",
    )
    parser.add_argument(
        "--token-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="file with the cluster token (mode 0600)",
    )
    parser.add_argument(
        "--address-file",
        type=Path,
        metavar="FILE",
        help="write host:port to this file once it serves",
    )
    _add_metrics_and_limits(parser)
    add_queue_options(parser)
    add_network_option(parser)
    certificates.add_options(parser)
    _add_etcd_tls(parser)
    add_people_options(parser)
    _add_retention(parser)
    setup.add_options(parser)
    parser.add_argument("--version", action="version", version=build_version())
    return parser


def _add_metrics_and_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-bind",
        type=bind_option,
        default="",
        metavar="HOST:PORT",
        help="serve /metrics there; default: no metrics",
    )
    parser.add_argument(
        "--metrics-address-file",
        type=Path,
        metavar="FILE",
        help="write the host:port of /metrics to this file",
    )
    parser.add_argument(
        "--heartbeat-interval-s",
        type=float,
        default=5.0,
        metavar="S",
        help="time between the heartbeats of a node; default 5",
    )
    parser.add_argument(
        "--hang-floor-s",
        type=float,
        default=60.0,
        metavar="S",
        help="a step counts as hung after this time at the earliest; default 60",
    )


def _add_retention(parser: argparse.ArgumentParser) -> None:
    kept = Retention()
    parser.add_argument(
        "--audit-lines",
        type=_positive,
        default=kept.lines,
        metavar="N",
        help=f"newest lines of the cluster's log and of each job's that stay in etcd; default "
        f"{kept.lines}, of a job that has ended {kept.ended_lines} at most",
    )
    parser.add_argument(
        "--audit-days",
        type=_positive,
        default=int(kept.age_s / DAY_S),
        metavar="N",
        help=f"days for which a line stays there at most; default {kept.age_s / DAY_S:.0f}",
    )
    parser.add_argument(
        "--audit-export",
        type=Path,
        metavar="FOLDER",
        help="append lines to audit-DATE.jsonl in this folder before they are removed from etcd; "
        "default: they are removed without",
    )


def _retention(options: argparse.Namespace) -> Retention:
    lines: int = options.audit_lines
    kept = Retention()
    return Retention(
        lines=lines,
        age_s=options.audit_days * DAY_S,
        ended_lines=min(lines, kept.ended_lines),
        export_to=options.audit_export,
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000000000")
    return int(text)


if __name__ == "__main__":
    main()
