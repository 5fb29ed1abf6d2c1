"""A running job that stands still with all its processes alive is noticed and given a new attempt.

The verdict is an inference from status pages, so it costs no node anything at the first time: the
attempt ends and all nodes check themselves. A node whose ranks hold the job up twice in a row
without progress is left by the job (:mod:`megascale_driver.core.recovery`). Nodes that are not
heard of belong to :mod:`megascale_driver.core.liveness`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale_driver.analysis.progress import Beat, RankView, Standing, p99, standing, suspects
from megascale_driver.core.draft import Draft
from megascale_driver.core.events import Evidence
from megascale_driver.core.policy import Policy
from megascale_driver.core.state import (
    AttemptPhase,
    Fault,
    FaultKind,
    Job,
    JobPhase,
    Liveness,
    Node,
)

MAX_EVIDENCE = 16
MAX_NAMED = 4
_AT_WORK = (AttemptPhase.RUNNING, AttemptPhase.FINISHED)


def check(draft: Draft, job: Job) -> Job:
    """End the attempt if no rank has advanced for its limit."""
    limits = draft.policy.hang
    if job.phase is not JobPhase.RUNNING or draft.now_s - _since_s(job) < limits.floor_s:
        return job
    if job.faults or draft.now_s < draft.cluster("silence_hold_until_s"):
        return job
    found = observed(draft.nodes, job, draft.policy)
    if found is None or not found.hangs:
        return job
    guilty = suspects(found.ranks, job.config.layout)
    named = "; ".join(str(view) for view in guilty[:MAX_NAMED])
    more = f" and {len(guilty) - MAX_NAMED} more" if len(guilty) > MAX_NAMED else ""
    message = f"no rank has advanced for {found.still_s:.1f} s (limit {found.limit_s:.1f} s): {named}{more}"
    nodes = {view.node for view in guilty}
    draft.log(
        "HANG_SUSPECTED", message, subject=f"jobs/{job.name}", job=job.name, attempt=job.attempt, policy="hang",
        evidence=_evidence(guilty, found),
        outcome="the attempt ends and all its nodes check themselves",
    )  # fmt: skip
    # Suspects on several nodes have a common cause, which is none of them.
    blamed = guilty[0].node if len(nodes) == 1 else ""
    fault = Fault(FaultKind.HANG, blamed, draft.now_s, message, guilty[0].rank, hard=False)
    return draft.job(job.name, faults=(*job.faults, fault))


def observed(nodes: Mapping[str, Node], job: Job, policy: Policy) -> Standing | None:
    """How the job stands by the newest heartbeats; None while a node of it is not heard of or
    speaks of no rank.
    """
    beats: list[Beat] = []
    for slot in job.slots:
        node = nodes.get(slot.node)
        if (
            node is None
            or node.report is None
            or node.liveness is not Liveness.ALIVE
            or not node.connected
        ):
            return None
        report = node.report
        if (report.job, report.attempt) != (job.name, job.attempt) or report.phase not in _AT_WORK:
            return None
        beats.append(Beat(slot.node, node.beat_at_s, slot.ranks, report.statuses))
    return standing(beats, job.step_times, _since_s(job), policy.hang)


def describe(nodes: Mapping[str, Node], job: Job, now_s: float, policy: Policy) -> str:
    """For people: since when no step is completed and who stands where; empty while the job keeps
    its pace.
    """
    still_s = now_s - _since_s(job)
    if still_s < max(policy.suspect_after_s, policy.still_intervals * p99(job.step_times)):
        return ""
    text = f"no rank has completed a step for {still_s:.0f} s"
    found = observed(nodes, job, policy)
    if found is None:
        return f"{text}; not all of its nodes say where their ranks stand"
    return f"{text} (limit {found.limit_s:.0f} s); {suspects(found.ranks, job.config.layout)[0]}"


def _since_s(job: Job) -> float:
    """When the job was last known to move: it began to run under this leader, or completed a step."""
    return max(job.timer_s, job.last_step_at_s)


def _evidence(guilty: tuple[RankView, ...], found: Standing) -> tuple[Evidence, ...]:
    """Status of the suspects, then of the others, up to a bound."""
    suspected = {view.rank for view in guilty}
    others = tuple(view for view in found.ranks if view.rank not in suspected)
    lines = []
    for view in (*guilty, *others)[:MAX_EVIDENCE]:
        digest = "no status page that can be read"
        if view.status is not None:
            inside = [
                count.group for count in view.status.operations if count.entered > count.completed
            ]
            digest = f"phase {view.status.phase}, step {view.status.step}, status {view.status.age_s:.1f} s old"
            if view.status.operations:
                digest += f", inside {', '.join(inside)}" if inside else ", inside no operation"
        digest = f"suspect: {digest}" if view.rank in suspected else digest
        lines.append(Evidence("status", f"nodes/{view.node}/ranks/{view.rank}", digest))
    return tuple(lines)
