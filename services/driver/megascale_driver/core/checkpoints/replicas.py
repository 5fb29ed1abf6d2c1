"""Replicas of snapshots: which node keeps whose, and which snapshots a restart can use.

Nodes report what they keep. A snapshot can be restored from memory if each rank has it in a sealed
slot of its own node, or as a replica on a node that is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import FailedCopies, ReplicaSource
from megascale_driver.core.values.cluster import Liveness, Node, Progress, SealedSnapshot
from megascale_driver.core.values.events import Evidence
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.placement.replicas import Member, choose_peers
from megascale_job.restore import RestorePlan, RestoreSource

MAX_CAUSE = 300  # characters of an error in a line
Snapshot = tuple[int, int]  # (step, attempt)


def peers(job: Job, nodes: Mapping[str, Node]) -> tuple[dict[str, str], dict[str, str]]:
    """The peer of each node of the attempt, and the address of the peer's replica server.

    Both are empty for a job without replicas, or on one node.
    """
    if not job.config.checkpoint.replicas:
        return {}, {}
    members = [
        Member(slot.node, slot.ranks, nodes[slot.node].identity.topology)
        for slot in job.slots
        if slot.node in nodes
    ]
    chosen = choose_peers(members, job.config.layout)
    reports = {name: nodes[name].report for name in chosen.values()}
    endpoints = {
        name: report.replica_endpoint for name, report in reports.items() if report is not None
    }
    return chosen, {node: endpoints.get(peer, "") for node, peer in chosen.items()}


def kept(job: Job, nodes: Mapping[str, Node]) -> dict[int, dict[Snapshot, str]]:
    """The replicas of each rank on live nodes, each with the first such node by name."""
    found: dict[int, dict[Snapshot, str]] = {}
    for name in sorted(nodes):
        node = nodes[name]
        if node.liveness is not Liveness.ALIVE or not node.connected:
            continue
        if node.report is None or not node.report.replica_endpoint:
            continue
        for item in _of(job, node, "replicas"):
            found.setdefault(item.rank, {}).setdefault((item.step, item.attempt), name)
    return found


def sealed_here(job: Job, nodes: Mapping[str, Node]) -> dict[int, set[Snapshot]]:
    """The snapshots that each rank of the attempt has sealed on its own node."""
    found: dict[int, set[Snapshot]] = {}
    for slot in job.slots:
        node = nodes.get(slot.node)
        for rank in slot.ranks:
            found[rank] = set()
        for item in _of(job, node, "sealed") if node is not None else ():
            if item.rank in slot.ranks:
                found[item.rank].add((item.step, item.attempt))
    return found


def sources(job: Job, nodes: Mapping[str, Node], restore: RestorePlan) -> tuple[ReplicaSource, ...]:
    """The ranks that restore from a replica, because their own node lacks the state."""
    if restore.source is not RestoreSource.MEMORY:
        return ()
    wanted, copies = (restore.step, restore.written_by_attempt), kept(job, nodes)
    found = []
    for rank, own in sorted(sealed_here(job, nodes).items()):
        name = copies.get(rank, {}).get(wanted)
        report = nodes[name].report if name is not None and wanted not in own else None
        if name is not None and report is not None:
            found.append(ReplicaSource(rank, name, report.replica_endpoint))
    return tuple(found)


def describe(found: Iterable[ReplicaSource]) -> str:
    """The ranks that restore from each node, for the audit log; "" without any."""
    by_node: dict[str, list[str]] = {}
    for source in found:
        by_node.setdefault(source.node, []).append(str(source.rank))
    parts = [f"rank {', '.join(ranks[:8])} from node {node}" for node, ranks in by_node.items()]
    return f" ({'; '.join(parts[:8])})" if parts else ""


def replicated_step(job: Job, nodes: Mapping[str, Node]) -> int:
    """Newest step of the attempt with a replica of every rank on another node; 0: none."""
    copies, common = kept(job, nodes), set[int]()
    for number, rank in enumerate(range(job.config.layout.world_size)):
        steps = {step for step, attempt in copies.get(rank, {}) if attempt == job.attempt}
        common = steps if number == 0 else common & steps
    return max(common, default=0)


def problem(job: Job, nodes: Mapping[str, Node]) -> str:
    """Why snapshots, or the newest one, have no replicas; "" if there is no problem."""
    if job.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
        return ""
    if len(job.slots) < 2:
        return "the attempt has one node, so there is no other to keep replicas"
    for name, target in job.current.replica_orders.targets.items():
        if not target:
            peer = job.current.replica_orders.peers[name]
            return f"node {peer} did not report a replica server at the start"
    for slot in job.slots:
        failure = _failure(job, nodes.get(slot.node))
        if failure is not None:
            return failure
    return ""


def report(draft: Draft, node: str, job: Job, progress: Progress) -> None:
    """Log failed copies that a heartbeat reports: one line per power of ten of steps."""
    failure = progress.replica_failure
    if failure is None or failure.attempt != job.attempt:
        return
    last = job.current.failed_copies
    if failure.step <= last.step:
        return  # already counted: another rank of the same step, or a repetition
    count = last.count + 1
    draft.put_attempt(
        job.name,
        replace(draft.jobs[job.name].current, failed_copies=FailedCopies(failure.step, count)),
    )
    if str(count).strip("0") != "1":
        return
    error = failure.error[:MAX_CAUSE]
    peer = job.current.replica_orders.peers.get(node, "")
    draft.log_job(
        job,
        reasons.REPLICA_FAILED,
        f"the snapshot of step {failure.step} of rank {failure.rank} on {node} has no replica on "
        f"{peer or 'another node'}: {error} ({count} of this attempt)",
        actor=f"nodes/{node}",
        evidence=(Evidence("replica-error", f"nodes/{node}", error),),
        outcome="training continues; the next snapshot is copied again",
    )


def _failure(job: Job, node: Node | None) -> str | None:
    for progress in node.report.progress if node is not None and node.report is not None else ():
        failure = progress.replica_failure
        if progress.job == job.name and failure is not None and failure.attempt == job.attempt:
            name = node.name if node is not None else ""
            return (
                f"step {failure.step} of rank {failure.rank} on {name}: {failure.error[:MAX_CAUSE]}"
            )
    return None


def _of(job: Job, node: Node, what: str) -> Iterator[SealedSnapshot]:
    """Snapshots of the job that a node reports, except of attempts that were never issued."""
    for progress in node.report.progress if node.report is not None else ():
        items: tuple[SealedSnapshot, ...] = getattr(progress, what)
        for item in items if progress.job == job.name else ():
            if item.layout_digest and 0 < item.attempt <= job.attempt:
                yield item


def sealed_everywhere(job: Job, nodes: Mapping[str, Node]) -> tuple[int, int]:
    """(step, attempt) of the newest snapshot that every rank has in memory; (0, 0): none.

    A rank has it if it is sealed on its own node, or if a live node keeps its replica. It counts
    only if one attempt wrote it on all ranks: two attempts may have reached the same step with
    different states. Refused steps, and attempts that were never issued, do not count.
    """
    copies = kept(job, nodes)
    common: set[tuple[int, int]] | None = None
    for rank, own in sealed_here(job, nodes).items():
        # Only earlier attempts: the one that is opening has written nothing yet.
        steps = {item for item in own | set(copies.get(rank, {})) if item[1] < job.attempt}
        common = steps if common is None else common & steps
    usable = [
        item
        for item in common or ()
        if item[0] not in job.refused_steps and not job.abandoned(*item)
    ]
    return max(usable, default=(0, 0))
