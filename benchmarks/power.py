"""Times of an operation at the clock that the device sustains, with its power and temperature.

A short burst runs at the highest clock; training runs at the clock that the power limit allows. So
an operation is repeated until the device has settled, and only the second half of the repeats is
timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.sensors import Sensors

_ROUNDS = 5  # timed parts of a measurement, for the spread


@dataclass(frozen=True)
class Sustained:
    """Milliseconds of one run (median, least and most of the rounds), and the device meanwhile.

    ``clock_mhz`` and ``power_w`` are means over the timed rounds, ``temperature_c`` is the highest;
    None where the device has no such sensors.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


def sustained(operation: Callable[[], Any], device: torch.device, duration_s: float) -> Sustained:
    """Repeat ``operation`` for about ``duration_s``, of which half is timed; one run on a CPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        operation()
        took_ms = 1e3 * (time.perf_counter() - begin)
        return Sustained(took_ms, took_ms, took_ms)
    operation()
    once_s = _run(operation, 3) / 3
    each = max(1, round(duration_s / 2 / _ROUNDS / once_s))
    _run(operation, each * _ROUNDS)  # the device settles
    with Sensors(device) as sensors:
        times_ms = [1e3 * _run(operation, each) / each for _ in range(_ROUNDS)]
        seen = sensors.over(sum(times_ms) * each / 1e3)
    timed = (statistics.median(times_ms), min(times_ms), max(times_ms))
    if seen is None:
        return Sustained(*timed)
    return Sustained(*timed, seen.clock_mhz, seen.power_w, seen.temperature_c)


def _run(operation: Callable[[], Any], number: int) -> float:
    """Seconds of ``number`` runs on the device; the host launches ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        operation()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
