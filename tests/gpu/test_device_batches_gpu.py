"""Prefetched batches on CUDA: a step reads its own data, at any speed of host and device."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
import torch

from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.client import LoaderClient
from megascale_trainer.data.device_batches import step_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = (4, 2048)
FIELDS = {
    "tokens": "<i8",
    "targets": "<i8",
    "loss_weight": "<f4",
    "position": "<i8",
    "document_start": "<i4",
}


class CountingLoader:
    """Step n has two micro-batches full of 2 n and 2 n + 1: also their first documents' lengths."""

    def __init__(self) -> None:
        self.steps = 0

    def next_step(self) -> list[dict[str, np.ndarray[Any, Any]]]:
        self.steps += 1
        numbers = (2 * self.steps, 2 * self.steps + 1)
        return [self._arrays(number) for number in numbers]

    def _arrays(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        arrays = {name: np.full(SHAPE, number, dtype) for name, dtype in FIELDS.items()}
        arrays["document_start"][:, :number] = 0
        return arrays


def _summary(batch: MicroBatch) -> torch.Tensor:
    assert batch.documents.number == 2 * SHAPE[0]
    values = (batch.tokens.amin(), batch.documents.bounds[1], batch.loss_weight.sum())
    return torch.stack([value.double() for value in values])


# 20 million cycles are some 10 ms of work per step: the host runs far ahead.
@pytest.mark.parametrize("busy_cycles", [0, 20_000_000])
@pytest.mark.parametrize("prefetching", [True, False])
def test_every_step_reads_its_own_batches(busy_cycles: int, prefetching: bool) -> None:
    loader = CountingLoader()
    data = step_batches(cast(LoaderClient, loader), torch.device("cuda", 0))
    seen, longest = [], []
    begin = time.monotonic()
    for _ in range(12):
        batches = data.take()
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)  # type: ignore[no-untyped-call]
        seen.append([_summary(batch) for batch in batches])
        longest.append([batch.documents.longest for batch in batches])
        if prefetching:
            data.prefetch()
    launched_s = time.monotonic() - begin
    torch.cuda.synchronize()
    drained_s = time.monotonic() - begin
    for step, found in enumerate(seen, start=1):
        for number, values in zip((2 * step, 2 * step + 1), found, strict=True):
            assert values.tolist() == [number, number, number * SHAPE[0] * SHAPE[1]]
    assert longest == [[SHAPE[1] - 2 * step, SHAPE[1] - 2 * step - 1] for step in range(1, 13)]
    if busy_cycles and prefetching:
        assert launched_s < drained_s, "the host did not wait for the device"
