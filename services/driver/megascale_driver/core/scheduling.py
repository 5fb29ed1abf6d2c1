"""Which nodes a queued job gets, and which nodes stand by as its spares."""

from __future__ import annotations

from collections.abc import Iterable

from megascale_driver.core.attempt import Attempt, NodeSlot
from megascale_driver.core.draft import Draft
from megascale_driver.core.state import (
    AttemptPhase,
    AttemptRecord,
    Desired,
    Disposition,
    Job,
    JobPhase,
    Liveness,
    Node,
)
from megascale_driver.placement import fit
from megascale_driver.placement.gang import Candidate, Part, place, replace_lost, spares


def schedule(draft: Draft) -> None:
    """Place queued jobs, by priority, then age; then give active jobs the spares they lack."""
    if draft.now_s < draft.grace_until_s and any(
        node.liveness is Liveness.UNKNOWN for node in draft.nodes.values()
    ):
        # The nodes that the previous leader knew are still linking to this one. Placed now, a job
        # would go to worse nodes than in a moment, or its old nodes would look lost.
        return
    waiting = [
        job
        for job in draft.jobs.values()
        if job.phase is JobPhase.QUEUED and job.not_before_s <= draft.now_s  # else it backs off
    ]
    for job in sorted(waiting, key=lambda j: (-j.config.priority, j.created_at_s, j.name)):
        _place_job(draft, job)
    for job in list(draft.jobs.values()):
        if job.active and len(job.spares) < job.config.recovery.spare_nodes:
            _name_spares(draft, job)
        elif job.spares:
            _drop_lost_spares(draft, job)


def candidate(node: Node) -> Candidate:
    """A node as placement takes it: name, devices, their kind, switch."""
    kinds = {device.kind for device in node.identity.devices}
    kind = kinds.pop() if len(kinds) == 1 else ""
    devices = tuple(device.index for device in node.identity.devices)
    return Candidate(node.name, kind, devices, node.identity.topology.get("switch", ""))


def capacities(nodes: Iterable[Node]) -> list[fit.Capacity]:
    """The nodes that have ever reported devices, as placement.fit takes them."""
    return [
        fit.Capacity(candidate(node), max(each.memory_bytes for each in node.identity.devices))
        for node in nodes
        if node.identity.devices
    ]


def usable(node: Node) -> bool:
    """Whether a new attempt may use the node: alive, schedulable, and idle by its own report.

    The last two conditions are both needed: the report may be from before the node was given work,
    and a node that was given up may be IDLE by its desired state and still run workers.
    """
    return (
        node.disposition is Disposition.SCHEDULABLE
        and node.liveness is Liveness.ALIVE
        and node.connected
        and node.report is not None
        and node.report.phase is AttemptPhase.IDLE
        and node.desired == Desired()
    )


def idle_nodes(draft: Draft, job: Job) -> list[Node]:
    """Usable nodes that no other job holds, neither for its ranks nor as a spare."""
    taken = {slot.node for other in draft.jobs.values() if other.active for slot in other.slots}
    taken |= {
        name for other in draft.jobs.values() if other.name != job.name for name in other.spares
    }
    return [node for node in draft.nodes.values() if node.name not in taken and usable(node)]


def _place_job(draft: Draft, job: Job) -> None:
    free = {node.name: candidate(node) for node in idle_nodes(draft, job)}
    parts = _replacement(job, free) if job.slots else None
    if parts is None:
        # Nodes that the job has left are the last resort: better one of them than to wait for ever.
        preferred = [c for c in free.values() if c.name not in job.evicted]
        layout = job.config.layout
        parts = place(layout.world_size, layout.tp, preferred) or place(
            layout.world_size, layout.tp, free.values()
        )
    if parts is None:
        _report_what_is_missing(draft, job, list(free.values()))
        return
    before = {slot.node for slot in job.slots}
    slots = tuple(
        NodeSlot(p.node, p.ranks, p.devices, draft.nodes[p.node].identity.incarnation)
        for p in parts
    )
    number = job.attempt + 1
    newcomers = tuple(p.node for p in parts if p.node not in before) if before else ()
    used = {p.node for p in parts}
    draft.job(
        job.name,
        phase=JobPhase.PREPARING,
        reason=f"attempt {number}: {len(slots)} nodes prepare",
        current=Attempt(number, slots),
        spares=tuple(name for name in job.spares if name not in used),
        attempts=(*job.attempts, AttemptRecord(number, slots, draft.now_s)),
    )
    _log_placement(draft, job, parts, newcomers)
    _name_spares(draft, draft.jobs[job.name])


def waiting(what: str, stop_reason: str) -> str:
    """The reason of a queued job; ``stop_reason`` ended its last attempt."""
    after = f" after: {stop_reason}" if stop_reason else ""
    return f"waiting for nodes{f' ({what})' if what else ''}{after}"


def _report_what_is_missing(draft: Draft, job: Job, free: list[Candidate]) -> None:
    known = [candidate(node) for node in draft.nodes.values() if node.identity.devices]
    reason = waiting(fit.missing(job.config, known, free), job.stop_reason)
    if reason != job.reason:
        draft.job(job.name, reason=reason)


def _replacement(job: Job, free: dict[str, Candidate]) -> tuple[Part, ...] | None:
    """The last placement with its lost nodes replaced; None if it cannot be completed.

    Survivors keep their ranks, because their memory holds the snapshots of those ranks. Nodes that
    the job has left are not used.
    """
    parts = [Part(slot.node, slot.ranks, slot.devices) for slot in job.slots]
    names = {part.node for part in parts}
    welcome = {name: c for name, c in free.items() if name not in job.evicted}
    survivors = {name: c for name, c in welcome.items() if name in names}
    named = [welcome[name] for name in job.spares if name in welcome]
    others = [c for name, c in welcome.items() if name not in names and name not in job.spares]
    return replace_lost(parts, survivors, named, others)


def _log_placement(
    draft: Draft, job: Job, parts: tuple[Part, ...], newcomers: tuple[str, ...]
) -> None:
    number = job.attempt + 1
    where = "; ".join(f"{p.node}: ranks {p.ranks[0]}-{p.ranks[-1]}" for p in parts[:16])
    subject = f"jobs/{job.name}"
    for name in newcomers:
        if name in job.spares:
            draft.log(
                "SPARE_ASSIGNED", f"spare {name} takes over", subject=f"nodes/{name}",
                job=job.name, attempt=number, policy="placement",
            )  # fmt: skip
    draft.log(
        "PLACED",
        f"placed on {where}",
        subject=subject,
        job=job.name,
        attempt=number,
        policy="placement",
    )
    draft.log(
        "ATTEMPT_PREPARING", f"attempt {number}: its nodes reserve devices and check themselves",
        subject=subject, job=job.name, attempt=number,
    )  # fmt: skip


def _name_spares(draft: Draft, job: Job) -> None:
    _drop_lost_spares(draft, job)
    job = draft.jobs[job.name]
    missing = job.config.recovery.spare_nodes - len(job.spares)
    if missing <= 0:
        return
    waiting = any(
        other.phase is JobPhase.QUEUED and other.name != job.name for other in draft.jobs.values()
    )
    if waiting:
        return  # waiting jobs get nodes before others get spares
    parts = [Part(slot.node, slot.ranks, slot.devices) for slot in job.slots]
    kinds = {candidate(draft.nodes[p.node]).kind for p in parts if p.node in draft.nodes}
    pool = [candidate(node) for node in idle_nodes(draft, job) if node.name not in job.spares]
    found = spares(missing, parts, [c for c in pool if c.kind in kinds])
    if found:
        draft.job(job.name, spares=(*job.spares, *found))


def _drop_lost_spares(draft: Draft, job: Job) -> None:
    kept = tuple(
        name
        for name in job.spares
        if (node := draft.nodes.get(name)) is not None
        and node.disposition is Disposition.SCHEDULABLE
        and node.liveness is not Liveness.DEAD
    )
    if kept != job.spares:
        draft.job(job.name, spares=kept)
