"""Where there is no CUDA, Triton's kernels run in its interpreter: said before anything imports triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
