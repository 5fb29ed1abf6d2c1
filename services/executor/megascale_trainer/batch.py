"""One micro-batch as tensors. The contract is the same on every pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megascale_kernels.documents import Documents, documents_of

_DTYPES: Mapping[str, torch.dtype] = {
    "tokens": torch.int64,
    "targets": torch.int64,
    "loss_weight": torch.float32,
    "position": torch.int64,
}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of S tokens; every tensor is [B, S].

    ``targets`` is the token to predict, ``loss_weight`` (float32) its weight in the loss,
    ``position`` the input of the position embedding. ``documents`` has the bounds of documents.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_weight: torch.Tensor
    position: torch.Tensor
    documents: Documents

    @classmethod
    def from_numpy(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> MicroBatch:
        """Copies of the loader's arrays as tensors, with the documents of ``document_start``.

        Raises:
            ValueError: a field is missing, or its shape differs from that of ``tokens``.
        """
        names = (*_DTYPES, "document_start")
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"micro-batch lacks {', '.join(missing)}")
        shape = arrays["tokens"].shape
        for name in names:
            if arrays[name].shape != shape or len(shape) != 2:
                raise ValueError(
                    f"micro-batch field {name} has shape {arrays[name].shape}, tokens has {shape}; "
                    "need [B, S]"
                )
        tensors = {name: torch.tensor(arrays[name], dtype=dtype) for name, dtype in _DTYPES.items()}
        return cls(**tensors, documents=documents_of(torch.tensor(arrays["document_start"])))

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on ``device``; a copy from pinned memory does not block the host."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> MicroBatch:
        """The same micro-batch in page-locked host memory (needs CUDA)."""
        return self.map(torch.Tensor.pin_memory)

    def part(self, index: int, parts: int) -> MicroBatch:
        """The ``index``-th of ``parts`` equal parts of every sequence, with the same documents."""
        length = self.tokens.shape[1] // parts
        own = slice(index * length, (index + 1) * length)
        cut = {name: getattr(self, name)[:, own] for name in _DTYPES}
        return MicroBatch(**cut, documents=self.documents)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A micro-batch with ``function`` applied to each tensor; values on the host stay."""
        changed = {name: function(getattr(self, name)) for name in _DTYPES}
        return MicroBatch(**changed, documents=self.documents.map(function))

    def refilled(self, source: MicroBatch) -> MicroBatch:
        """``source``, of the same shape, copied into this micro-batch's tensors.

        The host does not wait for a copy between pinned memory and CUDA. Continue with the result:
        this object's tensors now hold ``source``'s values, but its document counts are the old
        ones.
        """
        for name in _DTYPES:
            getattr(self, name).copy_(getattr(source, name), non_blocking=True)
        offsets = self.documents.offsets
        return replace(
            self, documents=source.documents.map(lambda new: offsets.copy_(new, non_blocking=True))
        )
