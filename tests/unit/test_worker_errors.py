"""The kind of a worker's error, from which the driver decides whether another attempt may help."""

from __future__ import annotations

import pytest
import torch

from megascale_trainer.data.errors import CorpusError, DataError
from megascale_trainer.process.worker import JobRefused, _classify
from megascale_trainer.restore import RestoreRefused


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (CorpusError("trainer.data.sources[0].prefix: gone"), "BAD_JOB", "sources[0].prefix: gone"),
        (DataError("data loader has stopped"), "DATA", "has stopped"),
        (JobRefused("trainer.optimizer.name: unknown"), "BAD_JOB", "optimizer.name"),
        (RestoreRefused("BAD_JOB", "trainer.model: other", ""), "BAD_JOB", "trainer.model: other"),
        (RestoreRefused("CHECKPOINT_CORRUPT", "bad", "/c/rank-0"), "CHECKPOINT_CORRUPT", "/c/rank"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nhint"),
            "OUT_OF_MEMORY",
            "2 GiB",
        ),
        (MemoryError(), "OUT_OF_MEMORY", "no memory left"),
        (RuntimeError("Connection closed by peer [1.2.3.4]"), "COLLECTIVE", ""),
        (ValueError("a defect"), "OTHER", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_kind_of_an_error(error: Exception, kind: str, detail: str) -> None:
    found, text = _classify(error)
    assert found == kind and detail in text


def test_an_allocation_that_the_host_refuses_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(1 << 60, dtype=torch.uint8)
    kind, detail = _classify(refusal.value)
    assert kind == "OUT_OF_MEMORY" and "allocate" in detail
