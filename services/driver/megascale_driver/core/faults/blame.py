"""Blame for failed attempts: the node that one counts against, and when the job leaves it.

A failure counts against the node of the culprit. If different nodes have the same root, it is not
about the nodes but about software, a storage or a network that they share: then the job leaves no
node for it, and the log reports that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megascale_common.node.logs.matcher import kind_of
from megascale_common.node.logs.templates import fingerprint
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import job_faults
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.cluster import Node, Root, usable
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_job.visible import counted

MAX_ROOTS = 8  # per job; the oldest are forgotten
MAX_NODES = 32  # remembered with a root
MAX_CHECK_ROOTS = 64
# Faults that count against a node. BAD_JOB does so only if the job ran before: a mount may be gone
# there.
_BLAMED = frozenset(
    {
        FaultKind.WORKER_EXITED,
        FaultKind.BAD_JOB,
        FaultKind.DEADLINE,
        FaultKind.HANG,
        FaultKind.OPEN_FAILED,
    }
)
_FOLLOWS = frozenset({"collective_timeout", "peer_closed_secondary"})
_GONE = frozenset({FaultKind.NODE_DEAD, FaultKind.NODE_EVICTED})


def culprit(faults: tuple[Fault, ...]) -> Fault | None:
    """The fault to name as the cause: the earliest that is not a symptom, else the earliest."""
    order = sorted(faults, key=lambda f: (f.kind is FaultKind.WORKER_SYMPTOM, f.at_s))
    return order[0] if order else None


def blame(draft: Draft, job: Job) -> None:
    """Count a failure against its node; the job leaves a node that fails repeatedly.

    Other jobs can still use the node: the driver cannot tell whether the node or the job's own code
    is at fault. The committer's node is left at its first failure, if another one stands by.
    """
    guilty = _guilty(job)
    if guilty is None or is_software(draft, job, guilty):
        return
    job = draft.jobs[job.name]
    count = job.node_failures.get(guilty.node, 0) + 1
    job = draft.put_job(
        replace(draft.jobs[job.name], node_failures={**job.node_failures, guilty.node: count})
    )
    if guilty.node in job.evicted:
        return
    if guilty.kind is FaultKind.OPEN_FAILED:
        if stands_by(draft, job, guilty.node):
            _leave(draft, job, guilty, "is left, since another node stands by")
        return
    patience = draft.policy.node_failures
    if guilty.kind is FaultKind.HANG:
        patience = draft.policy.node_hangs
    elsewhere = any(failures for name, failures in job.node_failures.items() if name != guilty.node)
    if count < patience or elsewhere:
        return  # failures that follow the job from node to node are caused by the job
    _leave(
        draft,
        job,
        guilty,
        f"failed {counted(count, 'time')} in a row without progress, most recently",
    )


def leave_for_another(draft: Draft, job: Job) -> bool:
    """Leave the node that failed last, if an untried one stands by; True if the job did."""
    guilty = _guilty(job)
    if not draft.enforced("repeated-failure"):
        return False
    if guilty is None or guilty.node in job.evicted or seen_alike(draft, job, guilty):
        return False
    if not stands_by(draft, job, guilty.node):
        return False
    _leave(draft, job, guilty, "is left before the job ends, since another stands by")
    return True


def stands_by(draft: Draft, job: Job, node: str) -> bool:
    """True if an idle node that the job has not left could take the place of ``node``."""
    slot = job.slot_of(node)
    wanted = len(slot.devices) if slot is not None else 1
    return any(True for _ in standing_by(draft, job, wanted))


def standing_by(draft: Draft, job: Job, devices: int) -> Iterator[Node]:
    """Idle nodes with enough devices that the job has not left and that are no spares of others."""
    others = [other for other in draft.jobs.values() if other.name != job.name]
    taken = {name for other in others for name in other.spares} | set(job.evicted)
    taken |= draft.holders().keys()
    for name, node in draft.nodes.items():
        if name not in taken and usable(node) and len(node.identity.devices) >= devices:
            yield node


def seen_alike(draft: Draft, job: Job, fault: Fault) -> tuple[str, ...]:
    """The nodes that had the same root, if there are too many of them to blame nodes."""
    nodes = job.roots.get(root_of(fault), ())
    check = fault.kind is FaultKind.CHECK_FAILED
    return nodes if len(nodes) >= software_limit(draft.policy, job, check=check) else ()


def software_limit(policy: Policy, job: Job, *, check: bool) -> int:
    """Number of nodes with the same root from which on it is not about the nodes.

    In a fleet of thousands some nodes break in the same way within an hour by chance: a common
    cause shows on a larger share of them.
    """
    least = policy.software_checks if check else policy.software_nodes
    return max(least, min(math.ceil(len(job.slots) * policy.software_share), MAX_NODES))


def root_of(fault: Fault) -> str:
    """The fingerprint of a fault."""
    message = fault.message
    if fault.rank >= 0:
        message = message.replace(f"rank {fault.rank} ", "")
    return fingerprint(fault.kind, message, fault.node)


def check_is_about_its_node(draft: Draft, job: Job, fault: Fault) -> bool:
    """True if a failed self-check counts against its node; remembers the finding."""
    root, since_s = root_of(fault), draft.now_s - draft.policy.software_window_s
    recent = tuple(item for item in draft.breaker.roots if item.at_s > since_s)
    others = [item.node for item in recent if item.fingerprint == root]
    nodes = tuple(dict.fromkeys((*others, fault.node)))
    recent = tuple(i for i in recent if (i.node, i.fingerprint) != (fault.node, root))
    draft.remember_roots((*recent, Root(draft.now_s, fault.node, root))[-MAX_CHECK_ROOTS:])
    if len(nodes) < software_limit(draft.policy, job, check=True):
        return True
    known = root in job.roots
    _remember(draft, job, root, nodes)
    if not known:
        _log_software(draft, job, fault, nodes)
    return False


def _guilty(job: Job) -> Fault | None:
    """The fault that counts against its node; a node that is gone explains all others."""
    faults = job.current.faults
    if any(f.kind in _GONE for f in faults):
        return None
    found = culprit(tuple(f for f in faults if f.kind in _BLAMED))
    if found is None or not found.node or _only_follows(found):
        return None
    return found


def _only_follows(fault: Fault) -> bool:
    """True if the error of a worker only follows from faults elsewhere.

    A collective that timed out, or a connection that a peer closed, blames no node.
    """
    if fault.kind is not FaultKind.WORKER_EXITED:
        return False
    kind = kind_of(fault.message)
    return kind is not None and kind.category in _FOLLOWS


def is_software(draft: Draft, job: Job, guilty: Fault, root: str = "") -> bool:
    """Remember the root; True if several nodes have had it since the last progress.

    ``root``: the fingerprint, if it is not that of the fault's message.
    """
    root = root or root_of(guilty)
    before = job.roots.get(root, ())
    nodes = before if guilty.node in before else (*before, guilty.node)[:MAX_NODES]
    _remember(draft, job, root, nodes)
    limit = software_limit(draft.policy, job, check=False)
    if len(nodes) < limit:
        return False
    if len(before) < limit:
        _log_software(draft, draft.jobs[job.name], guilty, nodes)
    return True


def _remember(draft: Draft, job: Job, root: str, nodes: tuple[str, ...]) -> None:
    others = [(key, value) for key, value in job.roots.items() if key != root]
    draft.put_job(replace(draft.jobs[job.name], roots=dict([*others, (root, nodes)][-MAX_ROOTS:])))


def _log_software(draft: Draft, job: Job, fault: Fault, nodes: tuple[str, ...]) -> None:
    draft.log_job(
        job,
        reasons.SOFTWARE_SUSPECTED,
        f"the same failure on nodes {', '.join(nodes)}: {fault.message}",
        policy="fingerprint",
        evidence=(Evidence("fingerprint", f"nodes/{fault.node}", root_of(fault)),),
        outcome="no node is evicted for it: look at the job, its data, its storage or the build",
    )


def _leave(draft: Draft, job: Job, guilty: Fault, why: str) -> None:
    job, enforced = draft.jobs[job.name], draft.enforced("repeated-failure")
    if enforced:
        draft.put_job(replace(draft.jobs[job.name], evicted=(*job.evicted, guilty.node)))
    draft.log_node(
        guilty.node,
        job,
        reasons.NODE_EVICTED,
        f"node {guilty.node} {why}: {guilty.message}",
        policy="repeated-failure",
        mode="ENFORCE" if enforced else "OBSERVE",
        outcome=job_faults.left_by(job) if enforced else "nothing: the rule is observed",
    )
