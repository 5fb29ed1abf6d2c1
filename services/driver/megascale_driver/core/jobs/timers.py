"""The next moment at which time alone changes the state, so that a simulation can skip ticks.

Every rule of the core that waits for a moment has a line here. The whole-shell simulation compares
the decisions of seeds with and without skipping, which reveals a missing line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megascale_driver.core.nodes import departures
from megascale_driver.core.signs import hang
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy

SOON_S = 1e-3  # at the next tick


def next_s(state: Cluster, now_s: float, policy: Policy) -> float:
    """The next moment after ``now_s`` at which a tick may change the state; inf for never.

    Ticks before it change nothing, provided that no step was reported and no node is silent.
    """
    return min((at_s for at_s in _moments(state, now_s, policy) if at_s > now_s), default=math.inf)


def _moments(state: Cluster, now_s: float, policy: Policy) -> Iterator[float]:
    yield state.grace_until_s
    yield state.silence_hold_until_s
    yield max(state.queue_due_s, now_s + SOON_S)
    breaker = state.breaker
    if breaker.tripped_at_s:
        yield breaker.tripped_at_s + policy.breaker_window_s
    for trip in breaker.switches:
        yield trip.at_s + policy.breaker_window_s
    for at_s, _ in breaker.evictions:
        yield at_s + policy.breaker_window_s
    for request in state.requests.values():
        yield request.at_s + policy.request_memory_s
        break  # requests are in the order of their times
    yield state.queue_due_s
    yield state.forget_due_s
    for job in state.jobs.values():
        yield job.not_before_s
        if job.active:
            yield from _of_job(job, now_s, policy)
        elif job.terminal:
            yield job.updated_at_s + policy.keep_ended_s + SOON_S


def _of_job(job: Job, now_s: float, policy: Policy) -> Iterator[float]:
    attempt = job.current
    if job.phase is JobPhase.PREPARING:
        yield job.timer_s + policy.prepare_timeout_s
        yield attempt.open_since_s + policy.open_timeout_s
        yield attempt.open_not_before_s
    elif job.phase is JobPhase.STARTING:
        yield job.timer_s + policy.start_timeout_s
    elif job.phase is JobPhase.STOPPING:
        yield job.timer_s + policy.stop_timeout_s
        yield job.timer_s + policy.stop_timeout_s + policy.fence_timeout_s
        if (found := attempt.searching) is not None:
            yield found.round_at_s + policy.group_check_timeout_s
            yield found.begun_at_s + policy.search_cap_s
    elif hang.is_stalled(job, now_s, policy):
        yield now_s + SOON_S  # its status pages are read again and again
    else:
        yield hang.stalled_from_s(job, policy)
    yield attempt.stays_until_s
    if attempt.leaving is not None:
        limit_s = job.config.checkpoint.final_timeout_s + departures.ORDER_S
        yield attempt.leaving.since_s + limit_s
    if attempt.finished_at_s:
        yield attempt.finished_at_s + policy.commit_report_s
    if job.profile is not None and job.profile.pending:
        yield job.profile.not_after_s + policy.profile_grace_s
        yield job.profile.not_after_s + policy.profile_write_s
