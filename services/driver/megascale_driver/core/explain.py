"""Explains in one sentence why a job is where it is, for `megascale explain` and ExplainJob."""

from __future__ import annotations

from megascale_driver.core import hang
from megascale_driver.core.policy import Policy
from megascale_driver.core.scheduling import candidate, usable
from megascale_driver.core.state import (
    AttemptPhase,
    Cluster,
    Disposition,
    Job,
    JobPhase,
    Liveness,
    Node,
)
from megascale_driver.placement.gang import place


def explain(state: Cluster, name: str, now_s: float, policy: Policy) -> str:
    """One sentence about job ``name``, which must exist, as it stands at ``now_s``."""
    job = state.jobs[name]
    if job.phase is JobPhase.QUEUED:
        return f"job {name} is waiting: {_waiting(state, job)}"
    if job.phase in (JobPhase.PREPARING, JobPhase.STARTING):
        return f"job {name} is {job.phase.lower()} attempt {job.attempt}: {_laggards(state, job)}"
    if job.phase is JobPhase.RUNNING:
        restarts = f" after {job.restarts} restarts" if job.restarts else ""
        nodes = ", ".join(slot.node for slot in job.slots)
        text = (
            f"job {name} runs attempt {job.attempt} on {nodes}{restarts}; "
            f"its last known step is {job.step}"
        )
        standstill = hang.describe(state.nodes, job, now_s, policy)
        return f"{text}; {standstill}" if standstill else text
    if job.phase is JobPhase.STOPPING:
        return f"job {name} is stopping attempt {job.attempt} because {job.stop_reason}"
    return f"job {name} has {job.phase.lower()}: {job.reason}"


def needs(job: Job, nodes: list[Node]) -> str:
    """What the job needs, in nodes of the largest size there is: ``2 nodes with 4 cpu devices``."""
    world, tp = job.config.layout.world_size, job.config.layout.tp
    shapes = sorted(
        {(len(c.devices), c.kind) for c in map(candidate, nodes) if len(c.devices) >= tp},
        reverse=True,
    )
    if not shapes:
        return f"{world} devices in groups of {tp} on one node"
    size, kind = shapes[0]
    size = size // tp * tp
    if world <= size:
        return f"1 node with {world} {kind} devices"
    return f"{-(-world // size)} nodes with {size} {kind} devices"


def _waiting(state: Cluster, job: Job) -> str:
    """What the job needs, what is idle, and why each other node cannot be used."""
    nodes = list(state.nodes.values())
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
    idle = [n for n in nodes if usable(n) and n.name not in taken and n.name not in reserved]
    count = len(idle)
    parts = [
        f"it needs {needs(job, nodes)}",
        f"{count} schedulable {'node is' if count == 1 else 'nodes are'} idle",
    ]
    layout = job.config.layout
    if place(layout.world_size, layout.tp, [candidate(n) for n in idle]) is not None:
        parts.append("it is about to be placed")
    idle_names = {n.name for n in idle}
    blocked = [_blocked(n, taken, reserved) for n in nodes if n.name not in idle_names]
    text = ", ".join(parts)
    return (
        text
        + ("; " + "; ".join(blocked[:8]) if blocked else "")
        + (f" ({job.reason})" if job.attempt else "")
    )


def _blocked(node: Node, taken: dict[str, str], reserved: dict[str, str]) -> str:
    if node.disposition is not Disposition.SCHEDULABLE:
        return f"{node.name} is {node.disposition.lower()} ({node.disposition_reason})"
    if node.liveness is not Liveness.ALIVE:
        return f"{node.name} is {node.liveness.lower()}"
    if node.name in taken:
        return f"{node.name} runs job {taken[node.name]}"
    if node.name in reserved:
        return f"{node.name} is a spare of job {reserved[node.name]}"
    return f"{node.name} has not reported idle yet"


def _laggards(state: Cluster, job: Job) -> str:
    """Which nodes have not reached the phase that the job waits for."""
    wanted = {
        JobPhase.PREPARING: (AttemptPhase.PREPARED,),
        JobPhase.STARTING: (AttemptPhase.RUNNING, AttemptPhase.FINISHED),
    }[job.phase]
    waiting = []
    for slot in job.slots:
        node = state.nodes.get(slot.node)
        report = node.report if node is not None else None
        if report is None or report.attempt != job.attempt or report.phase not in wanted:
            waiting.append(slot.node)
    if not waiting:
        return "all nodes are ready, the checkpoint daemon is opening the attempt"
    return f"waiting for {', '.join(waiting)}"
