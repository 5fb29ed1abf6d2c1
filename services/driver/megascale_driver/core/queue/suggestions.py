"""Suggestions to the caller about a job, each with its command; the most useful comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megascale_driver.core.signs.hang import Stall
from megascale_driver.core.values.attempt import FaultKind
from megascale_driver.core.values.cluster import Cluster, Disposition, Liveness, Node, candidate
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job, JobPhase
from megascale_job.visible import counted

MAX_SUGGESTIONS = 6


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Something to do; the caller replaces words in capitals in ``command``."""

    text: str
    command: str


def suggestions(
    state: Cluster, job: Job, cause: Audit | None, stall: Stall | None = None
) -> tuple[Suggestion, ...]:
    """Up to six things to do about ``job``; ``cause``: what brought it where it is.

    ``stall``: the standstill of the job; None while it keeps its pace.
    """
    found = list(_about_the_job(job, cause)) + list(_about_its_phase(state, job))
    if job.active and job.current.hot_experts:
        found[:0] = _to_even_loads(job)
    if stall is not None:
        rank = stall.culprit.rank if stall.culprit is not None else 0
        now = Suggestion(
            f"read the log of rank {rank}: as far as is known, it holds up the job",
            f"megascale logs {job.name} --rank {rank}",
        )
        found.insert(0, now)
    if cause is not None:
        found += _about_a_node(state, job, cause.subject.removeprefix("nodes/"))
        found.append(
            Suggestion("see every event with its evidence", f"megascale events {job.name} --json")
        )
    by_command = {suggestion.command: suggestion for suggestion in reversed(found)}
    return tuple(s for s in found if by_command[s.command] is s)[:MAX_SUGGESTIONS]


def _to_even_loads(job: Job) -> Iterator[Suggestion]:
    """Suggestions against hot experts, with the values that the job has."""
    rate, loss = job.config.model.experts.bias_rate, job.config.loss
    raised = (
        f"trainer.model.experts.bias_rate (now {rate:g})"
        if rate
        else f"trainer.loss.global_balance (now {loss.global_balance:g}) or "
        f"trainer.loss.sequence_balance (now {loss.sequence_balance:g})"
    )
    yield Suggestion(
        f"raise {raised} in its job file, so that its router spreads the rows",
        "megascale update JOB.YAML --reason REASON",
    )
    yield Suggestion(
        "see the rows of each rank's experts and its time", f"megascale heat {job.name}"
    )


def holders(state: Cluster, job: Job) -> tuple[dict[str, str], dict[str, str]]:
    """The job that runs on each node, and the other job that has it as a spare."""
    taken = {
        slot.node: other.name
        for other in state.jobs.values()
        if other.active
        for slot in other.slots
    }
    reserved = {
        spare: other.name
        for other in state.jobs.values()
        if other.name != job.name
        for spare in other.spares
    }
    return taken, reserved


def _about_the_job(job: Job, cause: Audit | None) -> Iterator[Suggestion]:
    """Suggestions that follow from the cause: the log of the rank, the checkpoints, the sizes."""
    if cause is None:
        return
    rank = _rank_of(cause)
    if rank >= 0:
        yield Suggestion(
            f"read the log of rank {rank} of attempt {cause.attempt}",
            f"megascale logs {job.name} --rank {rank} --attempt {cause.attempt}",
        )
    if cause.reason == FaultKind.KERNEL_FAULT:
        node = cause.subject.removeprefix("nodes/")
        yield Suggestion(
            "reset the GPU that its kernel log names, then check the node",
            f"megascale diagnose {node}",
        )
    memory = cause.reason in (FaultKind.JOB_TOO_BIG, "WORKER_OUT_OF_MEMORY")
    if memory or "does not fit" in cause.message:
        yield Suggestion(
            "see what memory the job needs; more pp or tp, recompute or smaller micro-batches "
            "need less",
            "megascale plan FILE",
        )
    saved = cause.reason.startswith("CHECKPOINT_") or cause.reason == "LOSS_DIVERGED"
    if saved or "could not open attempt" in cause.message:
        yield Suggestion(
            "see which checkpoints are complete", f"megascale checkpoint list {job.name}"
        )
    if "took longer than" in cause.message:
        yield Suggestion("see what state the late nodes are in", "megascale nodes")


def _about_its_phase(state: Cluster, job: Job) -> Iterator[Suggestion]:
    if job.phase is JobPhase.QUEUED:
        yield from _room_for(state, job)
    elif job.phase is JobPhase.SUSPENDED:
        yield Suggestion("let it have nodes again", f"megascale resume {job.name} --reason REASON")
    elif job.phase in (JobPhase.FAILED, JobPhase.CANCELLED):
        where = f"from step {job.committed_step}" if job.committed_step else "at step 0"
        yield Suggestion(
            "give it a changed job file, if the cause is in the file",
            "megascale update JOB.YAML --reason REASON",
        )
        yield Suggestion(
            f"let it continue {where}, once the cause is gone",
            f"megascale restart {job.name} --reason REASON",
        )
        if job.committed_step:
            yield Suggestion("see its checkpoints", f"megascale checkpoint list {job.name}")
    elif job.phase in (JobPhase.PREPARING, JobPhase.STARTING, JobPhase.STOPPING):
        yield Suggestion("wait: this phase has a time limit", f"megascale watch {job.name}")


def _room_for(state: Cluster, job: Job) -> Iterator[Suggestion]:
    """How to provide the nodes that a queued job lacks."""
    taken, reserved = holders(state, job)
    for node in state.nodes.values():
        held_by = taken.get(node.name) or reserved.get(node.name)
        if node.disposition is not Disposition.SCHEDULABLE or node.liveness is not Liveness.ALIVE:
            yield from _about_a_node(state, job, node.name)
        elif held_by and held_by != job.name:
            yield Suggestion(
                f"wait for job {held_by}, which has node {node.name}, or end it",
                f"megascale cancel {held_by} --reason REASON",
            )
    devices = sum(len(candidate(node).devices) for node in state.nodes.values())
    world_size = job.config.layout.world_size
    if devices < world_size:
        yield Suggestion(
            f"add nodes: all nodes together have {counted(devices, 'device')}, the job needs "
            f"{world_size}",
            "megascale node start NAME",
        )
        yield Suggestion("see which smaller layouts there are", "megascale plan FILE")
    yield Suggestion("see all nodes and what they run", "megascale nodes")


def _about_a_node(state: Cluster, job: Job, name: str) -> Iterator[Suggestion]:
    node = state.nodes.get(name)
    if node is None:
        return
    if node.disposition is not Disposition.SCHEDULABLE:
        yield Suggestion(
            f"give node {name} work again once it is sound ({node.disposition.lower()}: "
            f"{node.disposition_reason})",
            f"megascale uncordon {name} --reason REASON",
        )
    elif node.liveness is not Liveness.ALIVE:
        yield Suggestion(
            f"start node {name} again ({node.liveness.lower()})", f"megascale node start {name}"
        )
    elif _is_idle(state, node):
        yield Suggestion(
            f"check the devices and links of node {name}", f"megascale diagnose {name}"
        )


def _is_idle(state: Cluster, node: Node) -> bool:
    return state.holder_of(node.name) is None


def _rank_of(line: Audit) -> int:
    """The rank of the first evidence of an event; -1 without one."""
    for item in line.evidence[:1]:
        _, found, rank = item.source.rpartition("/ranks/")
        if found and rank.isdecimal():
            return int(rank)
    return -1
