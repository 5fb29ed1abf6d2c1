"""Sums through tensor descriptors in Triton's interpreter, which lacks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def sums_through_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``descriptor.atomic_add`` as a load, a sum and a store; on a GPU nothing is replaced."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    def reduce(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        pointers, inside = descriptor.materialize_pointers(indices)
        total = self.create_descriptor_load(descriptor, indices, None).data + value.data
        handle = interpreter.TensorHandle(total, value.dtype)
        return self.create_masked_store(pointers, handle, inside, None)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_descriptor_reduce", reduce, raising=False
    )
    yield
