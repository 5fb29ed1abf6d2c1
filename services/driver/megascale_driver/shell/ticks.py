"""Ticks give the core the time, and with it the newest step of each job.

Step records come several times a second from every job. They are fed to watchers at once and wait
here for the next tick, so a job costs the core one step in a tick however fast its steps are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from megascale.v1 import types_pb2
from megascale_common.service import logs
from megascale_driver.analysis.divergence import DivergenceTrack, found, observe
from megascale_driver.core.values import bounds
from megascale_driver.core.values.events import LossDiverged, Tick
from megascale_driver.presence.inbox import StepLanes
from megascale_driver.shell.heartbeats import Core, Heartbeats
from megascale_driver.wire import messages as wire

# a longer delay means that the driver itself was blocked: silence is no evidence
LOOP_BLOCKED_S = 1.0

_log = logs.get(__name__)


class Steps:
    """Step records on their way to the core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lanes = StepLanes()
        self._tracks: dict[str, DivergenceTrack] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, job: str, attempt: int, step: int) -> None:
        """Add a step that was received in a former term."""
        self._lanes.add(job, attempt, step)

    def done(self, job: str, record: types_pb2.StepRecord) -> bool:
        """Take in a step record; False if it was known, or is implausible."""
        core = self._core
        known = core.state.jobs.get(job)
        if known is not None and (problem := bounds.record(known, record.attempt, record.step)):
            core.refuse_message(f"jobs/{job}", problem)
            return False
        if not core.feeds.of(job).add_step(record):
            return False
        held_s = record.snapshot_time.ToNanoseconds() / 1e9
        self._lanes.add(job, record.attempt, record.step, held_s)
        core.retimed.set()
        self._watch_loss(job, record)
        return True

    def forget_ended(self) -> None:
        """Forget the losses of jobs that have ended or are deleted."""
        for name in list(self._tracks):
            if (job := self._core.state.jobs.get(name)) is None or job.terminal:
                del self._tracks[name]

    def tick(self, now_s: float, blocked: bool, *, silence: bool = True) -> Tick:
        """A tick with the steps since the one before, and the silent nodes."""
        core, lanes = self._core, self._lanes.take()
        records = {
            job: wire.record_values(record)
            for job in lanes
            if (record := core.feeds.record_of(job)) is not None
        }
        return Tick(
            now_s,
            tuple((job, lane.attempt, lane.step) for job, lane in lanes.items()),
            blocked,
            records,
            {job: lane.held_s for job, lane in lanes.items()},
            core.presence.lane.due(now_s, core.state.nodes) if silence else (),
        )

    def _watch_loss(self, name: str, record: types_pb2.StepRecord) -> None:
        """Post a divergence, if the records of the job show one."""
        job = self._core.state.jobs.get(name)
        if job is None:
            return
        track = self._tracks.get(name, DivergenceTrack())
        track = self._tracks[name] = observe(track, wire.step_sample(record), job.config)
        if (diverged := found(track, job.config)) is not None:
            self._core.post(LossDiverged(self._core.clock.now_s(), name, diverged))


class Ticks:
    """The ticks of one driver; a single one waits for the core, unless the loop was blocked."""

    def __init__(self, core: Core, steps: Steps, heartbeats: Heartbeats) -> None:
        self._core = core
        self._steps = steps
        self._heartbeats = heartbeats
        self._waits = False  # for the core

    def taken(self) -> None:
        """The core has taken the tick that waited."""
        self._waits = False

    async def run(self) -> None:
        """Give the core the time, four times a second; detect a blocked event loop."""
        core = self._core
        last_s = core.clock.now_s()
        while True:
            due_s = await self._until_due(last_s)
            last_s = now_s = core.clock.now_s()
            # Nodes whose messages wait for their turn are not silent either.
            behind_s = max(now_s - due_s, self._heartbeats.turns.waited_s())
            blocked = behind_s > LOOP_BLOCKED_S
            if blocked:
                _log.warning(
                    "the driver is behind; silence of nodes is ignored for a while",
                    seconds=behind_s,
                )
            # One waiting tick is enough, but the core has to learn of every block of the loop.
            if blocked or not self._waits:
                self._waits = True
                core.post(self._steps.tick(now_s, blocked))
            self._heartbeats.read_pages(now_s)

    async def _until_due(self, last_s: float) -> float:
        """Wait until the tick after ``last_s`` is due; returns when that was."""
        core, pace = self._core, self._core.presence.pace
        while True:
            now_s = core.clock.now_s()
            events_wait = bool(self._steps or core.requests)
            due_s = pace.next_tick_s(last_s, now_s, core.state, events_wait)
            # A real driver sleeps through: its ticks are regular, so that a late one shows a
            # blocked loop.
            if not pace.skips:
                await asyncio.sleep(max(0.0, due_s - now_s))
                return due_s
            core.retimed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - now_s if due_s < math.inf else None):
                    await core.retimed.wait()
                    continue  # something may be due earlier now
            return due_s
