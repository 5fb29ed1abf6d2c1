"""What each step's time went into, step by step: the numbers that the tree of causes compares.

Pauses of the host (data wait, garbage collections, snapshots) count as the rank with the longest
one in a step has them, since the others wait for it in the next collective. Computation is net of
waits and garbage collections inside it. Of a collective counts the time of the last rank to enter:
the others' time in it is their wait for that rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import EVALUATION, GARBAGE, STEP, Op
from megascale_driver.analysis.spans.instances import collectives
from megascale_driver.analysis.spans.own_time import own_ns
from megascale_driver.analysis.spans.table import SpanTable

Floats = npt.NDArray[np.float64]
_NO_PAUSES = (STEP.name, EVALUATION.name)


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """Milliseconds of each whole step of a window; arrays [steps] or, of ranks, [ranks, steps].

    ``compute`` is NaN where a rank has no computation in a step. ``pauses`` and ``paused_rank``
    have an entry for each operation of the host, ``network`` and ``lateness`` one for each
    collective "name group".
    """

    steps: npt.NDArray[np.int64]
    step_ms: Floats
    compute_ms: Floats
    pauses_ms: dict[str, Floats]
    pause_counts: dict[str, Floats]
    paused_rank: dict[str, int]
    network_ms: dict[str, Floats]
    lateness_ms: dict[str, Floats]
    unmeasured_ms: Floats


def step_series(table: SpanTable) -> StepSeries:
    """The series of a table; steps that fewer than half of the ranks have ended are left out."""
    whole = table.of_op(STEP.name)
    numbers, ended = np.unique(whole.step, return_counts=True)
    ranks = max(len(np.unique(whole.rank)), 1)
    steps = numbers[2 * ended >= ranks].astype(np.int64)
    table = table.where(np.isin(table.step, steps))
    shape = (len(table.nodes), len(steps))
    own_ms = own_ns(table) / 1e6
    whole_ms = _sums(table, _of_op(table, STEP), table.duration_ns / 1e6, steps, shape)
    # An evaluation is no part of a step, nor of its MFU.
    whole_ms -= _sums(table, _of_op(table, EVALUATION), table.duration_ns / 1e6, steps, shape)
    computing = _of_kind(table, "compute")
    compute_ms = _sums(table, computing, own_ms, steps, shape)
    present = _sums(table, computing, np.ones(len(table)), steps, shape)
    pauses, counts, worst = _pauses(table, own_ms, steps, shape)
    network, lateness = _waits(table, steps)
    pausing = _of_kind(table, "host", but=(*_NO_PAUSES, GARBAGE.name))
    measured = _sums(table, pausing, own_ms, steps, shape)
    for kind in ("compute", "collective", "p2p"):
        measured = measured + _sums(table, _of_kind(table, kind), own_ms, steps, shape)
    return StepSeries(
        steps=steps,
        step_ms=_median_of_ranks(whole_ms),
        compute_ms=np.where(present > 0, compute_ms, np.nan),
        pauses_ms=pauses,
        pause_counts=counts,
        paused_rank=worst,
        network_ms=network,
        lateness_ms=lateness,
        unmeasured_ms=_median_of_ranks(np.where(whole_ms > 0, whole_ms - measured, np.nan)),
    )


def _of_op(table: SpanTable, wanted: Op) -> npt.NDArray[np.bool_]:
    return table.mask(lambda op: op.name == wanted.name)


def _of_kind(table: SpanTable, kind: str, but: tuple[str, ...] = ()) -> npt.NDArray[np.bool_]:
    return table.mask(lambda op: op.kind == kind and op.name not in but)


def _sums(
    table: SpanTable,
    chosen: npt.NDArray[np.bool_],
    values: Floats,
    steps: npt.NDArray[np.int64],
    shape: tuple[int, int],
) -> Floats:
    """Sum of ``values`` of the chosen spans by rank and step."""
    column = np.searchsorted(steps, table.step[chosen])
    flat = table.rank[chosen].astype(np.int64) * shape[1] + column
    sums: Floats = np.bincount(flat, values[chosen], shape[0] * shape[1]).astype(np.float64)
    return sums.reshape(shape)


def _median_of_ranks(by_rank: Floats) -> Floats:
    """Median over the ranks that have a value above 0."""
    if not by_rank.size:
        return np.zeros(by_rank.shape[1])
    return np.nan_to_num(known_median(np.where(by_rank == 0, np.nan, by_rank)))


def known_median(values: Floats) -> Floats:
    """Median over the rows of what is finite in each column; NaN where nothing is."""
    median: Any = np.ma.median  # numpy types it only from 2.4 on
    return np.asarray(median(np.ma.masked_invalid(values), axis=0).filled(np.nan), np.float64)


def _pauses(
    table: SpanTable, own_ms: Floats, steps: npt.NDArray[np.int64], shape: tuple[int, int]
) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, int]]:
    pauses: dict[str, Floats] = {}
    counts: dict[str, Floats] = {}
    worst: dict[str, int] = {}
    for number, op in enumerate(table.ops):
        if op.kind != "host" or op.name in _NO_PAUSES or not len(steps):
            continue
        chosen = table.op == number
        spent = _sums(table, chosen, own_ms, steps, shape)
        times = _sums(table, chosen, np.ones(len(table)), steps, shape)
        pauses[op.name], counts[op.name] = spent.max(axis=0), times.sum(axis=0)
        worst[op.name] = int(spent.sum(axis=1).argmax())
    return pauses, counts, worst


def _waits(
    table: SpanTable, steps: npt.NDArray[np.int64]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Of each collective: time of the last to enter, and how much longer the first waited.

    Groups of one name work beside each other: in a step the slowest of them counts.
    """
    found = collectives(table)
    network: dict[str, Floats] = {}
    lateness: dict[str, Floats] = {}
    column = np.searchsorted(steps, found.step)
    for number in np.unique(found.op):
        op, own = table.ops[number], found.op == number
        shape = (int(found.group[own].max()) + 1, len(steps))
        flat = found.group[own] * shape[1] + column[own]
        shortest, longest = found.shortest_ns[own] / 1e6, found.longest_ns[own] / 1e6
        name = f"{op.name} {op.group}"
        for into, values in ((network, shortest), (lateness, longest - shortest)):
            sums = np.bincount(flat, values, shape[0] * shape[1]).reshape(shape)
            into[name] = sums.max(axis=0).astype(np.float64)
    return network, lateness
