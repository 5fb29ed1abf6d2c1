"""The batch contract of the trainer: one micro-batch as tensors, the same on every pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

_DTYPES: Mapping[str, torch.dtype] = {
    "tokens": torch.int64,
    "targets": torch.int64,
    "loss_weight": torch.float32,
    "position": torch.int64,
    "document_start": torch.int64,
}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of S tokens; every field is [B, S].

    ``targets`` is the token to predict, ``loss_weight`` (float32) its weight in the loss, ``position`` what the
    position embedding sees, ``document_start`` the index in the sequence where the token's document starts.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_weight: torch.Tensor
    position: torch.Tensor
    document_start: torch.Tensor

    @classmethod
    def from_numpy(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> MicroBatch:
        """Tensors of their own (copies) from the loader's arrays.

        Raises:
            ValueError: a field is missing, or its shape differs from that of ``tokens``.
        """
        missing = [name for name in _DTYPES if name not in arrays]
        if missing:
            raise ValueError(f"micro-batch lacks {', '.join(missing)}")
        shape = arrays["tokens"].shape
        for name in _DTYPES:
            if arrays[name].shape != shape or len(shape) != 2:
                raise ValueError(
                    f"micro-batch field {name} has shape {arrays[name].shape}, tokens has {shape}; need [B, S]"
                )
        return cls(**{name: torch.tensor(arrays[name], dtype=dtype) for name, dtype in _DTYPES.items()})

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on ``device``; a copy from pinned memory does not block the host."""
        return MicroBatch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def pin(self) -> MicroBatch:
        """The same micro-batch in page-locked host memory (needs CUDA)."""
        return MicroBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})
