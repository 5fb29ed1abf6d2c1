"""Traffic between a job's nodes: consequences if it ceases, declines or fluctuates.

The verdicts come from :mod:`megascale_driver.analysis.traffic`, based on counters that the core
never sees. A standstill while ranks wait is treated as a hang, and is detected earlier; it is
inferred, so it is observed unless an operator has the rule enforced. A decline or a fluctuation is
for people (MegaScale section 4.2): the line alerts, and nothing else follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megascale_driver.core.draft import Draft
from megascale_driver.core.signs import hang
from megascale_driver.core.values import reasons
from megascale_driver.core.values.events import Evidence, TrafficChanged, TrafficStood
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.reasons import Reason

TRAFFIC: Final = "traffic"
MAX_CHANGES = 16  # in an attempt; more changes indicate a problem of the whole network
MAX_NODES = 16  # named as evidence
_REASONS: Final[dict[str, Reason]] = {
    "decline": reasons.TRAFFIC_DECLINED,
    "fluctuation": reasons.TRAFFIC_FLUCTUATES,
}


def stood(draft: Draft, event: TrafficStood) -> None:
    """End the attempt as hung, if the rule is enforced; one line per standstill."""
    job = draft.running(event)
    if job is None or job.current.faults or draft.now_s < draft.silence_hold_until_s:
        return
    since_s = hang.since_s(job)
    if draft.now_s - since_s < event.limit_s:
        return  # a step was completed meanwhile
    enforced = draft.enforced(TRAFFIC)
    if not enforced and job.current.traffic.stood_since_s == since_s:
        return
    found = hang.observed(draft.nodes, job, draft.policy, {one.node: one for one in event.pages})
    if found is None or not found.rows:
        return  # a node is silent, which is decided elsewhere
    hang.conclude(draft, job, found, event.sentence, reason=reasons.TRAFFIC_STOPPED, rule=TRAFFIC)
    seen = replace(draft.jobs[job.name].current.traffic, stood_since_s=since_s)
    draft.put_attempt(job.name, replace(draft.jobs[job.name].current, traffic=seen))


def changed(draft: Draft, event: TrafficChanged) -> None:
    """Log a decline or a fluctuation; remember why traffic is not watched."""
    job = draft.running(event)
    if job is None:
        return
    seen = job.current.traffic
    if event.kind not in _REASONS:
        if seen.unseen != event.sentence:
            draft.put_attempt(
                job.name,
                replace(draft.jobs[job.name].current, traffic=replace(seen, unseen=event.sentence)),
            )
        return
    if seen.changes >= MAX_CHANGES:
        return
    draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current, traffic=replace(seen, changes=seen.changes + 1, unseen="")
        ),
    )
    draft.log_job(
        job,
        _REASONS[event.kind],
        event.sentence,
        policy=TRAFFIC,
        mode="OBSERVE",
        evidence=tuple(
            Evidence("counters", f"nodes/{name}", event.source)
            for name in (event.nodes or tuple(slot.node for slot in job.slots))[:MAX_NODES]
        ),
        outcome="the job continues: look at its network, or at what its steps wait for",
    )


def describe(job: Job) -> str:
    """For operators: why the traffic of the job is not watched; "" if it is."""
    why = job.current.traffic.unseen
    return f"; its traffic is not watched: {why}" if why else ""


# The handlers of findings, by type.
HANDLERS: Final = {TrafficStood: stood, TrafficChanged: changed}
