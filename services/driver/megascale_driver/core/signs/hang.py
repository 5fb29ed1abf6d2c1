"""Detects a running job that is stalled with all its processes alive, and restarts it.

The verdict is an inference from status pages, so no node is evicted on the first hang: the attempt
ends and all its nodes check themselves. The job leaves a node whose ranks hold it up twice in a row
without progress (:mod:`megascale_driver.core.recovery.recovery`). Nodes without heartbeats are not
evaluated here but in :mod:`megascale_driver.core.faults.liveness`. Status pages do not enter the
core with each heartbeat: the shell reads them while :func:`is_stalled` holds, and
:func:`pages_read` evaluates them.

Two more sources come when the attempt has stopped, with the reports of its nodes (MegaScale,
section 5.2):

- NCCL's records. A host runs ahead of its device, so on GPUs a page can show that all ranks have
  entered an operation that some device never reached; the record shows which. If the pages blamed
  no node and the records name ranks of one node, that node is blamed. A node that the pages have
  blamed stays blamed.
- The stacks of the ranks. They show where the suspect's code was and where most others waited, and
  are written to the log for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from megascale_common.node.flight_record import RankRecord
from megascale_driver.analysis.flight_recorder import Verdict, verdict
from megascale_driver.analysis.progress import (
    Beat,
    RankStatus,
    RankView,
    Standing,
    culprits,
    p99,
    standing,
)
from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind, NodeSlot
from megascale_driver.core.values.cluster import AttemptPhase, Liveness, Node, StoppedReport
from megascale_driver.core.values.events import Evidence, PagesRead, RankPages, listed
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.reasons import Reason

MAX_EVIDENCE = 16
MAX_NAMED = 4
# Share of the verdict's limit after which people are shown that no step is completed. An
# evaluation, a long save and the first steps have long limits and do not need a look sooner.
SHOWN_AFTER = 1 / 3
_AT_WORK = (AttemptPhase.RUNNING, AttemptPhase.FINISHED)


@dataclass(frozen=True, slots=True)
class Stall:
    """A job that has completed no step for much longer than its pace.

    ``culprit``: the rank that most likely holds it up; None while not all nodes report their ranks.
    ``lost``: what was sent and has not arrived, as a clause; "" without such a transfer.
    """

    still_s: float
    limit_s: float = 0.0  # limit of the verdict, which ends the attempt
    culprit: RankView | None = None
    lost: str = ""

    @property
    def shown(self) -> bool:
        """True if it has lasted long enough to be shown to people."""
        return self.still_s >= SHOWN_AFTER * self.limit_s

    @property
    def held_up_by(self) -> str:
        """The cause of the stall, as a clause."""
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
    # Kept for explanations of the stall.
    for found in event.pages:
        node = draft.nodes.get(found.node)
        if node is not None and node.report is not None and _counts(found, node):
            report = replace(node.report, statuses=found.statuses)
            draft.put_node(replace(draft.nodes[node.name], report=report, beat_at_s=found.at_s))


def _counts(found: RankPages, node: Node) -> bool:
    """True if the pages are of this incarnation of the node and as new as its report."""
    return found.incarnation == node.identity.incarnation and found.at_s >= node.beat_at_s


def _hangs(draft: Draft, job: Job, pages: Mapping[str, RankPages]) -> bool:
    """Record a fault, which ends the attempt, if no rank advanced within the limit of its phase."""
    # The cheap test comes first: no limit is below the floor.
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
        return False  # already logged
    conclude(draft, job, found, what, reason=reasons.HANG_SUSPECTED, rule="hang")
    if not enforced:
        draft.put_attempt(
            job.name, replace(draft.jobs[job.name].current, observed_hang_s=since_s(job))
        )
    return enforced


def conclude(
    draft: Draft, job: Job, found: Standing, what: str, *, reason: Reason, rule: str
) -> None:
    """Log that the job is stalled and which ranks hold it up; end it if the rule is enforced.

    ``what``: the sign of the stall, the first part of the message.
    """
    guilty, lost = culprits(found.rows, job.config.layout)
    named = listed([str(view) for view in guilty], MAX_NAMED, "; ")
    between = f"; {lost[0]}" if lost else ""
    message = f"{what}: {named}{between}"
    enforced = draft.enforced(rule)
    draft.log_job(
        job,
        reason,
        message,
        policy=rule,
        mode="ENFORCE" if enforced else "OBSERVE",
        evidence=_evidence(guilty, found),
        outcome="the attempt ends and all its nodes check themselves"
        if enforced
        else "nothing: the rule is observed",
    )
    if enforced:
        # Suspects on several nodes have a common cause, which is not one of these nodes.
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
    """Record a fault, which ends the attempt, if no node reports workers of it.

    Without workers there is no status to evaluate, and the job would be RUNNING forever, whatever
    happened to its workers and nodes. One node that reports workers, or did so a moment ago, is
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
    draft.log_job(
        job,
        reasons.WORKERS_MISSING,
        message,
        policy="no-workers",
        mode="ENFORCE" if enforced else "OBSERVE",
        evidence=evidence,
        outcome="the attempt ends" if enforced else "nothing: the rule is observed",
    )
    if not enforced:
        return draft.put_attempt(
            job.name, replace(draft.jobs[job.name].current, observed_hang_s=since_s(job))
        )
    fault = Fault(FaultKind.DEADLINE, "", draft.now_s, message, hard=False)
    return draft.fault(job.name, fault)


def _reports_workers(draft: Draft, job: Job, node: Node | None) -> bool:
    """True if a node reports workers of the attempt, or has done so within the limit."""
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
    if not is_stalled(job, now_s, policy) or job.current.step >= job.config.training.steps:
        return None
    found = observed(nodes, job, policy)
    if found is None:
        return Stall(still_s(job, now_s))
    guilty, lost = culprits(found.rows, job.config.layout)
    between = str(lost[0]) if lost else ""
    return Stall(still_s(job, now_s), found.limit_s, guilty[0], between)


def is_stalled(job: Job, now_s: float, policy: Policy) -> bool:
    """True if a running job has completed no step for much longer than its pace."""
    return job.phase is JobPhase.RUNNING and now_s >= stalled_from_s(job, policy)


def still_s(job: Job, now_s: float) -> float:
    """Time since the job last advanced."""
    return now_s - since_s(job)


def stalled_from_s(job: Job, policy: Policy) -> float:
    """When a running job will count as stalled, if it completes no step before."""
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


RECORD_KIND: Final = "nccl_record"
# A rank without a record counts as the silent one. If more ranks than this have none, records have
# not arrived in time and prove nothing.
MAX_SILENT: Final = 4


def record_verdict(draft: Draft, job: Job) -> Verdict | None:
    """The verdict on the attempt that has stopped; None with too few records."""
    records: list[RankRecord] = []
    for slot, stopped in _stopped(draft, job):
        records += [each for each in stopped.records if each.rank in slot.ranks]
    world_size = job.config.layout.world_size
    if not records or world_size - len({each.rank for each in records}) > MAX_SILENT:
        return None
    return verdict(records, world_size)


def _stopped(draft: Draft, job: Job) -> Iterator[tuple[NodeSlot, StoppedReport]]:
    """The report of each node on the attempt that it has stopped."""
    for slot in job.slots:
        node = draft.nodes.get(slot.node)
        found = node.report.stopped if node is not None and node.report is not None else None
        if found is not None and (found.job, found.attempt) == (job.name, job.attempt):
            yield slot, found


def record_evidence(job: Job, said: Verdict) -> tuple[Evidence, ...]:
    """One line for each named rank, with the operation that it has not entered."""
    lines = []
    for rank in said.culprits[:MAX_SILENT]:
        one = next(each for each in said.missing if rank in each.missing)
        digest = f"has not entered {one.operation} {one.number} of {one.group}"
        if rank in said.without_dump:
            digest = f"wrote no record; others wait for it in {one.operation} of {one.group}"
        lines.append(Evidence(RECORD_KIND, f"nodes/{_node_of(job, rank)}/ranks/{rank}", digest))
    return tuple(lines)


def blame_by_records(draft: Draft, job: Job) -> Job:
    """If a hang blames no node, blame the one node whose ranks the records name.

    This comes before the search for an unnamed culprit, which then need not begin.
    """
    if job.current.searching is not None or not any(map(_is_open, job.current.faults)):
        return job
    said = record_verdict(draft, job)
    nodes = {_node_of(job, rank) for rank in said.culprits} if said is not None else set()
    if said is None or len(nodes) != 1:
        return job
    (node,) = nodes
    faults = tuple(
        _completed(fault, node, said) if _is_open(fault) else fault for fault in job.current.faults
    )
    return draft.put_attempt(job.name, replace(draft.jobs[job.name].current, faults=faults))


def _is_open(fault: Fault) -> bool:
    return fault.kind is FaultKind.HANG and not fault.node


def _completed(fault: Fault, node: str, said: Verdict) -> Fault:
    message = f"{fault.message}; by NCCL's records {said.sentence.rstrip('.')}"
    return replace(fault, node=node, rank=said.culprits[0], message=message)


def _node_of(job: Job, rank: int) -> str:
    return next((slot.node for slot in job.slots if rank in slot.ranks), "")


STACKS_REASON: Final = reasons.HANG_STACKS
MAX_OTHERS = 8  # ranks besides the suspect whose stacks are attached
MAX_IN_MESSAGE = 200  # characters of a stack
_SEPARATOR = " < "


def write_stacks(draft: Draft, job: Job) -> None:
    """If the attempt ended in a hang, log where the suspect and the other ranks were."""
    fault = next((f for f in job.current.faults if f.kind is FaultKind.HANG), None)
    if fault is None:
        return
    found = _stacks(draft, job)
    said = record_verdict(draft, job)
    if not found and said is None:
        return
    innermost = {rank: frames.partition(_SEPARATOR)[0] for rank, (_, frames) in found.items()}
    common: dict[str, int] = {}
    for rank, frame in innermost.items():
        if rank != fault.rank:
            common[frame] = common.get(frame, 0) + 1
    # The suspect first, then ranks at rare places: most ranks only wait.
    order = sorted(
        found, key=lambda rank: (rank != fault.rank, common.get(innermost[rank], 0), rank)
    )
    evidence = tuple(
        Evidence("stack", f"nodes/{node}/ranks/{rank}", frames)
        for rank in order[: 1 + MAX_OTHERS]
        for node, frames in [found[rank]]
    )
    text = f"rank {fault.rank}: {found.get(fault.rank, ('', 'no stack'))[1][:MAX_IN_MESSAGE]}"
    if common:
        place, count = max(common.items(), key=lambda item: item[1])
        text += f"; {count} of {sum(common.values())} others: {place}"
    if said is not None:
        text += f"; NCCL's records: {said.sentence.rstrip('.')}"
        evidence += record_evidence(job, said)
    subject = f"jobs/{job.name}"
    draft.log_job(
        job,
        STACKS_REASON,
        text,
        subject=subject,
        evidence=evidence,
        outcome="nothing: evidence for people",
    )


def _stacks(draft: Draft, job: Job) -> dict[int, tuple[str, str]]:
    """Node and frames by rank, from the nodes of the attempt that has stopped."""
    found: dict[int, tuple[str, str]] = {}
    for slot, stopped in _stopped(draft, job):
        found |= {rank: (slot.node, text) for rank, text in stopped.stacks if rank in slot.ranks}
    return found


# The handlers of findings, by type.
HANDLERS: Final = {PagesRead: pages_read}
