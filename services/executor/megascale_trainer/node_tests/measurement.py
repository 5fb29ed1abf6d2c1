"""The measurements of a node test, which its process prints as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megascale_kernels.torch_calls import cuda_event


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One value of one target.

    Args:
        target: device, or pair ``from>to``.
        value: in ``unit``; None if the test only finds right or wrong.
        target_class: results are compared among targets of the same class.
        wrong: the error in the results; "" if they are right.
    """

    target: str
    value: float | None
    unit: str
    target_class: str = ""
    detail: str = ""
    wrong: str = ""


def median_s(
    work: Callable[[], object], device: torch.device, budget_s: float, *, most: int = 50
) -> float:
    """Median duration of ``work`` in seconds, of 3 to ``most`` calls within ``budget_s``.

    The first call does not count: it loads libraries and allocates. On a GPU the duration is the
    time between two CUDA events on the current stream of ``device``.
    """
    work()
    _wait(device)
    found: list[float] = []
    end_s = time.monotonic() + budget_s
    while len(found) < 3 or (len(found) < most and time.monotonic() < end_s):
        found.append(once_s(work, device))
    return statistics.median(found)


def once_s(work: Callable[[], object], device: torch.device) -> float:
    """Duration of one call of ``work`` in seconds, on the device's own clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        first, last = (cuda_event(timed=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(kind: str, index: int) -> torch.device:
    """The device of an index; CPU slots share the host's processors, so they are all the same."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index)
