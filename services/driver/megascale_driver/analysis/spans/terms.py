"""What steps consist of, measured: seconds of each term of a plan, step by step.

A step is the mean over the ranks: computation (without the collectives inside it), collectives,
transfers between stages, optimizer and pauses of the host. Of a collective the time of the last
rank to enter is the network's; the others' time above it is their wait for that rank. What lies in
no span is the host's, or with a pipeline the wait for other stages. So the terms add up to a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import (
    BACKWARD,
    BACKWARD_WEIGHT,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    STEP,
)
from megascale_driver.analysis.spans.table import SpanTable, collectives, own_ns

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_COMPUTATIONS = (FORWARD.name, BACKWARD.name, BACKWARD_WEIGHT.name)
TERMS = (
    "compute",
    "tensor_parallel",
    "pipeline",
    "data_parallel",
    "optimizer",
    "host",
    "straggler",
)


MAX_COLLECTIVES = 32  # of a job; a step has some ten operations and groups


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Whole steps in order: their numbers, seconds, and seconds of each of TERMS; arrays [n].

    ``collectives``: of each (operation, group) the seconds a step and rank that the network takes,
    and those that ranks wait for the last to enter; at most MAX_COLLECTIVES, the longest.
    """

    steps: npt.NDArray[np.int64]
    step_s: Floats
    terms: Mapping[str, Floats]
    collectives: Mapping[tuple[str, str], tuple[Floats, Floats]] = field(default_factory=dict)


def measured_steps(table: SpanTable, micro_batches: int) -> MeasuredSteps:
    """The steps that all ranks with spans have ended.

    ``micro_batches``: those of a replica in a step. At level "phases" spans have the first ones
    alone, and stand for the others.
    """
    whole = table.of_op(STEP.name)
    numbers, ended = np.unique(whole.step, return_counts=True)
    ranks = max(len(np.unique(table.rank)), 1)
    steps = numbers[ended >= ranks].astype(np.int64)
    table = table.where(np.isin(table.step, steps))
    column = np.searchsorted(steps, table.step)

    def mean_s(chosen: Bools, values_ns: Floats) -> Floats:
        sums = np.bincount(column[chosen], values_ns[chosen], len(steps))
        seconds: Floats = sums[: len(steps)] / ranks / 1e9
        return seconds

    duration = table.duration_ns.astype(np.float64)
    own = own_ns(table)
    factor = _unmeasured(table, column, micro_batches)
    computing = table.is_op(*_COMPUTATIONS)
    # An evaluation lies between two steps.
    no_part = table.is_op(EVALUATION.name)
    step_s = mean_s(table.is_op(STEP.name), duration) - mean_s(no_part, duration)
    shortest = _shortest_ns(table)
    late = duration - shortest
    collective, tp = table.is_kind("collective"), table.mask(lambda op: op.group == "tp")
    host = table.is_kind("host") & ~table.is_op(STEP.name, EVALUATION.name)
    terms = {
        "compute": mean_s(computing, own * factor),
        "tensor_parallel": mean_s(collective & tp, shortest),
        "pipeline": mean_s(table.is_kind("p2p"), duration),
        "data_parallel": mean_s(collective & ~tp, shortest),
        "optimizer": mean_s(table.is_op(OPTIMIZER.name), own),
        "host": mean_s(host, duration),
        "straggler": mean_s(collective, late),
    }
    rest: Floats = step_s - np.sum(list(terms.values()), axis=0)
    into = "pipeline" if table.layout.pp > 1 else "host"
    terms[into] = terms[into] + np.maximum(rest, 0)
    terms["compute"] = terms["compute"] + np.minimum(rest, 0)  # transfers that ran beside it
    single = {
        (op.name, op.group): (mean_s(table.op == at, shortest), mean_s(table.op == at, late))
        for at, op in enumerate(table.ops)
        if op.kind == "collective"
    }
    longest = sorted(single.items(), key=lambda one: -float(np.sum(one[1])))[:MAX_COLLECTIVES]
    return MeasuredSteps(steps, step_s, terms, dict(longest))


def _unmeasured(table: SpanTable, column: npt.NDArray[np.int64], wanted: int) -> Floats:
    """Of each forward and backward: how many its step has, over how many were measured; else 1.

    Args:
        column: the place of each span's step.
        wanted: micro-batches, each of which visits every chunk.
    """
    factor: Floats = np.ones(len(table))
    place = table.rank.astype(np.int64) * (int(column.max(initial=0)) + 1) + column
    place = place * (int(table.chunk.max(initial=0)) + 1) + table.chunk
    for name in _COMPUTATIONS:
        own = table.is_op(name)
        count = np.bincount(place[own])
        factor[own] = np.maximum(wanted / count[place[own]], 1.0)
    return factor


def _shortest_ns(table: SpanTable) -> Floats:
    """Of each collective's span the time of its last member; its own where none else is known."""
    found = collectives(table)
    shortest = table.duration_ns.astype(np.float64)
    shortest[found.place] = found.shortest_ns[found.number]
    return shortest
