"""The time of each span that is its own: without what its rank began and measured inside it.

Under overlapped data parallelism a forward waits inside for the parameters of each layer. Counted
as computation, a wait for one slow rank would make all the others slow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import GARBAGE, STEP
from megascale_common.node.spans.record import DEVICE_TIMED
from megascale_driver.analysis.spans.table import SpanTable

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def own_ns(table: SpanTable) -> Floats:
    """Durations, of computation without all that is inside, else without garbage collections.

    What the host measured does not stop a device: both spans are of one clock.
    """
    own = table.duration_ns.astype(np.float64)
    computing = table.mask(lambda op: op.kind == "compute")
    step = table.mask(lambda op: op.name == STEP.name)
    garbage = table.mask(lambda op: op.name == GARBAGE.name)
    _subtract(own, table, computing, ~computing & ~step)
    _subtract(own, table, ~computing & ~step & ~garbage, garbage)
    found: Floats = np.maximum(own, 0)
    return found


def without_waits(table: SpanTable) -> SpanTable:
    """The spans, those of computation without the collectives and transfers inside."""
    own = table.duration_ns.astype(np.float64)
    computing = table.mask(lambda op: op.kind == "compute")
    waiting = table.mask(lambda op: op.kind in ("collective", "p2p"))
    if not (computing.any() and waiting.any()):
        return table
    _subtract(own, table, computing, waiting)
    return replace(table, duration_ns=np.maximum(own, 0).astype(np.int64))


def _subtract(own: Floats, table: SpanTable, around: Bools, inside: Bools) -> None:
    """Take the time of spans ``inside`` from the last one ``around`` that began before them."""
    outer, inner = np.flatnonzero(around), np.flatnonzero(inside)
    if not len(outer) or not len(inner):
        return
    on_device = (table.aux >> np.uint32(16)) & np.uint32(DEVICE_TIMED) != 0
    # One line of time for all ranks, one behind the other.
    begin = table.start_ns - table.start_ns.min()
    length = int((begin + table.duration_ns).max()) + 1
    begin = begin + table.rank.astype(np.int64) * length
    end = begin + table.duration_ns
    outer = outer[np.argsort(begin[outer], kind="stable")]
    place = np.searchsorted(begin[outer], begin[inner], side="right") - 1
    inner, outer = inner[place >= 0], outer[place[place >= 0]]
    shared = np.maximum(np.minimum(end[outer], end[inner]) - begin[inner], 0)
    same_clock = on_device[outer] == on_device[inner]
    np.subtract.at(own, outer, np.where(same_clock, shared, 0).astype(np.float64))
