"""Kernels run in Triton's interpreter where there is no CUDA."""

from __future__ import annotations

from tests.harness.interpreter import interpret_without_cuda

interpret_without_cuda()
