"""The core of the driver: ``step(state, event, policy) -> (state, outcome)``, a pure function.

No I/O, no clock, no random numbers: time comes in with the events, so equal states and events give
equal outcomes. The simulation in tests/ depends on that, and so does a change of leader.

Order of decision and command: the shell commits the difference between the two states, together
with the audit lines, in a fenced transaction, and only then sends desired states and performs
effects. A command can be lost with its driver; a decision that a node has acted upon cannot.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megascale_driver.core import signs
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import breaker, liveness
from megascale_driver.core.jobs import deletion, jobs
from megascale_driver.core.nodes import nodes, profiles
from megascale_driver.core.orders import divergence, orders, stragglers
from megascale_driver.core.queue import quotas
from megascale_driver.core.queue.scheduling import schedule
from megascale_driver.core.recovery import search
from megascale_driver.core.values import reasons
from megascale_driver.core.values.cluster import Cluster, Request
from megascale_driver.core.values.events import (
    AttemptOpened,
    BreakerResetRequested,
    CancelRequested,
    CheckCompared,
    CordonRequested,
    DeleteRequested,
    DrainRequested,
    Event,
    EvictRequested,
    GroupChecked,
    JobSubmitted,
    LeaderStarted,
    LossDiverged,
    MessageRefused,
    NodeHello,
    NodeReport,
    OpenFailed,
    Outcome,
    PlatformReport,
    PolicyRequested,
    ProbeResult,
    ProfileCancelRequested,
    ProfileRequested,
    QuotaRequested,
    RequestKey,
    RestartRequested,
    ResumeRequested,
    StragglerFound,
    StreamReset,
    SuspendRequested,
    Tick,
    UncordonRequested,
    UpdateRequested,
)
from megascale_driver.core.values.policy import Policy


@dataclass(frozen=True, slots=True)
class _Order:
    """A kind of operator request: its name, its subject, and the function that carries it out."""

    kind: str
    subject: Callable[[Any], str]
    carry_out: Callable[[Draft, Any], None]


def _of_job(event: Any) -> str:
    return f"jobs/{event.job}"


def _of_spec(event: Any) -> str:
    return f"jobs/{event.config.name}"


def _of_node(event: Any) -> str:
    return f"nodes/{event.node}"


def _of_cluster(_: Any) -> str:
    return "cluster"


_NOTHING = Outcome((), (), ())  # what a report without consequences leads to
_ORDERS: dict[type[Any], _Order] = {
    JobSubmitted: _Order("SubmitJob", _of_spec, jobs.submit),
    CancelRequested: _Order("CancelJob", _of_job, jobs.cancel),
    SuspendRequested: _Order("SuspendJob", _of_job, orders.suspend),
    ResumeRequested: _Order("ResumeJob", _of_job, orders.resume),
    DeleteRequested: _Order("DeleteJob", _of_job, deletion.delete),
    RestartRequested: _Order("RestartJob", _of_job, orders.restart),
    UpdateRequested: _Order("UpdateJob", _of_spec, orders.update),
    DrainRequested: _Order("DrainNode", _of_node, orders.drain),
    PolicyRequested: _Order("SetPolicy", _of_cluster, orders.set_policy),
    QuotaRequested: _Order("SetQuota", _of_cluster, quotas.order),
    BreakerResetRequested: _Order("ResetBreaker", _of_cluster, orders.reset_breaker),
    EvictRequested: _Order("EvictNode", _of_node, orders.drain),
    CordonRequested: _Order("CordonNode", _of_node, nodes.set_disposition),
    UncordonRequested: _Order("UncordonNode", _of_node, orders.uncordon),
    ProfileRequested: _Order("ProfileJob", _of_job, profiles.request),
    ProfileCancelRequested: _Order("CancelProfile", _of_job, profiles.cancel),
}


def step(state: Cluster, event: Event, policy: Policy) -> tuple[Cluster, Outcome]:
    """The state after ``event``, and what follows from it; ``state`` itself is not changed."""
    draft = Draft(state, policy, event.now_s)
    if isinstance(event, NodeReport):
        # A report can only advance the job that holds its node, so that a report stays cheap. Ticks
        # advance all jobs, four times a second.
        job = nodes.report(draft, event)
        if job is not None:
            jobs.advance(draft, job.name, event.node)
        schedule(draft)
    elif isinstance(event, NodeHello | StreamReset | ProbeResult):
        # About one node: only the job that holds the node can be affected, and only in that slot.
        _dispatch(draft, event)
        job = draft.holder_of(event.node)
        if job is not None:
            jobs.advance(draft, job.name, event.node)
        schedule(draft)
    else:
        _dispatch(draft, event)
        for name in list(draft.jobs):
            jobs.advance(draft, name)
        # Last: a node that this event freed goes to a waiting job in the same decision.
        schedule(draft)
    return draft.finish()


def reports(
    state: Cluster, events: Sequence[NodeReport], policy: Policy
) -> tuple[Cluster, list[Outcome]]:
    """Equal to one :func:`step` after the other, for reports that came directly in a row.

    The nodes of a fleet that prepares, starts or stops an attempt report it one by one, and the
    last report decides. So reports that change only their own nodes share one working copy.
    """
    outcomes: list[Outcome] = []
    draft: Draft | None = None
    for event in events:
        if draft is None:
            draft = Draft(state, policy, event.now_s)
        draft.now_s = event.now_s
        before = draft.nodes.get(event.node)
        job = nodes.report(draft, event)
        if job is not None:
            jobs.advance(draft, job.name, event.node)
        changed = draft.nodes.get(event.node) is not before
        schedule(draft, {event.node: before} if changed else {})
        # No consequences yet, so the next report can use the same copy.
        if draft.only_nodes_changed:
            outcomes.append(_NOTHING)
            continue
        state, outcome = draft.finish()
        outcomes.append(outcome)
        draft = None
    if draft is not None:
        state, _ = draft.finish()
    return state, outcomes


def _dispatch(draft: Draft, event: Event) -> None:
    if type(event) in _ORDERS:
        _mutate(draft, event)
    else:
        _HANDLERS[type(event)](draft, event)


def _mutate(draft: Draft, event: Any) -> None:
    order = _ORDERS[type(event)]
    if event.request is not None and _seen_before(draft, order.kind, event.request):
        return
    order.carry_out(draft, event)
    # A refused request is not remembered: sent again, it may be possible by then.
    if event.request is not None and not draft.refusal:
        draft.requests[event.request.request_id] = Request(
            order.kind, order.subject(event), event.request.digest, draft.now_s
        )


def _seen_before(draft: Draft, kind: str, key: RequestKey) -> bool:
    """True if the request was carried out before; another one under the same id is refused.

    The id is stored in the transaction that carries out the request. A client that got no answer
    sends the request again, to the same driver or to the next leader, and it takes effect once.
    """
    known = draft.requests.get(key.request_id)
    if known is None:
        return False
    if (known.kind, known.digest) != (kind, key.digest):
        draft.refusal = "REQUEST_ID_REUSED"
    return True


def _tick(draft: Draft, event: Tick) -> None:
    if event.loop_blocked:
        held_until_s = event.now_s + draft.policy.heartbeat_interval_s
        draft.silence_hold_until_s = max(held_until_s, draft.silence_hold_until_s)
    for name, attempt, number in event.steps:
        record, held_s = event.records.get(name, {}), event.checkpointing_s.get(name, 0.0)
        jobs.steps_seen(draft, name, attempt, number, record, held_s)
    breaker.refresh(draft)
    # After the steps: a completed step proves that the nodes of its job are alive.
    liveness.silent(draft, event.silent)
    deletion.expire(draft)
    nodes.forget_dead(draft)
    oldest_s = event.now_s - draft.policy.request_memory_s
    expired = [key for key, request in draft.requests.items() if request.at_s < oldest_s]
    for key in expired:
        del draft.requests[key]


def _leader_started(draft: Draft, event: LeaderStarted) -> None:
    """Adopt the state that the previous leader has stored; clocks start again.

    Running attempts continue. A node that has not linked yet may simply not have found this driver,
    so its absence is no evidence before the grace period is over.
    """
    draft.leader_since_s = event.now_s
    draft.grace_until_s = event.now_s + draft.policy.leader_grace_s
    for name in list(draft.nodes):
        draft.put_node(replace(draft.nodes[name], last_seen_s=event.now_s, heard_at_s=event.now_s))
    jobs.restart_timers(draft)
    draft.log(
        reasons.LEADER_ELECTED,
        f"the driver at {event.address} leads",
        subject="driver",
        policy="election",
    )
    for key, problem in draft.state.unreadable.items():
        kind, _, name = key.partition("/")
        draft.log(
            reasons.ROW_UNREADABLE,
            f"the stored row {key} cannot be read by this build: {problem}",
            subject=key if kind in ("jobs", "nodes") and name else "driver",
            policy="unreadable-row",
            outcome={
                "jobs": "the job is not scheduled, and its name is held; its rows stay, "
                "its workers continue, their nodes get no other work",
                "nodes": "the node is quarantined",
            }.get(kind, "it is left out"),
        )


def _detectors() -> dict[type[Any], Callable[[Draft, Any], None]]:
    """The handlers of findings, from HANDLERS of the modules in the room of signs."""
    found: dict[type[Any], Callable[[Draft, Any], None]] = {}
    for module in pkgutil.iter_modules(signs.__path__):
        detector = importlib.import_module(f"{signs.__name__}.{module.name}")
        found |= getattr(detector, "HANDLERS", {})
    return found


_HANDLERS: dict[type[Any], Callable[[Draft, Any], None]] = {
    Tick: _tick,
    NodeHello: nodes.hello,
    StreamReset: liveness.stream_reset,
    ProbeResult: liveness.probe_result,
    PlatformReport: liveness.platform_report,
    AttemptOpened: jobs.opened,
    OpenFailed: jobs.open_failed,
    GroupChecked: search.checked,
    MessageRefused: nodes.message_refused,
    LossDiverged: divergence.diverged,
    StragglerFound: stragglers.found,
    CheckCompared: nodes.check_compared,
    LeaderStarted: _leader_started,
    **_detectors(),
}
