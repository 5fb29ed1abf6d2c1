"""The root that the logs of a stopped attempt name, and what follows for the nodes.

All nodes of the attempt have stopped and have reported their logs to the end. The verdict comes
from :mod:`megascale_driver.analysis.logs.correlation`; here it is logged and acted upon. A fatal
fault in a kernel log is a fact about its machine. Text of a worker is an inference, and observed
unless an operator has it enforced. The same root on several machines, also in earlier attempts
since the last progress, is software: then no node is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from megascale_driver.analysis.logs.correlation import Verdict, verdict
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import blame, breaker, job_faults
from megascale_driver.core.nodes import nodes
from megascale_driver.core.signs import kernel
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.events import Audit, Evidence
from megascale_driver.core.values.job import Job
from megascale_job.visible import agreed, counted

REASON: Final = kernel.REASON
KERNEL_LOG: Final = kernel.KERNEL_LOG
LOG_ROOT = "log-root"
MAX_NAMED = 8
_MAX_LINE = 400


@dataclass(frozen=True, slots=True)
class LogRoot:
    """A root that the audit log has, in the form in which it is shown."""

    attempt: int
    node: str
    rank: int
    category: str
    action: str
    line: str
    nodes: tuple[str, ...]
    set_aside: int


def found_in(draft: Draft, job: Job) -> Verdict | None:
    """The root of the job's newest attempt by the logs of its nodes; None without one."""
    seen = []
    for slot in job.slots:
        node = draft.nodes.get(slot.node)
        if node is None or node.report is None:
            continue
        if node.report.logs_of == (job.name, job.attempt):
            host = node.identity.boot_id
            seen += [replace(one, node=slot.node, host=host) for one in node.report.logs]
    result = verdict(seen)
    return result if result.role == "root" and result.fingerprint else None


def write(draft: Draft, job: Job) -> Verdict | None:
    """Find the root and log it."""
    root = found_in(draft, job)
    if root is None:
        return None
    line = root.evidence[:_MAX_LINE]
    others = counted(root.set_aside, "other line")
    aside = f"; {others} {agreed(root.set_aside, 'are')} set aside" if root.set_aside else ""
    named = root.nodes[:MAX_NAMED]
    draft.log_node(
        root.node,
        job,
        REASON,
        f"{_where(root)} has the root: {root.category}: {line}{aside}",
        policy=_policy(root),
        mode="ENFORCE" if draft.enforced(_policy(root)) else "OBSERVE",
        evidence=(
            Evidence("log", _source(root), root.category, root.action),
            Evidence("log-line", _source(root), line),
            Evidence("log-nodes", "driver", ",".join(named)),
            Evidence("log-set-aside", "driver", str(root.set_aside)),
        ),
        outcome=_outcome(root),
    )
    return root


def decide(draft: Draft, job: Job, root: Verdict | None) -> bool:
    """Act on the root; True if that settles which node is blamed.

    A fault of hardware or driver evicts its machine, a shared one evicts no node.
    """
    if root is None or root.category == "unknown" or root.weak:
        return False
    if not root.shared and root.action != "evict_restart":
        return False
    fault, name_of_root = _fault(draft, root), kernel.known_as(root.fingerprint)
    if root.shared:
        for name in root.nodes:
            blame.is_software(draft, draft.jobs[job.name], replace(fault, node=name), name_of_root)
        return True
    machine = replace(fault, node=root.nodes[0])  # nodes of one machine count as one
    if blame.is_software(draft, job, machine, name_of_root):
        return True
    if not draft.enforced(_policy(root)):
        return False  # the logged line has the mode
    if not root.kernel:
        job_faults.leave(draft, draft.jobs[job.name], fault, LOG_ROOT, job_faults.left_by(job))
        return True
    for name in root.nodes:
        if breaker.allows(draft, name, KERNEL_LOG):
            evidence = (Evidence("log-line", _source(root), root.evidence[:_MAX_LINE]),)
            nodes.quarantine(draft, name, fault.message, policy=KERNEL_LOG, evidence=evidence)
            held = draft.jobs[job.name]
            if name not in held.evicted:
                draft.put_job(replace(draft.jobs[job.name], evicted=(*held.evicted, name)))
        else:
            job_faults.leave(
                draft,
                draft.jobs[job.name],
                replace(fault, node=name),
                KERNEL_LOG,
                "too many nodes were evicted recently: only this job leaves the node",
            )
    return True


def shown(line: Audit) -> LogRoot | None:
    """The root in a line of the audit log; None if it is another kind of line."""
    if line.reason != REASON.name:
        return None
    parts = {one.kind: one for one in line.evidence}
    if not {"log", "log-line", "log-nodes", "log-set-aside"} <= set(parts):
        return None
    rank = parts["log"].source.rpartition("/ranks/")[2]
    count = parts["log-set-aside"].digest
    return LogRoot(
        attempt=line.attempt,
        node=line.subject.removeprefix("nodes/"),
        rank=int(rank) if rank.isdecimal() else -1,
        category=parts["log"].digest,
        action=parts["log"].uri,
        line=parts["log-line"].digest,
        nodes=tuple(name for name in parts["log-nodes"].digest.split(",") if name),
        set_aside=int(count) if count.isdecimal() else 0,
    )


def _fault(draft: Draft, root: Verdict) -> Fault:
    message = f"{_where(root)} reports {root.category}: {root.evidence[:_MAX_LINE]}"
    return Fault(FaultKind.WORKER_EXITED, root.node, draft.now_s, message, root.rank, root.kernel)


def _policy(root: Verdict) -> str:
    return KERNEL_LOG if root.kernel else LOG_ROOT


def _where(root: Verdict) -> str:
    if root.rank >= 0:
        return f"the log of rank {root.rank} on node {root.node}"
    return f"the kernel log of node {root.node}"


def _source(root: Verdict) -> str:
    return f"nodes/{root.node}" + (f"/ranks/{root.rank}" if root.rank >= 0 else "/kernel")


def _outcome(root: Verdict) -> str:
    if root.shared:
        return f"the same on nodes {', '.join(root.nodes[:MAX_NAMED])}: no node is evicted for it"
    return f"it asks for: {root.action}"
