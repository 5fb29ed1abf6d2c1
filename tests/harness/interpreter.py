"""Where there is no CUDA, Triton's kernels run in its interpreter: to be chosen before anything
imports triton.
"""

from __future__ import annotations

import os
import sys

import torch


def interpret_without_cuda() -> None:
    """Choose the interpreter where it is needed; for the conftest of every folder whose modules
    import kernels.
    """
    if not torch.cuda.is_available():
        assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
            "triton is imported already"
        )
        os.environ["TRITON_INTERPRET"] = "1"
