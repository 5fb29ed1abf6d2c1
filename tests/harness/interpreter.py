"""Without CUDA, Triton's kernels run in its interpreter; call this before triton is imported."""

from __future__ import annotations

import os
import sys

import torch


def interpret_without_cuda() -> None:
    """Select the interpreter if there is no CUDA; for the conftest of folders with kernels."""
    if not torch.cuda.is_available():
        assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
            "triton is imported already"
        )
        os.environ["TRITON_INTERPRET"] = "1"
