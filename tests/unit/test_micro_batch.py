"""The batch contract: arrays become tensors of the agreed types, and what is missing or misshapen is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megascale_executor.trainer.batch import MicroBatch


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "tokens": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "targets": np.arange(1, 7, dtype=np.uint16).reshape(2, 3),
        "loss_weight": np.ones((2, 3), dtype=np.float64),
        "position": np.zeros((2, 3), dtype=np.int32),
        "document_start": np.zeros((2, 3), dtype=np.int32),
    }


def test_compact_types_are_widened_and_copied() -> None:
    arrays = _arrays()
    batch = MicroBatch.from_numpy(arrays).to(torch.device("cpu"))
    integers = (batch.tokens, batch.targets, batch.position, batch.document_start)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert batch.loss_weight.dtype == torch.float32
    arrays["tokens"][0, 0] = 99
    assert batch.tokens.tolist() == [[0, 1, 2], [3, 4, 5]], "the loader may reuse its memory"


def test_a_missing_field_is_named() -> None:
    arrays = _arrays()
    del arrays["position"], arrays["targets"]
    with pytest.raises(ValueError, match="micro-batch lacks targets, position"):
        MicroBatch.from_numpy(arrays)


@pytest.mark.parametrize("field", ["targets", "loss_weight", "document_start"])
def test_a_field_of_another_shape_is_named(field: str) -> None:
    arrays = {**_arrays(), field: np.zeros((2, 4))}
    with pytest.raises(ValueError, match=rf"field {field} has shape \(2, 4\), tokens has \(2, 3\)"):
        MicroBatch.from_numpy(arrays)
