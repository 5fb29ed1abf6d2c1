"""The options of one agent, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megascale_common.service.errors import OptionError
from megascale_common.service.identity.certificates import Certificates
from megascale_executor.agent.kernel_log import KERNEL_LOG
from megascale_job.names import is_dns_label
from megascale_job.visible import counted

DeviceKindName = Literal["cpu", "cuda"]
LOOPBACK = "127.0.0.1"
MAX_DEVICES = 64
MAX_TOPOLOGY_LABELS = 16
MAX_FAST_COUNTERS_MS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """One node.

    Args:
        drivers: addresses of drivers; when empty, ``driver_file`` is read at every connection.
        run_folder: the cluster's folder; the node writes under ``nodes/NAME`` in it.
        host: address at which peers reach this node, without brackets: the rendezvous store, the
            agent's server.
        template_command: replaces the training side.
        kernel_log: the kernel's log, or a recorded file of its lines.
        metrics_bind: HOST:PORT of /metrics (the daemon uses the same host and any port); empty: no
            metrics.
        tls: the certificates of the agent, ``daemon_tls`` those of the node's checkpoint daemon.
        cache_folder: fetched code; None: ``cache`` in the run folder.
        secrets_folder: files that jobs may refer to as secrets.
        run_as: accounts under which jobs' processes may run; empty: the agent's own.
        checkpoint_sidecar: socket of the container that runs the checkpoint daemon; None: it is a
            child of the agent.
        fast_counters_ms: period of an additional sampling of the ports' traffic; 0: none.
    """

    cluster: str
    node: str
    drivers: tuple[str, ...]
    driver_file: Path | None
    token_file: Path
    device_kind: DeviceKindName
    devices: tuple[int, ...]
    run_folder: Path
    topology: Mapping[str, str]
    address_file: Path
    host: str = LOOPBACK
    template_command: tuple[str, ...] = ()
    metrics_bind: str = ""
    tls: Certificates | None = None
    daemon_tls: Certificates | None = None
    checkpoint_sidecar: Path | None = None
    kernel_log: Path = KERNEL_LOG
    fast_counters_ms: int = 0
    cache_folder: Path | None = None
    secrets_folder: Path | None = None
    run_as: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, name in (("--cluster", self.cluster), ("--node", self.node)):
            if not is_dns_label(name):
                raise OptionError(
                    f"{option} {name!r}: use 1 to 63 of a-z, 0-9 and '-', "
                    "neither first nor last a '-'"
                )
        if not 0 <= self.fast_counters_ms <= MAX_FAST_COUNTERS_MS:
            raise OptionError(
                f"--fast-counters-ms {self.fast_counters_ms}: give 1 to {MAX_FAST_COUNTERS_MS}, "
                "or 0 for none"
            )
        if bool(self.drivers) == (self.driver_file is not None):
            raise OptionError("give either --driver HOST:PORT[,HOST:PORT] or --driver-file FILE")
        if (
            not self.devices
            or len(set(self.devices)) != len(self.devices)
            or len(self.devices) > MAX_DEVICES
        ):
            raise OptionError(
                f"--devices: give 1 to {MAX_DEVICES} different indices, such as 0,1,2,3"
            )

    @property
    def node_folder(self) -> Path:
        """The folder of this node's logs, addresses and jobs."""
        return self.run_folder / "nodes" / self.node


def parse_devices(text: str) -> tuple[int, ...]:
    """Device indices from ``0,1,2`` or ``0-3`` or a mix.

    Raises:
        OptionError: not a list of indices.
    """
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise OptionError(
                f"--devices {text!r}: {part!r} is neither an index nor a range such as 0-3"
            )
        indices += range(int(first), int(last or first) + 1)
        if len(indices) > MAX_DEVICES:
            raise OptionError(f"--devices {text!r}: more than {MAX_DEVICES} devices")
    return tuple(indices)


def parse_topology(labels: Sequence[str]) -> dict[str, str]:
    """Labels from ``switch=s0,rack=r1``, given once or several times.

    Raises:
        OptionError: a label without '=', or too many of them.
    """
    parsed: dict[str, str] = {}
    for label in ",".join(labels).split(","):
        if not label:
            continue
        key, equals, value = label.partition("=")
        if not equals or not key or not value:
            raise OptionError(f"--topology {label!r}: write KEY=VALUE, such as switch=s0")
        parsed[key] = value
    if len(parsed) > MAX_TOPOLOGY_LABELS:
        raise OptionError(
            f"--topology: {counted(len(parsed), 'label')}; at most {MAX_TOPOLOGY_LABELS} are kept"
        )
    return parsed


def addresses_from(drivers: tuple[str, ...], driver_file: Path | None) -> list[str]:
    """Addresses to try: the given ones, or those in the file now (none without a file)."""
    if driver_file is None:
        return list(drivers)
    try:
        text = driver_file.read_text()
    except OSError:
        return []
    return [address for address in text.replace(",", " ").split() if address]
