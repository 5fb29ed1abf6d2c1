"""Watches the traffic between the nodes of running jobs, besides the core, while a driver leads.

Every heartbeat interval it reads the counters of the newest heartbeats, which are no events of the
core, and posts the findings of :mod:`megascale_driver.analysis.traffic`. A job on one host moves no
bytes through a port; one whose hosts show no counters is read less often, and the core remembers
why. A new leader learns the traffic of each job anew.

Nearly all reads find nothing, also on ten thousand nodes. So a read takes from each rank only what
a rule needs, a few nodes between the turns of other tasks, and on average NODES_PER_S of a job. The
status pages of ranks are read only when a standstill is found.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from megascale.v1 import link_pb2
from megascale_common.node.status_page import Phase
from megascale_common.service import logs
from megascale_driver.analysis.traffic import Bytes, Look, TrafficRule, TrafficTrack, counted
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Event, TrafficChanged, TrafficStood
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence.intake import Seat, pages_of
from megascale_driver.shell.decisions import off_loop
from megascale_driver.shell.engine import Engine

NODES_AT_ONCE = 32  # nodes read before other tasks get a turn: 2 ms
NODES_PER_S = 500.0  # a larger job is read less often than every heartbeat interval
_TRAINING = Phase.STEP.name
STALE_INTERVALS = 2.0  # heartbeat intervals after which a heartbeat is too old
UNSEEN_AGAIN_S = 60.0
_log = logs.get(__name__)


@dataclass(slots=True)
class _Watched:
    """An attempt that is watched, and when it is read next."""

    attempt: int
    track: TrafficTrack
    not_before_s: float = 0.0
    unseen: str = ""


@dataclass(slots=True)
class _Newest:
    """The newest heartbeats of a job's nodes, as far as a rule needs them."""

    nodes: dict[str, Bytes | None] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)  # the nodes with a fresh heartbeat
    ranks: int = 0  # ranks with a status page
    training: bool = True  # all ranks are in a step
    waiting: bool = False  # a rank is inside an operation
    step: int = sys.maxsize  # the lowest step of all ranks

    def add(self, seat: Seat, beat: link_pb2.Heartbeat) -> None:
        """Take in the heartbeat of one node."""
        self.seats.append(seat)
        self.nodes[seat.node] = bytes_of(beat, seat.received_at_s)
        for worker in beat.workers:
            phase = worker.phase
            if not phase:
                continue
            self.ranks += 1
            self.training = self.training and phase == _TRAINING
            self.step = min(self.step, worker.step)
            if not self.waiting:
                self.waiting = any([each.entered > each.completed for each in worker.operations])


class TrafficWatch:
    """Watches every running job that has nodes on two hosts or more."""

    def __init__(
        self,
        state: Callable[[], Cluster],
        seat_of: Callable[[str], Seat | None],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
        policy: Policy,
        rule: TrafficRule | None = None,
    ) -> None:
        self._state = state
        self._seat_of = seat_of
        self._now_s = now_s
        self._post = post
        self._policy = policy
        self._rule = rule or TrafficRule()
        self._watched: dict[str, _Watched] = {}

    async def run(self) -> None:
        """Read once per heartbeat interval, without end."""
        while True:
            await asyncio.sleep(self._policy.heartbeat_interval_s)
            await self.look()

    async def look(self) -> None:
        """Read all running jobs once."""
        state = self._state()
        running = [job for job in state.jobs.values() if job.phase is JobPhase.RUNNING]
        alive = {job.name for job in running}
        self._watched = {name: one for name, one in self._watched.items() if name in alive}
        for job in running:
            if _on_several_hosts(job, state):
                await self._look_at(job)

    async def _look_at(self, job: Job) -> None:
        watched = self._watched.get(job.name)
        # Rates of another attempt say nothing about this one: it may run on other nodes.
        if watched is None or watched.attempt != job.attempt:
            track = TrafficTrack((slot.node for slot in job.slots), self._rule)
            watched = self._watched[job.name] = _Watched(job.attempt, track)
        if self._now_s() < watched.not_before_s:
            return
        newest = await self._read(job)
        now_s, track, nodes = self._now_s(), watched.track, len(job.slots)
        watched.not_before_s = now_s + nodes / NODES_PER_S
        for change in await off_loop(nodes, lambda: track.look(_look(now_s, job, newest))):
            self._post(
                TrafficChanged(
                    now_s,
                    job.name,
                    job.attempt,
                    change.kind,
                    change.source,
                    change.sentence,
                    change.nodes,
                )
            )
        self._note_unseen(now_s, job, watched)
        found = track.standstill(job.current.last_step_at_s)
        if found is not None:
            pages = tuple(await pages_of(newest.seats, job.name, job.attempt))
            self._post(
                TrafficStood(now_s, job.name, job.attempt, found.limit_s, found.sentence, pages)
            )

    def _note_unseen(self, now_s: float, job: Job, watched: _Watched) -> None:
        why = watched.track.unseen
        if why:
            watched.not_before_s = now_s + UNSEEN_AGAIN_S
        if why == watched.unseen:
            return
        watched.unseen = why
        if why:
            _log.info("traffic is not watched", job=job.name, attempt=job.attempt, reason=why)
        self._post(TrafficChanged(now_s, job.name, job.attempt, "unseen", "", why))

    async def _read(self, job: Job) -> _Newest:
        found = _Newest()
        oldest_s = self._now_s() - STALE_INTERVALS * self._policy.heartbeat_interval_s
        for at, slot in enumerate(job.slots, start=1):
            found.nodes[slot.node] = None
            seat = self._seat_of(slot.node)
            if seat is not None and seat.received_at_s >= oldest_s:
                self._take(found, seat, job)
            if at % NODES_AT_ONCE == 0:
                await asyncio.sleep(0)  # so that acknowledgements are not held up
        return found

    def _take(self, found: _Newest, seat: Seat, job: Job) -> None:
        try:
            beat = seat.beat
        except DecodeError:
            return  # the lane has already refused it
        if beat is not None and (beat.job, beat.attempt) == (job.name, job.attempt):
            found.add(seat, beat)


def watch(engine: Engine) -> Callable[[], Coroutine[Any, Any, None]]:
    """The loop that runs while a driver leads."""
    return TrafficWatch(
        lambda: engine.state, engine.links.get, engine.clock.now_s, engine.post, engine.policy
    ).run


def bytes_of(beat: link_pb2.Heartbeat, at_s: float) -> Bytes:
    """The bytes of the ports of a node by its heartbeat, which arrived at ``at_s``."""
    return counted(at_s, ((each.name, each.value) for each in beat.host.counters))


def _on_several_hosts(job: Job, state: Cluster) -> bool:
    """True if the job runs on several machines; executors on one machine share its ports.

    Stops at the second host, usually the second node, so that large jobs stay cheap.
    """
    first = None
    for slot in job.slots:
        node = state.nodes.get(slot.node)
        host = (node.identity.boot_id or slot.node) if node is not None else slot.node
        if first is None:
            first = host
        elif host != first:
            return True
    return False


def _look(now_s: float, job: Job, newest: _Newest) -> Look:
    ranks = sum(len(slot.ranks) for slot in job.slots)
    return Look(
        now_s,
        newest.nodes,
        training=newest.training and newest.ranks == ranks,
        waiting=newest.waiting,
        step=newest.step if newest.ranks else 0,
        step_times=job.step_times,
    )
