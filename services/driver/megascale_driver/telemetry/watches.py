"""Watches of running jobs from stored spans: slow nodes, hot experts, steps slower than planned.

The watches run outside the core, every few steps of a job. A finding becomes an event for the core,
which logs it; the core acts on a slow node only if an operator has set that rule to enforce.
Watches wait for spans, but nothing waits for a watch. The newest comparison of each job with its
plan is kept here for clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from megascale.v1 import driver_pb2
from megascale_common.service import logs
from megascale_driver.analysis.hot_experts import HotRank
from megascale_driver.analysis.spans.classes import OutlierRule
from megascale_driver.core.signs.routing import HotRanksFound
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Event, PlanCompared, StragglerFound
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.telemetry.views import SpanViews
from megascale_planner.devices import BadCalibration
from megascale_planner.job_plan import Comparison, JobPlan, PlanRule, compare_steps, plan_of
from megascale_planner.workload import Refused

LOOK_S: Final = 5.0
PLAN_RULE: Final = PlanRule()
SLOW_RULE: Final = OutlierRule()
# With so many ranks that a window would be shorter, step records are compared instead of spans.
LEAST_WINDOW_STEPS: Final = 3
_log = logs.get(__name__)


Collectives = Mapping[tuple[str, str], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The newest comparison of an attempt, or in ``problem`` why there is none, and the remedy.

    ``collectives``: by (operation, group) the median seconds per step on the network, and waiting.
    """

    attempt: int
    comparison: Comparison | None = None
    problem: str = ""
    collectives: Collectives = field(default_factory=dict)


class _Watch:
    """Looks at a running job again once its newest step is a window past the last look."""

    problem: str  # logged when a look fails

    def __init__(
        self,
        views: SpanViews,
        state: Callable[[], Cluster],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
    ) -> None:
        self._views = views
        self._state = state
        self._now_s = now_s
        self._post = post
        self._seen: dict[str, tuple[int, int]] = {}  # by job: attempt and step of the last look

    async def run(self) -> None:
        """Look at all jobs every LOOK_S, without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (OSError, ValueError) as error:
                _log.warning(self.problem, reason=str(error))

    async def look(self) -> None:
        """Look at the jobs that are due."""
        raise NotImplementedError

    def _due(self, job: Job, step: int, window_steps: int) -> bool:
        """True if the job is due at its newest ``step``, which is recorded as its last look."""
        attempt, last = self._seen.get(job.name, (0, 0))
        if attempt == job.attempt and step < last + window_steps:
            return False
        self._seen[job.name] = job.attempt, step
        return True

    def _forget_gone(self, jobs: Mapping[str, Job]) -> None:
        self._seen = {name: seen for name, seen in self._seen.items() if name in jobs}


class PlanWatch(_Watch):
    """Compares running jobs with their plans, and keeps the newest comparison of each."""

    problem = "jobs cannot be compared with their plans"

    def __init__(
        self,
        views: SpanViews,
        state: Callable[[], Cluster],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
        calibrations: Mapping[str, str],
    ) -> None:
        """``calibrations``: texts of calibration files, by device."""
        super().__init__(views, state, now_s, post)
        self._calibrations = calibrations
        self._answers: dict[str, Answer] = {}

    def of(self, job: Job) -> Answer | None:
        """The newest answer about the job's attempt while it runs; None before the first."""
        found = self._answers.get(job.name)
        current = found is not None and found.attempt == job.attempt
        return found if current and job.phase is JobPhase.RUNNING else None

    def message(self, job: Job) -> driver_pb2.PlanComparison | None:
        """The newest answer as a message for clients."""
        answer = self.of(job)
        if answer is None:
            return None
        found = answer.comparison
        if found is None:
            return driver_pb2.PlanComparison(attempt=answer.attempt, problem=answer.problem)
        return driver_pb2.PlanComparison(
            attempt=answer.attempt,
            first_step=found.first,
            last_step=found.last,
            measured_step_s=found.step_s,
            predicted_step_s=found.plan.step_s,
            low_s=found.plan.low_s,
            high_s=found.plan.high_s,
            terms=[
                driver_pb2.PlanTerm(
                    name=term.name, predicted_s=term.planned_s, measured_s=term.measured_s
                )
                for term in found.terms
            ],
            slower_by=found.slower_by,
            sentence=found.sentence,
            hardware=found.plan.hardware,
        )

    def comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """Name and newest comparison of each running job."""
        jobs = self._state().jobs
        for name, job in jobs.items():
            answer = self.of(job)
            if answer is not None and answer.comparison is not None:
                yield name, answer.comparison

    def collectives(self) -> Iterator[tuple[str, Collectives]]:
        """Name of each running job, and seconds of its single collectives."""
        for name, job in self._state().jobs.items():
            answer = self.of(job)
            if answer is not None and answer.collectives:
                yield name, answer.collectives

    async def look(self) -> None:
        """Compare the jobs that are due."""
        state = self._state()
        self._forget_gone(state.jobs)
        self._answers = {name: one for name, one in self._answers.items() if name in state.jobs}
        for job in state.jobs.values():
            if job.phase is JobPhase.RUNNING:
                await self._look_at(state, job)

    async def _look_at(self, state: Cluster, job: Job) -> None:
        step = await self._views.newest_step(job)
        if step < 0:
            step = job.current.step  # spans are off, or none has arrived yet
        if not self._due(job, step, PLAN_RULE.window_steps):
            return
        try:
            plan = self._plan(state, job)
        except (Refused, BadCalibration) as error:
            self._answers[job.name] = Answer(job.attempt, problem=str(error))
            return
        found, collectives = await self._compared(job, plan)
        if found is None:
            return
        self._answers[job.name] = Answer(job.attempt, found, collectives=collectives)
        # Only changes become events: the log has one line when a job gets slower, and one when it
        # recovers.
        if found.slower_by != job.current.plan.slower_by:
            self._post(
                PlanCompared(
                    self._now_s(),
                    job.name,
                    job.attempt,
                    found.slower_by,
                    found.sentence,
                    found.first,
                    found.last,
                    plan.hardware,
                )
            )

    async def _compared(self, job: Job, plan: JobPlan) -> tuple[Comparison | None, Collectives]:
        before, most = job.current.plan.slower_by, self._views.most_measured_steps(job)
        window = min(PLAN_RULE.window_steps, most // PLAN_RULE.windows)
        if job.config.telemetry.spans == "none" or window < LEAST_WINDOW_STEPS:
            times = np.array(
                job.step_times[-PLAN_RULE.windows * PLAN_RULE.window_steps :], np.float64
            )
            numbers = np.arange(job.current.step - len(times) + 1, job.current.step + 1)
            return compare_steps(numbers, times, {}, plan, before, PLAN_RULE), {}
        found = await self._views.measured_steps(job, PLAN_RULE.windows * window)
        rule = replace(PLAN_RULE, window_steps=window)
        single = {
            key: (float(np.median(network)), float(np.median(waiting)))
            for key, (network, waiting) in found.collectives.items()
            if len(network)
        }
        return compare_steps(found.steps, found.step_s, found.terms, plan, before, rule), single

    def _plan(self, state: Cluster, job: Job) -> JobPlan:
        models: set[str] = set()
        for slot in job.slots:
            node = state.nodes.get(slot.node)
            for device in node.identity.devices if node is not None else ():
                if device.index in slot.devices:
                    models.add("cpu" if device.kind == "cpu" else device.model)
        # The step model only knows jobs on one kind of device.
        if len(models) != 1:
            kinds = ", ".join(sorted(models)) or "unknown"
            raise Refused(f"no prediction for nodes with different devices ({kinds})")
        node_devices = max(len(slot.devices) for slot in job.slots)
        return plan_of(job.config, models.pop(), node_devices, self._calibrations)


class StragglerWatch(_Watch):
    """Finds the slow nodes of running jobs, and ranks with hot experts; keeps those of now."""

    problem = "the spans cannot be searched for slow nodes"

    def __init__(
        self,
        views: SpanViews,
        state: Callable[[], Cluster],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
    ) -> None:
        super().__init__(views, state, now_s, post)
        self._ratios: dict[str, dict[str, float]] = {}  # by job: slow nodes
        self._hot: dict[str, list[HotRank]] = {}  # by job

    def ratios(self) -> dict[str, float]:
        """By slow node: how many times as long it takes as the other nodes."""
        return {node: ratio for slow in self._ratios.values() for node, ratio in slow.items()}

    def hot_ranks(self) -> Iterator[tuple[str, HotRank]]:
        """Name of each running job, and each of its ranks with hot experts."""
        for name, found in self._hot.items():
            for hot in found:
                yield name, hot

    async def look(self) -> None:
        """Search the jobs that are due for slow nodes and hot experts."""
        jobs = [job for job in self._state().jobs.values() if job.phase is JobPhase.RUNNING]
        self._forget_gone(self._state().jobs)
        running = {job.name for job in jobs}
        self._ratios = {name: slow for name, slow in self._ratios.items() if name in running}
        self._hot = {name: hot for name, hot in self._hot.items() if name in running}
        for job in jobs:
            if not self._due(job, await self._views.newest_step(job), SLOW_RULE.window_steps):
                continue
            slow, hot = await self._views.compared(job, SLOW_RULE)
            # Once more when no rank is hot any longer, so that the core forgets the last verdict.
            if hot or self._hot.pop(job.name, []):
                self._post(HotRanksFound(self._now_s(), job.name, job.attempt, tuple(hot)))
            if hot:
                self._hot[job.name] = hot
            self._ratios[job.name] = {found.node: found.ratio for found in slow}
            for found in slow:
                self._post(
                    StragglerFound(
                        self._now_s(),
                        job.name,
                        job.attempt,
                        found.node,
                        found.rank,
                        found.op,
                        found.ratio,
                        found.sentence,
                    )
                )
