"""Detects a running job that stands still with all its processes alive, and restarts it.

The verdict is an inference from status pages, so no node is evicted on the first hang: the attempt
ends and all its nodes check themselves. The job leaves a node whose ranks hold it up twice in a row
without progress (:mod:`megascale_driver.core.recovery.recovery`). Nodes without heartbeats are not
evaluated here but in :mod:`megascale_driver.core.faults.liveness`.

Status pages do not enter the core with each heartbeat. The shell reads them while
:func:`stands_still` holds, and :func:`pages_read` evaluates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice

from megascale_driver.analysis.lost_transfers import culprits
from megascale_driver.analysis.progress import (
    Beat,
    RankStatus,
    RankView,
    Standing,
    p99,
    standing,
)
from megascale_driver.core.draft import Draft
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.events import Evidence, PagesRead, RankPages
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.reasons import Reason
from megascale_driver.core.values.state import (
    AttemptPhase,
    Job,
    JobPhase,
    Liveness,
    Node,
)

MAX_EVIDENCE = 16
MAX_NAMED = 4
# A share of the verdict's limit: from then on people are shown that the job completes no step. An
# evaluation, a long save or the first steps, whose limits are long, are not worth a look sooner.
SHOWN_AFTER = 1 / 3
_AT_WORK = (AttemptPhase.RUNNING, AttemptPhase.FINISHED)


@dataclass(frozen=True, slots=True)
class Stall:
    """A job that has completed no step for much longer than its pace.

    ``culprit``: the rank that holds it up most likely; None while not all nodes report their ranks.
    ``lost``: what was sent and has not arrived, as a clause; "" without such a transfer.
    """

    still_s: float
    limit_s: float = 0.0  # of the verdict, which ends the attempt
    culprit: RankView | None = None
    lost: str = ""

    @property
    def shown(self) -> bool:
        """Whether it lasts long enough for people to look."""
        return self.still_s >= SHOWN_AFTER * self.limit_s

    @property
    def held_up_by(self) -> str:
        """Who holds the job up, as a clause."""
        if self.culprit is None:
            return "not all of its nodes report the status of their ranks"
        return self.lost or f"rank {self.culprit.rank} on {self.culprit.node} holds it up"

    def __str__(self) -> str:
        text = f"no rank has completed a step for {self.still_s:.0f} s"
        if self.culprit is None:
            return f"{text}; {self.held_up_by}"
        return f"{text} (limit {self.limit_s:.0f} s); {self.lost or self.culprit}"


def pages_read(draft: Draft, event: PagesRead) -> None:
    """Take in the newest status pages of an attempt's nodes, and evaluate them."""
    job = draft.jobs.get(event.job)
    if job is None or job.attempt != event.attempt or job.phase is not JobPhase.RUNNING:
        return
    pages = {found.node: found for found in event.pages}
    if _hangs(draft, job, pages):
        return
    # Kept for those who ask why the job stands still.
    for found in event.pages:
        node = draft.nodes.get(found.node)
        if node is not None and node.report is not None and _counts(found, node):
            report = replace(node.report, statuses=found.statuses)
            draft.node(node.name, report=report, beat_at_s=found.at_s)


def _counts(found: RankPages, node: Node) -> bool:
    """Whether the pages are of this incarnation of the node and as new as its report."""
    return found.incarnation == node.identity.incarnation and found.at_s >= node.beat_at_s


def _hangs(draft: Draft, job: Job, pages: Mapping[str, RankPages]) -> bool:
    """Record a fault, which ends the attempt, if no rank has advanced for its phase's limit."""
    # The cheap test first: no limit is below the floor.
    if draft.now_s - since_s(job) < draft.policy.hang.floor_s:
        return False
    if job.current.faults or draft.now_s < draft.silence_hold_until_s:
        return False
    found = observed(draft.nodes, job, draft.policy, pages)
    if found is None or not found.hangs:
        return False
    what = f"no rank has advanced for {found.still_s:.1f} s (limit {found.limit_s:.1f} s)"
    enforced = draft.enforced("hang")
    if not enforced and job.current.observed_hang_s == since_s(job):
        return False  # of this standstill there is a line
    conclude(draft, job, found, what, reason="HANG_SUSPECTED", rule="hang")
    if not enforced:
        draft.attempt(job.name, observed_hang_s=since_s(job))
    return enforced


def conclude(
    draft: Draft, job: Job, found: Standing, what: str, *, reason: Reason, rule: str
) -> None:
    """Write down that the job stands still and which ranks hold it up; end it if so enforced.

    ``what``: by which sign it stands still, the first part of the message.
    """
    guilty, lost = culprits(found.rows, job.config.layout)
    named = "; ".join(str(view) for view in guilty[:MAX_NAMED])
    more = f" and {len(guilty) - MAX_NAMED} more" if len(guilty) > MAX_NAMED else ""
    between = f"; {lost[0]}" if lost else ""
    message = f"{what}: {named}{more}{between}"
    enforced = draft.enforced(rule)
    draft.log(
        reason, message, subject=f"jobs/{job.name}", job=job.name, attempt=job.attempt,
        policy=rule, mode="ENFORCE" if enforced else "OBSERVE", evidence=_evidence(guilty, found),
        outcome="the attempt ends and all its nodes check themselves" if enforced
        else "nothing: the rule is observed",
    )  # fmt: skip
    if enforced:
        # Suspects on several nodes have a common cause, which is none of these nodes.
        blamed = guilty[0].node if len({view.node for view in guilty}) == 1 else ""
        fault = Fault(FaultKind.HANG, blamed, draft.now_s, message, guilty[0].rank, hard=False)
        draft.fault(job.name, fault)


def observed(
    nodes: Mapping[str, Node],
    job: Job,
    policy: Policy,
    pages: Mapping[str, RankPages] | None = None,
) -> Standing | None:
    """Progress of the job by the newest heartbeats; None while one of its nodes sends none.

    ``pages``: status pages that are newer than those of the nodes' reports.
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
        newest = pages.get(slot.node) if pages else None
        if newest is not None and _counts(newest, node):
            beats.append(Beat(slot.node, newest.at_s, slot.ranks, newest.statuses))
        else:
            beats.append(Beat(slot.node, node.beat_at_s, slot.ranks, report.statuses))
    return standing(beats, job.step_times, since_s(job), policy.hang)


def without_workers(draft: Draft, job: Job) -> Job:
    """Record a fault, which ends the attempt, if it has no worker that anybody reports.

    Whatever became of them, and of the nodes: without workers there is no status to evaluate, and
    the job would be RUNNING for ever. A node that reports workers, or did so a moment ago, is
    enough: then the other rules decide.
    """
    limit_s = draft.policy.no_workers_after_s
    if job.phase is not JobPhase.RUNNING or still_s(job, draft.now_s) < limit_s:
        return job
    if job.current.faults or job.current.observed_hang_s == since_s(job):
        return job
    if any(_reports_workers(draft, job, draft.nodes.get(slot.node)) for slot in job.slots):
        return job
    enforced = draft.enforced("no-workers")
    message = f"no node reports workers of attempt {job.attempt} for {limit_s:g} s"
    states = [(slot.node, draft.nodes.get(slot.node)) for slot in job.slots[:MAX_EVIDENCE]]
    evidence = tuple(
        Evidence("liveness", f"nodes/{name}", node.liveness if node is not None else "unknown")
        for name, node in states
    )
    draft.log(
        "WORKERS_MISSING", message, subject=f"jobs/{job.name}", job=job.name, attempt=job.attempt,
        policy="no-workers", mode="ENFORCE" if enforced else "OBSERVE", evidence=evidence,
        outcome="the attempt ends" if enforced else "nothing: the rule is observed",
    )  # fmt: skip
    if not enforced:
        return draft.attempt(job.name, observed_hang_s=since_s(job))
    fault = Fault(FaultKind.DEADLINE, "", draft.now_s, message, hard=False)
    return draft.fault(job.name, fault)


def _reports_workers(draft: Draft, job: Job, node: Node | None) -> bool:
    """Whether a node reports workers of the attempt, or has done so within the limit."""
    if node is None or node.report is None or node.liveness is Liveness.DEAD:
        return False
    report = node.report
    if (report.job, report.attempt) != (job.name, job.attempt) or report.phase not in _AT_WORK:
        return False
    heard = node.liveness is Liveness.ALIVE and node.connected
    return heard or draft.now_s - node.heard_at_s < draft.policy.no_workers_after_s


def stall(nodes: Mapping[str, Node], job: Job, now_s: float, policy: Policy) -> Stall | None:
    """For operators: that no step is completed, and which rank holds the job up.

    None while the job keeps its pace, and once all steps are done: then it only saves.
    """
    if not stands_still(job, now_s, policy) or job.current.step >= job.config.training.steps:
        return None
    found = observed(nodes, job, policy)
    if found is None:
        return Stall(still_s(job, now_s))
    guilty, lost = culprits(found.rows, job.config.layout)
    between = str(lost[0]) if lost else ""
    return Stall(still_s(job, now_s), found.limit_s, guilty[0], between)


def stands_still(job: Job, now_s: float, policy: Policy) -> bool:
    """Whether a running job has completed no step for much longer than its pace."""
    return job.phase is JobPhase.RUNNING and now_s >= stands_still_from_s(job, policy)


def still_s(job: Job, now_s: float) -> float:
    """For how long the job has not advanced."""
    return now_s - since_s(job)


def stands_still_from_s(job: Job, policy: Policy) -> float:
    """When a running job stands still, if it completes no step before."""
    limit_s = max(policy.suspect_after_s, policy.still_intervals * p99(job.step_times))
    return since_s(job) + limit_s


def since_s(job: Job) -> float:
    """When the job last advanced: it completed a step, or started to run under this leader."""
    return max(job.timer_s, job.current.last_step_at_s)


def _evidence(guilty: tuple[RankView, ...], found: Standing) -> tuple[Evidence, ...]:
    """Status of the suspects, then of the other ranks, up to MAX_EVIDENCE."""
    suspected = {view.rank for view in guilty}
    others = (RankView._make(row) for row in found.rows if row[0] not in suspected)
    lines = []
    for view in islice(chain(guilty, others), MAX_EVIDENCE):
        digest = "no readable status page"
        if view.status is not None:
            digest = _digest(view.status)
        digest = f"suspect: {digest}" if view.rank in suspected else digest
        lines.append(Evidence("status", f"nodes/{view.node}/ranks/{view.rank}", digest))
    return tuple(lines)


def _digest(status: RankStatus) -> str:
    text = f"phase {status.phase}, step {status.step}, status {status.age_s:.1f} s old"
    if not status.operations:
        return text
    inside = [count.group for count in status.operations if count.entered > count.completed]
    return f"{text}, inside {', '.join(inside) if inside else 'no operation'}"
