"""Command line of a node's agent: ``python -m megascale_executor.agent --help``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import uvloop

from megascale_common.node.addresses import on_route_to, split
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service import logs, tasks
from megascale_common.service.errors import OptionError
from megascale_common.service.identity import certificates
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.metrics import bind_option
from megascale_common.service.start import build_version, ends_with_a_sentence
from megascale_executor.agent.config import (
    LOOPBACK,
    AgentConfig,
    addresses_from,
    parse_devices,
    parse_topology,
)
from megascale_executor.agent.kernel_log import KERNEL_LOG, KERNEL_LOG_VARIABLE

SECRETS_FOLDER_VARIABLE = "MEGASCALE_SECRETS_FOLDER"  # `megascale up` passes these defaults on
RUN_AS_VARIABLE = "MEGASCALE_RUN_AS"

_EPILOG = """\
example: one node with four CPU slots, whose driver writes its address to a file
  python -m megascale_executor.agent --cluster demo --node n0 --driver-file run/driver.address \\
      --token-file run/token --device cpu --devices 0-3 --run-folder run --topology switch=s0 \\
      --address-file run/nodes/n0/executor.address

The agent connects to the driver, so the driver needs no port of the node. It starts the node's
checkpoint daemon and the template process of the workers; all of them end with the agent.
Logs: RUN_FOLDER/nodes/NODE/
Exit status: 0 after SIGTERM or SIGINT, 2 for an option that cannot work.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_executor.agent",
        description="Run one node of a cluster: the link to the driver, the workers, their logs "
        "and self-checks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=build_version())
    add = made.add_argument
    add("--cluster", required=True, help="name of the cluster; a driver of another is refused")
    add("--node", required=True, help="name of this node, unique in the cluster")
    driver = made.add_mutually_exclusive_group(required=True)
    driver.add_argument(
        "--driver", default="", help="drivers as HOST:PORT[,HOST:PORT], tried in turn"
    )
    driver.add_argument(
        "--driver-file", type=Path, help="file with the driver's address, read at every connection"
    )
    add("--token-file", type=Path, required=True, help="file with the cluster token (mode 0600)")
    add("--device", choices=("cpu", "cuda"), required=True, help="what a rank runs on")
    add("--devices", required=True, help="indices on the host that this node owns: 0,1,2,3 or 0-3")
    add(
        "--run-folder",
        type=Path,
        required=True,
        help="the cluster's folder; this node writes to nodes/NODE in it",
    )
    add(
        "--topology",
        action="append",
        default=[],
        help="labels for placement: switch=s0[,rack=r1]; may be repeated",
    )
    add(
        "--address-file",
        type=Path,
        required=True,
        help="where to write this agent's HOST:PORT once it serves",
    )
    add(
        "--host",
        default="",
        help="address at which peers reach this node; default: the local address of the route to "
        "the driver",
    )
    _add_metrics(made)
    add(
        "--template-command", default="", help="program that replaces the training side (for tests)"
    )
    add(
        "--kernel-log",
        type=Path,
        default=Path(os.environ.get(KERNEL_LOG_VARIABLE) or KERNEL_LOG),
        help="where hardware faults are read from: the kernel's log, or a recorded file "
        "(default %(default)s)",
    )
    _add_jobs(made)
    _add_certificates(made)
    add(
        "--checkpoint-sidecar",
        type=Path,
        metavar="SOCKET",
        help="the checkpoint daemon runs in another container, whose sidecar listens at SOCKET and "
        "has the daemon's certificate; default: the daemon is a child of the agent",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return made


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--metrics-bind",
        type=bind_option,
        default="",
        help="serve /metrics at HOST:PORT; the address is written to metrics.address "
        "and, for the checkpoint daemon, checkpoint.metrics.address in the node's folder; "
        "default: no metrics",
    )
    add(
        "--fast-counters-ms",
        type=int,
        default=0,
        metavar="MS",
        help="also sample the traffic of the ports every MS milliseconds, for the metrics; "
        "0 (default): only every second",
    )


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cache-folder",
        type=Path,
        metavar="FOLDER",
        help="where the code of jobs is kept; default: cache in the run folder",
    )
    add(
        "--secrets-folder",
        type=Path,
        default=os.environ.get(SECRETS_FOLDER_VARIABLE) or None,
        metavar="FOLDER",
        help="files that jobs can name as secrets (file:NAME); any job can name any of them",
    )
    add(
        "--run-as",
        default=os.environ.get(RUN_AS_VARIABLE, ""),
        metavar="ACCOUNT[,ACCOUNT]",
        help="accounts under which the processes of jobs can run, the first by default; "
        "only for an agent that runs as root",
    )


def _add_certificates(parser: argparse.ArgumentParser) -> None:
    certificates.add_options(parser)
    add = parser.add_argument
    add("--daemon-tls-key", type=Path, metavar="PEM", help="key of the checkpoint daemon")
    add(
        "--daemon-tls-certificate",
        type=Path,
        metavar="PEM",
        help="certificate of the checkpoint daemon, with the role checkpoint; default: the agent's",
    )


def _daemon_tls(options: argparse.Namespace, agent: Certificates | None) -> Certificates | None:
    key, certificate = options.daemon_tls_key, options.daemon_tls_certificate
    if key and options.checkpoint_sidecar is not None:
        raise OptionError("--daemon-tls-key: give it to the sidecar (--checkpoint-sidecar)")
    if bool(key) != bool(certificate) or (key and agent is None):
        raise OptionError(
            "--daemon-tls-key and --daemon-tls-certificate are given together, and with --tls-key"
        )
    if not key or agent is None:
        return agent
    found = Certificates(key, certificate, agent.ca)
    found.check()
    return found


def _own_address(options: argparse.Namespace) -> str:
    """The local address of the route to the drivers; loopback while their address is unknown."""
    known = addresses_from(_drivers(options), options.driver_file)
    if not known:
        return LOOPBACK
    try:
        return on_route_to(*split(known[0]))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--host: no route to the driver {known[0]} shows this node's address ({error}): "
            "give the address at which its peers reach it"
        ) from None


def _drivers(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(address for address in options.driver.split(",") if address)


def config_from(options: argparse.Namespace) -> AgentConfig:
    """Checked options.

    Raises:
        OptionError: a value that cannot work.
    """
    tls = certificates.of_options(options)
    return AgentConfig(
        cluster=options.cluster,
        node=options.node,
        drivers=_drivers(options),
        driver_file=options.driver_file,
        token_file=options.token_file,
        device_kind=options.device,
        devices=parse_devices(options.devices),
        run_folder=options.run_folder.absolute(),
        topology=parse_topology(options.topology),
        address_file=options.address_file.absolute(),
        host=options.host.strip("[]") or _own_address(options),
        template_command=tuple(shlex.split(options.template_command)),
        metrics_bind=options.metrics_bind,
        tls=tls,
        daemon_tls=_daemon_tls(options, tls),
        checkpoint_sidecar=options.checkpoint_sidecar,
        kernel_log=options.kernel_log,
        fast_counters_ms=options.fast_counters_ms,
        cache_folder=options.cache_folder and options.cache_folder.absolute(),
        secrets_folder=options.secrets_folder and options.secrets_folder.absolute(),
        run_as=tuple(name for name in options.run_as.split(",") if name),
    )


def main() -> int:
    """Run the agent; see ``--help``."""
    # Set by `megascale up`; an agent that an operator starts outlives the shell.
    if PARENT_PID_VARIABLE in os.environ:
        arm_parent_death()
    options = parser().parse_args()
    # grpc reads this when it is imported, so nothing above may import grpc. Its fork handlers run
    # in a child before the child executes its program: they write warnings, and were seen to end
    # the child with a segmentation fault (grpcio 1.85.1).
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from megascale_executor.agent.node_agent import run_agent

    logs.configure("agent", level=options.log_level)
    with ends_with_a_sentence("megascale agent"):
        uvloop.run(run_agent(config_from(options)))
    return tasks.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
