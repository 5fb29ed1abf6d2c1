"""Queries of stored spans: heat map, slow nodes, measured steps, falling MFU, timeline of a job.

Each query runs in the store's thread (Note [One store thread] in
:mod:`megascale_driver.telemetry.intake`) and reads a bounded number of steps. The queries of
clients first store the batches that still wait, so that they see what nodes have sent so far.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from megascale.v1 import driver_pb2
from megascale_driver.analysis.hot_experts import REMEDY, HotRank
from megascale_driver.analysis.spans.classes import OutlierRule
from megascale_driver.analysis.spans.clocks import Exchange, clocks
from megascale_driver.analysis.spans.decline import CounterChange, compared, windows_of
from megascale_driver.analysis.spans.outliers import COMPARED, SlowNode, heat_map, slow_nodes
from megascale_driver.analysis.spans.routing import READ, expert_shares, hot_ranks
from megascale_driver.analysis.spans.table import SpanTable
from megascale_driver.analysis.spans.terms import MeasuredSteps, measured_steps
from megascale_driver.analysis.spans.timeline import merged
from megascale_driver.core.values.job import Job
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore
from megascale_job.visible import counted

MAX_TRACED: Final = 500_000  # spans per trace; viewers become slow beyond that
MAX_COMPARED: Final = 4_000_000  # spans that one comparison reads
_SPANS_PER_STEP: Final = 12  # per rank, at level "phases"
_MISSED_STEPS: Final = 10  # extra steps to read: steps with dropped spans are left out


class SpanViews:
    """Queries of one store, run in the thread of its intake."""

    def __init__(
        self,
        intake: SpanIntake,
        store: SpanStore,
        exchanges: Callable[[], Mapping[str, Sequence[Exchange]]] = dict,
    ) -> None:
        """``exchanges``: clock samples from heartbeats, by node."""
        self._intake = intake
        self._store = store
        self._exchanges = exchanges

    async def heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        """Heat map over the newest ``steps`` steps of the job's newest attempt."""
        await self._intake.store_waiting()
        return await self._intake.ask(self._heat_map, job, names, steps)

    async def newest_step(self, job: Job) -> int:
        """The newest step with spans; -1: none."""
        return await self._intake.ask(self._store.newest_step, job.name, job.attempt)

    async def compared(self, job: Job, rule: OutlierRule) -> tuple[list[SlowNode], list[HotRank]]:
        """The nodes that are slow over the newest windows of ``rule``."""
        return await self._intake.ask(self._compared, job, rule)

    @staticmethod
    def most_measured_steps(job: Job) -> int:
        """Most steps that :meth:`measured_steps` reads at once; 27 with 12,288 ranks."""
        return MAX_COMPARED // max(job.config.layout.world_size * _SPANS_PER_STEP, 1)

    async def measured_steps(self, job: Job, steps: int) -> MeasuredSteps:
        """The terms of the newest ``steps`` steps of the job's newest attempt, in seconds."""
        return await self._intake.ask(self._measured_steps, job, steps)

    async def decline(self, job: Job, steps: int, split: int) -> driver_pb2.GetMfuDeclineResponse:
        """Why steps take longer from step ``split`` on, over the newest ``steps`` steps.

        ``split`` 0: the step from which they take longer is found first.
        """
        await self._intake.store_waiting()
        return await self._intake.ask(self._decline, job, steps, split)

    async def timeline(
        self, job: Job, first: int, steps: int, ranks: tuple[int, ...] = ()
    ) -> bytes:
        """A compressed trace of ``steps`` steps from ``first`` on (0: the newest steps).

        ``ranks``: only these; empty: all.

        Raises:
            LookupError: there are no spans of these steps.
            ValueError: there are more than MAX_TRACED spans.
        """
        await self._intake.store_waiting()
        return await self._intake.ask(self._timeline, job, first, steps, ranks, self._exchanges())

    def _table(self, job: Job, steps: int, names: tuple[str, ...] = ()) -> SpanTable:
        """Spans of the newest ``steps`` steps."""
        newest = self._store.newest_step(job.name, job.attempt)
        # The newest step may still lack spans of some ranks.
        return self._read(job, max(0, newest - steps), newest - 1, names)

    def _read(
        self,
        job: Job,
        first: int,
        last: int,
        names: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> SpanTable:
        columns, ops = self._store.read(job.name, job.attempt, first, last, names, ranks)
        nodes = [""] * job.config.layout.world_size
        for slot in job.slots:
            for rank in slot.ranks:
                nodes[rank] = slot.node
        return SpanTable(**columns, ops=ops, layout=job.config.layout, nodes=tuple(nodes))

    def _compared(self, job: Job, rule: OutlierRule) -> tuple[list[SlowNode], list[HotRank]]:
        steps = rule.windows * rule.window_steps
        table = self._table(job, steps, (*COMPARED, *READ))
        return slow_nodes(table, rule), hot_ranks(table, rule)

    def _measured_steps(self, job: Job, steps: int) -> MeasuredSteps:
        count = min(steps + _MISSED_STEPS, max(self.most_measured_steps(job), 1))
        # Stop before the newest step that all ranks have sent: more of its spans may follow.
        last = self._store.complete_step(job.name, job.attempt) - 1
        table = self._read(job, max(0, last - count + 1), last)
        return measured_steps(table, job.config.micro_batches)

    def _decline(self, job: Job, steps: int, split: int) -> driver_pb2.GetMfuDeclineResponse:
        spans_per_step = max(job.config.layout.world_size * _SPANS_PER_STEP, 1)
        table = self._table(job, min(steps, max(MAX_COMPARED // spans_per_step, 1)))
        answer = driver_pb2.GetMfuDeclineResponse(attempt=job.attempt, cause="unknown", rank=-1)
        if not len(table):
            answer.sentence = "no spans yet: they come with the first steps"
            return answer

        def counters(at_step: int) -> Sequence[CounterChange]:
            windows = windows_of(table, at_step)
            return self._store.counters.changes(job.name, job.attempt, windows)

        first, last = int(table.step.min()), int(table.step.max())
        answer.first_step = first
        answer.split_step = split
        answer.last_step = last
        try:
            found = compared(table, split, counters)
        except ValueError as error:
            answer.sentence = str(error)
            return answer
        answer.split_step, verdict = found
        answer.cause = verdict.cause
        answer.sentence = verdict.sentence
        answer.step_before_ms = verdict.step_before_ms
        answer.step_after_ms = verdict.step_after_ms
        answer.node = verdict.node
        answer.rank = verdict.rank
        answer.shares.update(verdict.shares)
        return answer

    def _timeline(
        self,
        job: Job,
        first: int,
        steps: int,
        ranks: tuple[int, ...],
        exchanges: Mapping[str, Sequence[Exchange]],
    ) -> bytes:
        # Stop before the newest step that all ranks have sent: more of its spans may follow.
        last = self._store.complete_step(job.name, job.attempt) - 1
        first = first or max(0, last - steps + 1)
        table = self._read(job, first, min(first + steps - 1, last), ranks=ranks)
        if not len(table):
            raise LookupError("there are no spans of these steps")
        if len(table) > MAX_TRACED:
            raise ValueError(f"they have {counted(len(table), 'span')}, a trace holds {MAX_TRACED}")
        trace = merged(table, clocks(table, exchanges))
        return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 5, mtime=0)

    def _heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        wanted = tuple({*names, *COMPARED, *READ}) if names else ()
        table = self._table(job, steps, wanted)
        answer = driver_pb2.GetHeatMapResponse(attempt=job.attempt, rank_nodes=table.nodes)
        if not len(table):
            return answer
        answer.first_step = int(table.step.min())
        answer.last_step = int(table.step.max())
        for row in heat_map(table, names):
            message = answer.rows.add(operation=row.name, kind=row.kind)
            message.median_ms.extend((row.median_ns / 1e6).astype(np.float32).tolist())
            message.ratio.extend(row.ratio.astype(np.float32).tolist())
        for found in slow_nodes(table):
            answer.slow_nodes.add(
                node=found.node,
                rank=found.rank,
                operation=found.op,
                ratio=found.ratio,
                since_step=found.since_step,
                sentence=found.sentence,
            )
        shares = expert_shares(table)
        if len(shares):
            answer.routing.expert_share.extend(shares.astype(np.float32).tolist())
            for hot in hot_ranks(table):
                answer.routing.hot_ranks.append(_hot_rank(hot))
        return answer


def _hot_rank(found: HotRank) -> driver_pb2.HotRank:
    message = driver_pb2.HotRank(
        rank=found.rank,
        node=found.node,
        expert_share=found.share,
        operation=found.op,
        ratio=found.ratio,
        since_step=found.since_step,
        sentence=f"{found.sentence}; {REMEDY}",
    )
    for one in found.experts:
        message.hottest.add(layer=one.layer, expert=one.expert, load=one.load)
    return message
