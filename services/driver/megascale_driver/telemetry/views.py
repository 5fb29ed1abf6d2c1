"""What the driver answers from stored spans: the heat map of a job, and its slow nodes.

Reading and arithmetic run in the store's thread, over a bounded number of steps.
"""

from __future__ import annotations

import numpy as np

from megascale.v1 import driver_pb2
from megascale_driver.analysis.spans.heat import heat_map
from megascale_driver.analysis.spans.outliers import COMPARED, OutlierRule, SlowNode, slow_nodes
from megascale_driver.analysis.spans.table import SpanTable
from megascale_driver.core.state import Job
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore


class SpanViews:
    """Reads one store, in the thread of its intake."""

    def __init__(self, intake: SpanIntake, store: SpanStore) -> None:
        self._intake, self._store = intake, store

    async def heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        """The newest ``steps`` steps of the job's newest attempt."""
        await self._intake.store_waiting()
        return await self._intake.ask(self._heat_map, job, names, steps)

    async def newest_step(self, job: Job) -> int:
        """The newest step with spans; -1: none."""
        return await self._intake.ask(self._store.newest_step, job.name, job.attempt)

    async def slow_nodes(self, job: Job, rule: OutlierRule) -> list[SlowNode]:
        """The nodes that are slow by the steps that ``rule`` takes."""
        return await self._intake.ask(self._slow_nodes, job, rule)

    def _table(self, job: Job, steps: int, names: tuple[str, ...]) -> SpanTable:
        newest = self._store.newest_step(job.name, job.attempt)
        # The newest step may still lack some ranks.
        first, last = max(0, newest - steps), newest - 1
        columns, ops = self._store.read(job.name, job.attempt, first, last, names)
        nodes = [""] * job.config.layout.world_size
        for slot in job.slots:
            for rank in slot.ranks:
                nodes[rank] = slot.node
        table = SpanTable(**columns, ops=ops, layout=job.config.layout, nodes=tuple(nodes))
        return table

    def _slow_nodes(self, job: Job, rule: OutlierRule) -> list[SlowNode]:
        steps = rule.windows * rule.window_steps
        return slow_nodes(self._table(job, steps, COMPARED), rule)

    def _heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        wanted = tuple({*names, *COMPARED}) if names else ()
        table = self._table(job, steps, wanted)
        answer = driver_pb2.GetHeatMapResponse(attempt=job.attempt, rank_nodes=table.nodes)
        if not len(table):
            return answer
        answer.first_step, answer.last_step = int(table.step.min()), int(table.step.max())
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
        return answer
