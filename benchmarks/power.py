"""Times of an operation at the clock that the device sustains, with its power and temperature.

A short burst runs at the highest clock; training runs at the clock that the power limit allows. So
an operation is repeated until the device has settled, and only the second half of the repeats is
timed.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_INTERVAL_S = 0.02
_ROUNDS = 5  # timed parts of a measurement, for the spread


@dataclass(frozen=True)
class Sustained:
    """Milliseconds of one run (median, least and most of the rounds), and the device meanwhile.

    ``clock_mhz``, ``power_w`` and ``temperature_c`` are means of samples over the timed rounds;
    None where the device has no such sensors.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class _Sampler:
    """Reads the device's sensors on a thread of its own, from ``start`` to ``stop``."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._library = pynvml
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._samples: list[tuple[float, float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> tuple[float | None, float | None, float | None]:
        self._done.set()
        self._thread.join()
        if not self._samples:
            return None, None, None
        clock, power, temperature = (
            statistics.mean(column) for column in zip(*self._samples, strict=True)
        )
        return clock, power, temperature

    def _sample(self) -> None:
        nvml = self._library
        while not self._done.wait(_INTERVAL_S):
            self._samples.append(
                (
                    float(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
                    nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                    float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)),
                )
            )


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
    sampler = _sampler(device)
    times_ms = [1e3 * _run(operation, each) / each for _ in range(_ROUNDS)]
    sensors = sampler.stop() if sampler is not None else (None, None, None)
    return Sustained(statistics.median(times_ms), min(times_ms), max(times_ms), *sensors)


def _sampler(device: torch.device) -> _Sampler | None:
    try:
        sampler = _Sampler(device)
    except Exception:  # no package, no library, no such device in it: times are useful without
        return None
    sampler.start()
    return sampler


def _run(operation: Callable[[], Any], number: int) -> float:
    """Seconds of ``number`` runs on the device; the host launches ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        operation()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
