"""Node tests of copies: host to device and back, and from each device to every other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megascale_trainer.node_tests.measurement import Measured, device_of, median_s

HOST_COPY_BYTES, DEVICE_COPY_BYTES = 256 << 20, 256 << 20


def host_copy(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """GB/s between pinned host memory and each GPU, in both directions."""
    found = []
    for index in devices:
        device = device_of(kind, index)
        host = torch.ones(HOST_COPY_BYTES // 4, pin_memory=True)
        there = torch.empty(HOST_COPY_BYTES // 4, device=device)
        back = torch.empty(HOST_COPY_BYTES // 4, pin_memory=True)
        share_s = budget_s / (2 * len(devices))
        down_s = _copy_s(there, host, device, share_s)
        up_s = _copy_s(back, there, device, share_s)
        wrong = "" if bool((back == 1).all()) else "what came back differs from what was sent"
        for target, kind_of_pair, elapsed_s in (
            (f"host>cuda:{index}", "host-cuda", down_s),
            (f"cuda:{index}>host", "cuda-host", up_s),
        ):
            found.append(_measured(target, kind_of_pair, HOST_COPY_BYTES / elapsed_s, wrong))
    return found


def device_copy(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """GB/s from each device to every other: a low row or column is a device, a low cell a link."""
    pairs = list(itertools.permutations(devices, 2))
    found = []
    for source_index, target_index in pairs:
        source, target = device_of(kind, source_index), device_of(kind, target_index)
        sent = torch.ones(DEVICE_COPY_BYTES // 4, device=source)
        there = torch.empty(DEVICE_COPY_BYTES // 4, device=target)
        elapsed_s = _copy_s(there, sent, source, budget_s / len(pairs))
        torch.cuda.synchronize(target)
        wrong = "" if bool((there == 1).all()) else "the copy differs from its source"
        name = f"cuda:{source_index}>cuda:{target_index}"
        found.append(_measured(name, "cuda-cuda", DEVICE_COPY_BYTES / elapsed_s, wrong))
    return found


def _copy_s(
    target: torch.Tensor, source: torch.Tensor, device: torch.device, budget_s: float
) -> float:
    return median_s(lambda: target.copy_(source, non_blocking=True), device, budget_s, most=20)


def _measured(target: str, target_class: str, rate: float, wrong: str) -> Measured:
    return Measured(
        target=target, value=rate / 1e9, unit="GB/s", target_class=target_class, wrong=wrong
    )
