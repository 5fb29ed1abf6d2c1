"""The operators that a model computes with: torch's own, or fused Triton kernels; equal but for
rounding.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_kernels import activation, cross_entropy, norm, residual
from megascale_kernels import block_inner as core
from megascale_kernels.activation import Activation
from megascale_kernels.attention import AttentionMask
from megascale_kernels.cross_entropy import CrossEntropy
from megascale_kernels.parameter import Parameter
from megascale_kernels.rotary import Heads, RotaryTable

_AMPERE = (8, 0)  # bf16 in Triton


class Norm(Protocol):
    """:func:`megascale_kernels.norm.norm`."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: Parameter,
        bias: Parameter | None,
        kind: norm.Kind,
        epsilon: float,
        added: Sequence[Parameter] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Add(Protocol):
    """:func:`megascale_kernels.residual.add`."""

    def __call__(
        self, stream: torch.Tensor, x: torch.Tensor, biases: Sequence[Parameter]
    ) -> torch.Tensor: ...


class Core(Protocol):
    """:func:`megascale_kernels.block_inner.core`."""

    def __call__(
        self,
        inputs: torch.Tensor,
        bias: Parameter | None,
        heads: Heads,
        activation: Activation | None,
        rotary: RotaryTable | None,
        mask: AttentionMask,
    ) -> torch.Tensor: ...


class Activate(Protocol):
    """:func:`megascale_kernels.activation.activate`."""

    def __call__(
        self, x: torch.Tensor, bias: Parameter | None, activation: Activation
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Operators:
    """One implementation of each operator; ``name`` says whose."""

    name: Literal["torch", "triton"]
    norm: Norm
    add: Add
    core: Core
    activate: Activate
    cross_entropy: CrossEntropy


def choose(kind: Literal["auto", "torch", "triton"], device: torch.device) -> Operators:
    """The operators of ``kind``; auto is triton on CUDA, else torch.

    Where Triton cannot run on ``device`` they are torch's, with one line in the log.
    """
    if kind == "triton" or (kind == "auto" and device.type == "cuda"):
        obstacle = _obstacle(device)
        if obstacle is None:
            return triton_operators()
        _say_once(f"training.kernels is {kind}, but {obstacle}: torch's own operators are used")
    return torch_operators()


def torch_operators() -> Operators:
    """The plain references."""
    return Operators(
        "torch",
        norm.norm,
        residual.add,
        core.core,
        activation.activate,
        cross_entropy.cross_entropy,
    )


def triton_operators() -> Operators:
    """The fused operators; needs Triton (an ImportError without), and CUDA tensors or Triton's
    interpreter.
    """
    from megascale_kernels.fused import activation as fused_activation
    from megascale_kernels.fused import block_inner as fused_core
    from megascale_kernels.fused import cross_entropy as fused_cross_entropy
    from megascale_kernels.fused import norm as fused_norm
    from megascale_kernels.fused import residual as fused_residual

    return Operators(
        "triton",
        fused_norm.norm,
        fused_residual.add,
        fused_core.core,
        fused_activation.activate,
        fused_cross_entropy.cross_entropy,
    )


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``; its interpreter (TRITON_INTERPRET=1, for tests) runs on
    any.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return _driver_obstacle()


def _driver_obstacle() -> str | None:
    """Why Triton's driver cannot be had; Triton builds it, as it builds kernels' launchers, with a
    C compiler.
    """
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # no compiler, no headers of Python, no place for its cache: each fails in its own way
        return f"Triton cannot build its driver ({error})"
    return None


@functools.cache
def _say_once(line: str) -> None:
    logging.getLogger(__name__).warning(line)
