"""The interface of diagnostics: a diagnostic is one named check of a node.

Installed packages can add their own through :mod:`megascale_executor.diagnostics.registry`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.wanted_network import WantedNetwork
from megascale_job.config import JobConfig

DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """The attempt that the node prepares: the job, and its ranks on this node.

    Args:
        network: NCCL settings that the driver wants; None if it has no profile of the network.
        environment: variables of the job's processes in addition to the agent's; can hold secrets.
    """

    job: JobConfig
    ranks: tuple[int, ...]
    network: WantedNetwork | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """The node as a diagnostic sees it.

    Args:
        devices: devices to check: all of an idle node, or those that the attempt will use.
        folder: the node's folder; a check may write below it.
        daemon_endpoint: waits until the checkpoint daemon serves; "" if it does not.
        holds_slots: whether the daemon holds sealed snapshots of the job of this name.
        probe_ranks: runs one process per device that checks compute, and all-reduce among them
            (in a check of several nodes: among the devices of all). Repeated calls return the same
            result without running the processes again.
        attempt: the attempt that is being prepared; None for a check on request.
        peers: hosts that the node connects to: those of the drivers and of its last attempt.
    """

    devices: Sequence[DeviceFacts]
    folder: Path
    daemon_endpoint: Callable[[], Awaitable[str]]
    holds_slots: Callable[[str], bool]
    probe_ranks: Callable[[], Awaitable[Sequence[Finding]]]
    attempt: AttemptView | None = None
    peers: Sequence[str] = ()


@runtime_checkable
class Diagnostic(Protocol):
    """One check. Subclass it for the defaults below; the class is constructed without arguments.

    Attributes:
        name: its name in findings and requests: a-z, 0-9 and '_'.
        before_attempts: whether it runs before each attempt; a FAIL then quarantines the node.
        on_demand: whether it runs when diagnostics of an idle node are requested.
        with_nodes: whether it runs when the driver has nodes check each other, to find the one that
            broke an attempt; `probe_ranks` then all-reduces among the devices of all of them.
        quick: whether it is part of the quick set, which runs on demand by default.
        stage: diagnostics of a later stage are SKIPPED once one of an earlier stage has failed:
            reports of the host itself (0), tests of one device or disk (1), tests of several (2).
        timeout_s: limit of ``run``; beyond it the result is a FAIL.
    """

    name: str
    before_attempts: bool = True
    on_demand: bool = True
    with_nodes: bool = False
    quick: bool = True
    stage: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """Check the node; one finding per target (a device, a mount point), each with ``name``.

        It runs on the agent's event loop, so blocking work belongs in a thread or a process. An
        exception is reported as a FAIL, because a check that did not finish has not shown that the
        node works.
        """
        ...
