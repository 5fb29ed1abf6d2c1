"""Step times, and a device's clock, power, temperature and energy over them.

Steps are timed without draining the device. The host launches them ahead of the device, so it
cannot mark their beginning: a thread samples the sensors from before the first to after the last,
and :meth:`Sensors.over` takes the samples of the seconds that end now. Ranks exchange their samples
as numbers of which the largest counts (:func:`shared`, :func:`sensor_summary`).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

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


_INTERVAL_S = 0.02


# Bits of NVML's "clocks event reasons" by the names of its documentation, without the prefix.
THROTTLES: Mapping[str, int] = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


_VALUES = 4  # per rank: clock, power, temperature, energy


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: ``at_s`` by the monotonic clock, ``energy_j`` since the driver was loaded."""

    at_s: float
    clock_mhz: float
    power_w: float
    temperature_c: float
    energy_j: float
    throttles: int


@dataclass(frozen=True, slots=True)
class Window:
    """Means of clock and power, the highest temperature, the energy in joules, all reasons."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    energy_j: float
    throttles: int


class Sensors:
    """Samples a CUDA device on a thread of its own while the context is open.

    :meth:`over` returns None without a device, library or sensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples: list[Sample] = []
        self._done = threading.Event()
        self._read = _reader(device)
        self._thread = threading.Thread(target=self._sample, name="sensors", daemon=True)

    def __enter__(self) -> Sensors:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._read is not None:
            self._thread.join()

    def over(self, seconds: float) -> Window | None:
        """The samples of the ``seconds`` that end now."""
        return window(list(self._samples), time.monotonic() - seconds)

    def _sample(self) -> None:
        assert self._read is not None
        while not self._done.wait(_INTERVAL_S):
            self._samples.append(self._read())


def window(samples: Sequence[Sample], begin_s: float) -> Window | None:
    """The samples from ``begin_s`` on as one; None of fewer than two."""
    found = [sample for sample in samples if sample.at_s >= begin_s]
    if len(found) < 2:
        return None
    first, last = found[0], found[-1]
    reasons = 0
    for sample in found:
        reasons |= sample.throttles
    # The samples begin up to one interval after the window and end before it does.
    whole = (found[-1].at_s - begin_s) / (last.at_s - first.at_s)
    return Window(
        clock_mhz=statistics.mean(sample.clock_mhz for sample in found),
        power_w=statistics.mean(sample.power_w for sample in found),
        temperature_c=max(sample.temperature_c for sample in found),
        energy_j=(last.energy_j - first.energy_j) * whole,
        throttles=reasons,
    )


def shared(found: Window | None, rank: int, world_size: int) -> list[float]:
    """This rank's window as numbers >= 0: the largest of each over the ranks are everybody's."""
    numbers = [0.0] * (_VALUES * world_size + len(THROTTLES))
    if found is not None:
        own = (found.clock_mhz, found.power_w, found.temperature_c, found.energy_j)
        numbers[_VALUES * rank : _VALUES * (rank + 1)] = own
        bits = [float(bool(found.throttles & bit)) for bit in THROTTLES.values()]
        numbers[_VALUES * world_size :] = bits
    return numbers


def sensor_summary(
    numbers: Sequence[float], world_size: int, tokens: float
) -> dict[str, Any] | None:
    """Means over the devices, the highest temperature, joules a token; None without any sensor.

    Args:
        numbers: the largest over the ranks of what :func:`shared` returns.
        tokens: of all ranks in the timed steps.
    """
    ranks = [numbers[_VALUES * rank : _VALUES * (rank + 1)] for rank in range(world_size)]
    if not all(clock for clock, *_ in ranks):
        return None
    clocks, powers, temperatures, energies = zip(*ranks, strict=True)
    bits = numbers[_VALUES * world_size :]
    return {
        "clock_mhz": round(statistics.mean(clocks)),
        "power_w": round(statistics.mean(powers)),
        "temperature_c": round(max(temperatures)),
        "joules_per_token": round(sum(energies) / tokens, 5),
        "throttled_by": [name for name, bit in zip(THROTTLES, bits, strict=True) if bit],
    }


def _reader(device: torch.device) -> Any:
    """A function that reads one sample of ``device``, or None where that is not possible."""
    if device.type != "cuda":
        return None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

        def read() -> Sample:
            return Sample(
                at_s=time.monotonic(),
                clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                temperature_c=float(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                ),
                energy_j=nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
                throttles=int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            )

        read()
    except Exception:  # no package, no library, no such sensor in the device
        return None
    return read
