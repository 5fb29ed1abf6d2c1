"""The core of the driver: ``step(state, event) -> (state, outcome)``. Pure: no I/O, no clock, no
random.

The shell commits what differs between the two states, together with the audit lines, before it lets
any desired state or effect leave the process. Equal states and events give equal outcomes, which
the simulation rests on.
"""

from __future__ import annotations

from megascale_driver.core import breaker, jobs, liveness, nodes, profiles
from megascale_driver.core.draft import Draft
from megascale_driver.core.events import (
    AttemptOpened,
    CancelRequested,
    CordonRequested,
    Event,
    EvictRequested,
    JobSubmitted,
    LeaderStarted,
    Mutation,
    NodeHello,
    NodeReport,
    OpenFailed,
    Outcome,
    ProbeResult,
    ProfileRequested,
    RequestKey,
    StreamReset,
    Tick,
    UncordonRequested,
)
from megascale_driver.core.policy import Policy
from megascale_driver.core.scheduling import schedule
from megascale_driver.core.state import Cluster, Request

_MUTATION_KINDS = {
    JobSubmitted: "SubmitJob",
    CancelRequested: "CancelJob",
    EvictRequested: "EvictNode",
    CordonRequested: "CordonNode",
    UncordonRequested: "UncordonNode",
    ProfileRequested: "ProfileJob",
}


def step(state: Cluster, event: Event, policy: Policy) -> tuple[Cluster, Outcome]:
    """Take in one event. ``policy`` holds every limit; the state that is passed in stays as it was."""
    draft = Draft(state, policy, event.now_s)
    if isinstance(event, NodeReport):
        # The steady stream of heartbeats that say nothing new stays cheap; ticks look at
        # everything.
        job = nodes.report(draft, event)
        if job is not None:
            jobs.advance(draft, job.name, event.node)
            schedule(draft)
    else:
        _dispatch(draft, event)
        for name in list(draft.jobs):
            jobs.advance(draft, name)
        schedule(draft)
    return draft.finish()


def _dispatch(draft: Draft, event: Event) -> None:
    if isinstance(event, Tick):
        _tick(draft, event)
    elif isinstance(event, NodeHello):
        nodes.hello(draft, event)
    elif isinstance(event, StreamReset):
        liveness.stream_reset(draft, event)
    elif isinstance(event, ProbeResult):
        liveness.probe_result(draft, event)
    elif isinstance(event, AttemptOpened):
        jobs.opened(draft, event)
    elif isinstance(event, OpenFailed):
        jobs.open_failed(draft, event)
    elif isinstance(event, LeaderStarted):
        _leader_started(draft, event)
    elif isinstance(event, Mutation):
        _mutate(draft, event)


def _mutate(draft: Draft, event: Mutation) -> None:
    kind = _MUTATION_KINDS[type(event)]
    if event.request is not None and _seen_before(draft, kind, event.request):
        return
    if isinstance(event, JobSubmitted):
        subject = f"jobs/{event.config.name}"
        jobs.submit(draft, event)
    elif isinstance(event, CancelRequested):
        subject = f"jobs/{event.job}"
        jobs.cancel(draft, event)
    elif isinstance(event, ProfileRequested):
        subject = f"jobs/{event.job}"
        profiles.request(draft, event)
    else:
        subject = f"nodes/{event.node}"
        nodes.set_disposition(draft, event)
    if event.request is not None and not draft.refusal:
        draft.requests[event.request.request_id] = Request(
            kind, subject, event.request.digest, draft.now_s
        )


def _seen_before(draft: Draft, kind: str, key: RequestKey) -> bool:
    """Whether the request was carried out before; another request under the same id is refused."""
    known = draft.requests.get(key.request_id)
    if known is None:
        return False
    if (known.kind, known.digest) != (kind, key.digest):
        draft.refusal = "REQUEST_ID_REUSED"
    return True


def _tick(draft: Draft, event: Tick) -> None:
    if event.loop_blocked:
        held_until_s = event.now_s + draft.policy.heartbeat_interval_s
        draft.set(silence_hold_until_s=max(held_until_s, draft.cluster("silence_hold_until_s")))
    for name, attempt, number in event.steps:
        jobs.steps_seen(draft, name, attempt, number)
    breaker.refresh(draft)
    liveness.evaluate_silence(draft)
    oldest_s = event.now_s - draft.policy.request_memory_s
    expired = [key for key, request in draft.requests.items() if request.at_s < oldest_s]
    for key in expired:
        del draft.requests[key]


def _leader_started(draft: Draft, event: LeaderStarted) -> None:
    """Absence of a node says nothing until the grace period has passed; counting starts now."""
    draft.set(leader_since_s=event.now_s, grace_until_s=event.now_s + draft.policy.leader_grace_s)
    for name in list(draft.nodes):
        draft.node(name, last_seen_s=event.now_s)
    jobs.restart_timers(draft)
    draft.log(
        "LEADER_ELECTED",
        f"the driver at {event.address} leads",
        subject="driver",
        policy="election",
    )
