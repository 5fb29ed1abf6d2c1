"""What counters of hosts and devices say about two windows of time: throttling, network trouble.

Their names are those that agents report (megascale_executor.counters, docs/diagnostics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale_common.node.spans.ops import STEP
from megascale_driver.analysis.spans.table import SpanTable

LEAST_THROTTLED = 0.1  # more of the time than before
LEAST_CLOCK_FALL = 0.03
_CLOCK, _THROTTLED = "gpu_sm_clock_hertz", "gpu_throttled"
_TROUBLE = (
    "error",
    "drop",
    "pause",
    "congestion",
    "retransmitted",
    "out_of_sequence",
    "timeout",
    "flap",
    "link_downed",
    "send_waits",
    "not_ready",
)


@dataclass(frozen=True, slots=True)
class CounterChange:
    """Mean of a counter in the window before and in the one after.

    Of a counter whose name ends in _total it is the mean rise per second.
    """

    node: str
    name: str
    target: str
    before: float
    after: float

    @classmethod
    def of(cls, entry: Any) -> CounterChange:
        """From {"node", "name", "target", "before", "after"}.

        Raises:
            ValueError: not of this form, or a value that is not finite.
        """
        try:
            before, after = float(entry["before"]), float(entry["after"])
            texts = [str(entry[key]) for key in ("node", "name", "target")]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"counters: {type(error).__name__}: {error}") from error
        if not (math.isfinite(before) and math.isfinite(after)):
            raise ValueError(f"counters: {texts[1]} of {texts[0]} is not finite")
        return cls(texts[0], texts[1], texts[2], before, after)


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The two windows of steps on one node, Unix ns on its clock: before and after ``split_ns``."""

    first_ns: int
    split_ns: int
    last_ns: int


def windows_of(table: SpanTable, split: int) -> Mapping[str, StepWindows]:
    """Of each node when its first step, step ``split`` and its last step began or ended."""
    steps = table.of_op(STEP.name)
    ends = steps.start_ns + steps.duration_ns
    names = np.array(table.nodes)
    found: dict[str, StepWindows] = {}
    for node in dict.fromkeys(table.nodes):
        own = names[steps.rank] == node
        later = own & (steps.step >= split)
        if later.any():
            found[node] = StepWindows(
                int(steps.start_ns[own].min()),
                int(steps.start_ns[later].min()),
                int(ends[own].max()),
            )
    return found


def knows_clocks(counters: Sequence[CounterChange]) -> bool:
    """Whether they say anything about devices' clocks."""
    return any(change.name in (_CLOCK, _THROTTLED) for change in counters)


def throttled(counters: Sequence[CounterChange]) -> list[tuple[str, str]]:
    """Nodes whose devices were slowed more than before, each with the fact; the worst first."""
    found: list[tuple[float, str, str]] = []
    for change in counters:
        if change.name == _THROTTLED and change.after - change.before >= LEAST_THROTTLED:
            device, _, reason = change.target.rpartition(":")
            fact = (
                f"{device} is held back ({reason}) {100 * change.after:.0f} % of the time, "
                f"before {100 * change.before:.0f} %"
            )
            found.append((change.after - change.before, change.node, fact))
        elif change.name == _CLOCK and change.before > 0:
            fall = 1 - change.after / change.before
            if fall >= LEAST_CLOCK_FALL:
                fact = (
                    f"the clock of {change.target} is {change.after / 1e6:.0f} MHz instead of "
                    f"{change.before / 1e6:.0f}"
                )
                found.append((fall, change.node, fact))
    return [(node, fact) for _, node, fact in sorted(found, reverse=True)]


def network_trouble(counters: Sequence[CounterChange]) -> str:
    """The counter of network trouble that rose most, in words; "" if none did."""
    rises = [
        (change.after - change.before, change)
        for change in counters
        if change.name.startswith(("network_", "rdma_", "tcp_", "pfc_", "link_"))
        and any(word in change.name for word in _TROUBLE)
        and change.after > max(2 * change.before, 0)
    ]
    if not rises:
        return ""
    worst = max(rises, key=lambda rise: rise[0])[1]
    where = f"{worst.node} {worst.target}".rstrip()
    return f"{worst.name} of {where} rises by {worst.after:.3g} a second, before {worst.before:.3g}"
