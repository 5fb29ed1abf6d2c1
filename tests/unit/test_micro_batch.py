"""The batch contract: arrays become tensors of the agreed types; wrong ones are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megascale_trainer.batch import MicroBatch


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
    assert {tensor.dtype for tensor in (batch.tokens, batch.targets, batch.position)} == {
        torch.int64
    }
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


def test_documents_are_counted_where_they_start() -> None:
    batch = MicroBatch.from_numpy({**_arrays(), "document_start": np.array([[0, 0, 2], [0, 0, 0]])})
    documents = batch.documents
    assert (documents.number, documents.longest, documents.shape) == (3, 3, (2, 3))
    assert documents.offsets.tolist() == [0, 2, 3, 6, 6, 6, 6], (
        "as long for any documents: the tensor is refilled"
    )
    assert documents.offsets.dtype == torch.int32


def test_a_refilled_micro_batch_keeps_its_memory_and_holds_the_new_documents() -> None:
    old = MicroBatch.from_numpy({**_arrays(), "document_start": np.array([[0, 1, 2], [0, 1, 2]])})
    other = _arrays()
    other["tokens"] += 10
    new = MicroBatch.from_numpy({**other, "document_start": np.array([[0, 0, 2], [0, 0, 0]])})
    refilled = old.refilled(new)
    assert refilled.tokens is old.tokens and refilled.documents.offsets is old.documents.offsets
    assert refilled.tokens.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert refilled.documents.bounds.tolist() == [0, 2, 3, 6]
    assert (refilled.documents.number, refilled.documents.longest) == (3, 3)
    assert new.documents.number == 3 and new.tokens is not refilled.tokens
