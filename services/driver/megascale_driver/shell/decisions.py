"""Decides batches of events, and publishes what is committed.

A mass event is one decision with a line for each of ten thousand nodes, and a new leader has the
lines of a thousand jobs. Published at once they would block the event loop for a second, and with
it every acknowledgement and tick. So they are published a few at a time; commands go out before,
answers after.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from megascale.v1 import types_pb2
from megascale_common.service import logs
from megascale_common.service.clock import Clock
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit, Event, NodeReport, Outcome
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.audit_log import AuditLog
from megascale_driver.journal.store import Loaded
from megascale_driver.shell.feeds import JobFeeds
from megascale_driver.wire import messages as wire

LINES_AT_ONCE = 64  # lines of the audit log before other tasks get a turn: 4 ms
# jobs before other tasks get a turn: 3 ms for their messages (6 ms for one on 12,500 nodes)
JOBS_AT_ONCE = 16

_log = logs.get(__name__)


class Observer(Protocol):
    """Counts steps and decisions, for metrics."""

    def step(self, job: str, record: types_pb2.StepRecord) -> None:
        """A step was completed."""

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """A decision was committed; one with many lines is reported in several calls."""


class Publisher:
    """The audit log in memory, the feeds of jobs and the observers of one driver."""

    def __init__(self, clock: Clock) -> None:
        self.audit = AuditLog()
        self.feeds = JobFeeds()
        self.observers: list[Observer] = []
        self._clock = clock

    async def adopt(self, loaded: Loaded, epoch: types_pb2.Epoch) -> list[tuple[str, int, int]]:
        """Take over the logs and jobs that a new leader has read, before its term begins.

        Returns (job, attempt, step) of each step that this process received in a former term and
        that is not stored.
        """
        self.audit.load(loaded.audit)
        for at, line in enumerate(loaded.audit, 1):
            if line.log:
                self.feeds.of(line.log).add_event(wire.event_message(line, epoch))
            if at % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        newer = []
        for at, (name, job) in enumerate(loaded.cluster.jobs.items(), 1):
            record = self.feeds.of(name).adopt(wire.record_message(job.last_record))
            if (record.attempt, record.step) > (job.attempt, job.current.step):
                newer.append((name, record.attempt, record.step))
            self.job(job, loaded.cluster)
            if at % JOBS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return newer

    async def committed(
        self, old: Cluster, new: Cluster, audit: tuple[Audit, ...], epoch: types_pb2.Epoch
    ) -> None:
        """Publish a committed decision: its lines first, then the jobs that it has changed."""
        gone = old.jobs.keys() - new.jobs.keys()
        self.feeds.forget(gone)
        self.audit.extend((), gone)
        before = old
        for first in range(0, max(1, len(audit)), LINES_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            lines = audit[first : first + LINES_AT_ONCE]
            self.audit.extend(lines)
            for observer in self.observers:
                observer.committed(before, new, lines)
            before = new  # a change of phase is counted once
            for line in lines:
                self._line(line, epoch)
        changed = [
            job
            for name, job in new.jobs.items()
            if (known := old.jobs.get(name)) is not job
            and (known is None or _visible(known) != _visible(job))
        ]
        for at, job in enumerate(changed, 1):
            self.job(job, new)
            if at % JOBS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def job(self, job: Job, state: Cluster) -> None:
        """Publish the state that a job has in ``state``."""
        feed = self.feeds.of(job.name)
        message = wire.job_message(
            job,
            feed.last_record,
            self._clock.now_s(),
            state.nodes,
            feed.last_evaluation,
            feed.typical_step_s,
        )
        feed.add_job(message, job.terminal)
        if job.terminal:
            self.feeds.release(job.name)

    def _line(self, line: Audit, epoch: types_pb2.Epoch) -> None:
        _log.info(line.reason, subject=line.subject, attempt=line.attempt, message=line.message)
        if line.log:
            self.feeds.of(line.log).add_event(wire.event_message(line, epoch))


def _visible(job: Job) -> tuple[Any, ...]:
    """The part of a job whose change is sent to watchers."""
    return (
        job.phase,
        job.reason,
        job.attempt,
        job.slots,
        job.spares,
        job.evicted,
        job.current.restore,
        job.committed_step,
        job.restarts,
        job.profile,
    )


# Decisions without blocking the event loop.
#
# A decision is a pure function of values, so it does not matter where it is computed. At thousands
# of nodes a single one takes up to a third of a second (a job is placed on all of them), and
# encoding its changes as long again; no heartbeat would be acknowledged meanwhile. Such decisions
# are computed in a thread, which yields to the loop every few milliseconds; the engine awaits it
# before it takes anything else.


# From this many nodes on, decisions are computed in a thread. Below, the slowest takes some 100 ms,
# and the way to the thread and back would cost more than most decisions do.
LARGE_NODES = 4096
# Time for which events of so many nodes are collected before they are decided together. When
# thousands of nodes linked to a new leader, each turn of the engine had one or two events, and the
# turns cost more than the events.
GATHER_S = 0.02

T = TypeVar("T")


async def gather_events(nodes: int) -> None:
    """Wait until events of a large fleet have gathered; for a small one return at once."""
    if nodes >= LARGE_NODES:
        await asyncio.sleep(GATHER_S)


async def off_loop(nodes: int, work: Callable[[], T]) -> T:
    """The result of pure work on a state with ``nodes`` nodes, without blocking the loop."""
    if nodes < LARGE_NODES:
        return work()
    return await asyncio.to_thread(work)


def decide(
    state: Cluster, events: Iterable[Event], policy: Policy
) -> tuple[Cluster, list[Outcome | Exception]]:
    """The state after the events in order, and the outcome of each.

    An event on which the core fails is dropped, and its outcome is the error: a defect that one
    event exposes must not stop all other decisions. ``state`` is a value, so the failed step has
    left nothing behind.
    """
    outcomes: list[Outcome | Exception] = []
    # Reports in a row share one working copy (machine.reports).
    for reports, group in itertools.groupby(events, lambda event: isinstance(event, NodeReport)):
        if reports:
            found: Sequence[Outcome | Exception]
            state, found = _reports(state, list(group), policy)
        else:
            state, found = _one_by_one(state, group, policy)
        outcomes += found
    return state, outcomes


def _reports(
    state: Cluster, events: list[Any], policy: Policy
) -> tuple[Cluster, Sequence[Outcome | Exception]]:
    try:
        return machine.reports(state, events, policy)
    except Exception:  # one of them, but not known which: evaluate each by itself
        return _one_by_one(state, events, policy)


def _one_by_one(
    state: Cluster, events: Iterable[Event], policy: Policy
) -> tuple[Cluster, list[Outcome | Exception]]:
    outcomes: list[Outcome | Exception] = []
    for event in events:
        try:
            state, outcome = machine.step(state, event, policy)
        except Exception as error:
            kind = type(event).__name__
            _log.exception("the core failed on an event; it is dropped", event_kind=kind)
            outcomes.append(error)
        else:
            outcomes.append(outcome)
    return state, outcomes
