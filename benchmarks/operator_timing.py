"""Times of one operation on a device, and the device's own limits: copy bandwidth and GEMM rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
# About a millisecond: while the device sleeps the host enqueues the operation, so that the time of
# launching is not measured.
SLEEP_CYCLES = 2_000_000


class Meter:
    """Measures times on one device.

    ``quick`` makes the measurements of the device's limits tiny: for a dry run, not for figures.
    """

    def __init__(self, device: torch.device, repeats: int, *, quick: bool) -> None:
        self.device, self._repeats, self._quick = device, repeats, quick
        # Written before each repeat, twice the size of the cache: operands come from memory.
        self._flush = torch.empty(0)
        if device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)

    def times_s(self, operation: Callable[[], Any]) -> list[float]:
        """Seconds of each repeat, ascending; with cold caches, and without waiting for the host."""
        for _ in range(WARMUP):
            operation()
        timed = self._cuda_time_s if self.device.type == "cuda" else _host_time_s
        return sorted(timed(operation) for _ in range(self._repeats))

    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, those read plus those written."""
        source = torch.zeros(2**22 if self._quick else 2**31, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        times = self.times_s(lambda: target.copy_(source))
        return 2 * source.numel() / times[len(times) // 2]

    def gemm_rate(self, dtype: torch.dtype) -> float:
        """FLOP per second of a large GEMM of random numbers (zeros draw less power, run faster)."""
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
