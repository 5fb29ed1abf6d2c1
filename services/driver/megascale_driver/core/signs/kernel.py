"""Faults in a node's kernel log that end a running attempt at once.

These are the few kinds whose meaning all catalogues agree on: the GPU is gone, or computes nothing
until it is reset. Its ranks may detect that only after minutes, or hang. Such a line is a fact, so
the attempt does not wait for them. No node is evicted here: that is decided when all nodes have
stopped and have reported their logs (:mod:`megascale_driver.core.recovery.log_roots`), within the
breaker's limits. Nothing ends at once if the line may be about another node: a machine with several
executors shares its kernel log, and a line that another node had before is software.
"""

from __future__ import annotations

from typing import Final

from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.cluster import Node, Report
from megascale_driver.core.values.job import Job

REASON: Final = reasons.LOG_ROOT_FOUND
KERNEL_LOG: Final = "kernel-log"  # policy of everything that follows from a fault in a kernel log
# Xid 79, 48, 95, 140, 119, 120, 62 and their texts. Left out: faults that a job may survive
# (NVLink, a context switch that timed out, a row that could not be remapped), and faults of the
# host.
AT_ONCE: Final = frozenset(
    {"gpu_fallen_off_bus", "gpu_ecc_uncorrectable", "gsp_rpc_timeout", "gpu_pmu_halt"}
)
_MAX_LINE = 400


def fatal(report: Report) -> tuple[Observation, ...]:
    """The lines of the kernel log in a report that end an attempt at once."""
    return tuple(
        one
        for one in report.logs
        if one.rank < 0
        and one.finding.kind.kernel
        and one.finding.kind.role == "root"
        and one.finding.kind.action == "evict_restart"
        and one.finding.kind.category in AT_ONCE
    )


def found(draft: Draft, job: Job, node: Node) -> Fault | None:
    """The fault in the kernel log of the job's node; None if none ends the attempt."""
    report = node.report
    if report is None or report.logs_of != (job.name, job.attempt):
        return None
    lines = fatal(report)
    if not lines or not draft.enforced(KERNEL_LOG) or draft.breaker.tripped_at_s:
        return None
    if not _of_this_node(draft, node):
        return None
    for one in sorted(lines, key=lambda line: line.at):
        if set(job.roots.get(known_as(one.finding.fingerprint), ())) <= {node.name}:
            kind, line = one.finding.kind, one.finding.sample[:_MAX_LINE]
            message = f"the kernel log of node {node.name} reports {kind.category}: {line}"
            return Fault(FaultKind.KERNEL_FAULT, node.name, draft.now_s, message)
    return None


def known_as(fingerprint: str) -> str:
    """The name of a root from logs, among those that a job remembers."""
    return f"{REASON}: {fingerprint}"


def _of_this_node(draft: Draft, node: Node) -> bool:
    """True if the GPU in the line can only be this node's: it has GPUs and its machine alone."""
    if all(device.kind != "cuda" for device in node.identity.devices):
        return False
    boot = node.identity.boot_id
    return not boot or all(
        other.name == node.name or other.identity.boot_id != boot for other in draft.nodes.values()
    )
