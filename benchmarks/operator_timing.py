"""Times of one operation on a device, and what that device can do at most: its copy bandwidth and
its GEMM rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
# About a millisecond: while the device sleeps the host enqueues the operation, so that its own time
# is not measured.
SLEEP_CYCLES = 2_000_000


class Meter:
    """Takes times on one device. ``quick`` makes the device's own measurements tiny: a dry run, not
    a figure.
    """

    def __init__(self, device: torch.device, repeats: int, *, quick: bool) -> None:
        self.device, self._repeats, self._quick = device, repeats, quick
        self._flush = torch.empty(0)
        if device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)

    def times_s(self, operation: Callable[[], Any]) -> list[float]:
        """Seconds of each repeat, in ascending order; the caches are cold and the device waits for
        no host.
        """
        for _ in range(WARMUP):
            operation()
        take = self._cuda_time_s if self.device.type == "cuda" else _host_time_s
        return sorted(take(operation) for _ in range(self._repeats))

    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, read and written ones counted."""
        source = torch.zeros(2**22 if self._quick else 2**31, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        times = self.times_s(lambda: target.copy_(source))
        return 2 * source.numel() / times[len(times) // 2]

    def gemm_rate(self, dtype: torch.dtype) -> float:
        """FLOP per second of a large square GEMM of random numbers (zeros draw less power and run
        faster).
        """
        size = 128 if self._quick else 8192
        left, right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        times = self.times_s(lambda: left @ right)
        return 2 * size**3 / times[len(times) // 2]

    def _cuda_time_s(self, operation: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        operation()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _host_time_s(operation: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin
