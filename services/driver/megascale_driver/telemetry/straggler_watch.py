"""Looks for slow nodes beside the core: every few steps of a running job, one evaluation.

What it finds is an event for the core, which writes it down once and acts on it only where an
operator has the rule enforced. It waits for spans and never has anything wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from megascale_common.service import logs
from megascale_driver.analysis.spans.outliers import OutlierRule
from megascale_driver.core.values.analysis_events import StragglerFound
from megascale_driver.core.values.events import (
    Event,
)
from megascale_driver.core.values.state import Cluster, JobPhase
from megascale_driver.telemetry.views import SpanViews

LOOK_S: Final = 5.0
RULE: Final = OutlierRule()
_log = logs.get(__name__)


class StragglerWatch:
    """Evaluates jobs whose newest step is a window of the rule beyond the last evaluation."""

    def __init__(
        self,
        views: SpanViews,
        state: Callable[[], Cluster],
        now_s: Callable[[], float],
        post: Callable[[Event], None],
    ) -> None:
        self._views, self._state, self._now_s, self._post = views, state, now_s, post
        self._seen: dict[str, tuple[int, int]] = {}  # by job: attempt and step
        self._ratios: dict[str, dict[str, float]] = {}  # by job: slow nodes

    def ratios(self) -> dict[str, float]:
        """By node that is slow now: how many times as long it takes as the others."""
        return {node: ratio for slow in self._ratios.values() for node, ratio in slow.items()}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (OSError, ValueError) as error:
                _log.warning("slow nodes cannot be looked for", reason=str(error))

    async def look(self) -> None:
        """Evaluate the jobs that are due."""
        jobs = [job for job in self._state().jobs.values() if job.phase is JobPhase.RUNNING]
        self._seen = {name: seen for name, seen in self._seen.items() if name in self._state().jobs}
        running = {job.name for job in jobs}
        self._ratios = {name: slow for name, slow in self._ratios.items() if name in running}
        for job in jobs:
            step = await self._views.newest_step(job)
            attempt, last = self._seen.get(job.name, (0, 0))
            if attempt == job.attempt and step < last + RULE.window_steps:
                continue
            self._seen[job.name] = job.attempt, step
            slow = await self._views.slow_nodes(job, RULE)
            self._ratios[job.name] = {found.node: found.ratio for found in slow}
            for found in slow:
                self._post(
                    StragglerFound(
                        self._now_s(), job.name, job.attempt, found.node, found.rank, found.op,
                        found.ratio, found.sentence,
                    )
                )  # fmt: skip
