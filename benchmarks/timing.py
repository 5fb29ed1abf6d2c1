"""Step times: measured without draining the device, and summarised."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch


class StepClock:
    """Times the steps between :meth:`lap` calls on the device, without waiting for it.

    On CUDA an event on the current stream marks the end of a step, so that the host may already
    launch the next one, as in training. On a CPU the work is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._marks: list[float] = []
        self.lap()

    def lap(self) -> None:
        """Mark the end of a step that has been launched."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times_s(self) -> list[float]:
        """Seconds of each step; waits for the last."""
        if not self._cuda:
            return [
                after - before for before, after in zip(self._marks, self._marks[1:], strict=False)
            ]
        self._events[-1].synchronize()
        return [
            before.elapsed_time(after) / 1e3
            for before, after in zip(self._events, self._events[1:], strict=False)
        ]


def summary(times_s: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile, extremes and spread (max - min over the median) of step times."""
    ordered = sorted(times_s)
    median = statistics.median(ordered)
    return {
        "p50": median,
        "p90": ordered[-(-9 * len(ordered) // 10) - 1],
        "min": ordered[0],
        "max": ordered[-1],
        "spread": (ordered[-1] - ordered[0]) / median,
        "steps": len(ordered),
    }


def gain(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """By what share each of ``after`` exceeds its partner in ``before``: median and range.

    A range that contains 0 means that the difference is not larger than the noise.
    """
    ratios = [new / old - 1.0 for old, new in zip(before, after, strict=True)]
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "pairs": len(ratios),
    }


def exposed(times_s: Sequence[float], without_s: Sequence[float]) -> dict[str, float]:
    """(step time - step time without communication) / step time: median and range over rounds."""
    shares = [1.0 - without / whole for whole, without in zip(times_s, without_s, strict=True)]
    return {
        "share": statistics.median(shares),
        "min": min(shares),
        "max": max(shares),
        "rounds": len(shares),
    }
