"""The spans of some ranks of a job with a pipeline, as the trace that the driver sends of them.

Each stage runs 1F1B (forward and backward in turn after a warm-up): its times follow from those of
its neighbours, so that bubbles and waits lie where they do in a real run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megascale_common.node.spans.ops import Op
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.clocks import Clock
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_driver.analysis.spans.timeline import merged
from megascale_job.layout import RankLayout

OPS = (
    Op("forward", "compute", ""),
    Op("backward", "compute", ""),
    Op("receive_activation", "p2p", ""),
    Op("send_activation", "p2p", ""),
    Op("receive_gradient", "p2p", ""),
    Op("send_gradient", "p2p", ""),
    Op("gradient_reduce_scatter", "collective", "dp"),
    Op("optimizer", "compute", ""),
    Op("data_wait", "host", ""),
)
FORWARD_S, BACKWARD_S, TRANSFER_S = 0.092, 0.178, 0.002
_NUMBERS = {op.name: number for number, op in enumerate(OPS)}


class _Span(NamedTuple):
    name: str
    begin_s: float
    end_s: float
    batch: int = NO_MICRO_BATCH


def trace(
    layout: RankLayout,
    ranks: Sequence[int],
    first_step: int,
    steps: int,
    *,
    begin_s: float,
    batches: int = 16,
    slow: Mapping[int, float] | None = None,
    node_of: Callable[[int], str] = lambda rank: f"n{rank // 8}",
) -> bytes:
    """A .json.gz of these ranks; ``slow``: how many times as long a rank computes."""
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    at_s = begin_s
    for step in range(first_step, first_step + steps):
        by_rank = {rank: list(_step(layout, rank, batches, slow or {}, at_s)) for rank in ranks}
        for rank, spans in by_rank.items():
            for number, each in enumerate(spans):
                row = (
                    *(rank, step, _NUMBERS[each.name], each.batch, number),
                    *(round(each.begin_s * 1e9), round((each.end_s - each.begin_s) * 1e9), 0),
                )
                for name, value in zip(COLUMNS, row, strict=True):
                    columns[name].append(value)
        at_s = max(each.end_s for spans in by_rank.values() for each in spans)
    arrays: dict[str, Any] = {name: np.array(columns[name], kind) for name, kind in COLUMNS.items()}
    nodes = tuple(node_of(rank) for rank in range(layout.world_size))
    table = SpanTable(**arrays, ops=OPS, layout=layout, nodes=nodes)
    clocks = {node: Clock(0, 40_000, "heartbeats") for node in set(nodes)}
    return gzip.compress(json.dumps(merged(table, clocks)).encode(), 5, mtime=0)


def _step(
    layout: RankLayout, rank: int, batches: int, slow: Mapping[int, float], at_s: float
) -> Iterator[_Span]:
    """One step of a rank: the pipeline of its column, then gradients and optimizer."""
    place = layout.coordinates(rank)
    line = layout.members(rank, "pp")
    done = _pipeline([slow.get(each, 1.0) for each in line], batches)
    yield _Span("data_wait", at_s, at_s + 0.0021)
    before_s = at_s + 0.0021
    for kind, batch, began_s, ended_s in done[place.pp]:
        begin_s, end_s = at_s + 0.0021 + began_s, at_s + 0.0021 + ended_s
        way, edge = ("activation", 0) if kind == "forward" else ("gradient", layout.pp - 1)
        if place.pp != edge and begin_s - before_s > 1e-6:
            yield _Span(f"receive_{way}", before_s, begin_s, batch)
        yield _Span(kind, begin_s, end_s, batch)
        if place.pp != layout.pp - 1 - edge:
            yield _Span(f"send_{way}", end_s, end_s + TRANSFER_S, batch)
        before_s = end_s
    end_s = at_s + 0.0021 + max(each[3] for stage in done for each in stage) + 0.07
    jitter_s = 0.004 * ((rank * 2654435761) % 97) / 97
    yield _Span("gradient_reduce_scatter", before_s + jitter_s, end_s)
    yield _Span("optimizer", end_s, end_s + 0.061)


def _pipeline(factors: Sequence[float], batches: int) -> list[list[tuple[str, int, float, float]]]:
    """Of each stage (kind, micro-batch, begin, end) in order, in seconds."""
    stages = len(factors)
    orders = []
    for stage in range(stages):
        warm = min(batches, stages - 1 - stage)
        order = [("forward", batch) for batch in range(warm)]
        for batch in range(batches - warm):
            order += [("forward", warm + batch), ("backward", batch)]
        orders.append(order + [("backward", batch) for batch in range(batches - warm, batches)])
    ends: dict[tuple[str, int, int], float] = {}
    found: list[list[tuple[str, int, float, float]]] = [[] for _ in factors]
    free_s = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, batch = order[0]
            other = stage - 1 if kind == "forward" else stage + 1
            if 0 <= other < stages and (kind, other, batch) not in ends:
                continue
            ready_s = ends.get((kind, other, batch), -TRANSFER_S) + TRANSFER_S
            begin_s = max(free_s[stage], ready_s)
            time_s = (FORWARD_S if kind == "forward" else BACKWARD_S) * factors[stage]
            ends[kind, stage, batch] = free_s[stage] = begin_s + time_s
            found[stage].append((kind, batch, begin_s, free_s[stage]))
            order.pop(0)
    return found
