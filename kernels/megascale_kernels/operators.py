"""The operators of a model: torch's own, or fused Triton kernels; equal but for rounding.

An operator has its contract (a Protocol or an alias), a field of :class:`Operators`, and a line in
:func:`torch_operators` and in :func:`triton_operators`. Both lines name one function of one module:
``norm.norm`` in this package is the plain reference, in :mod:`megascale_kernels.fused` the kernel.
How to add one: docs/how-to/add-a-fused-kernel.md.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch

from megascale_kernels import activation, block_inner, cross_entropy, norm, partial_sums, residual
from megascale_kernels.activation import Activation
from megascale_kernels.cross_entropy import CrossEntropy
from megascale_kernels.parameter import Parameter

_AMPERE = (8, 0)  # bf16 in Triton

# What a linear layer reads: a tensor, or in FP8 a
# :class:`megascale_kernels.fp8_activation.Fp8Activation`.
Input_co = TypeVar("Input_co", covariant=True)


class NormOperator(Protocol[Input_co]):
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
    ) -> tuple[torch.Tensor, Input_co]: ...


class AddOperator(Protocol):
    """:func:`megascale_kernels.residual.add`."""

    def __call__(
        self, stream: torch.Tensor, x: torch.Tensor, biases: Sequence[Parameter]
    ) -> torch.Tensor: ...


class BlockInnerOperator(Protocol[Input_co]):
    """:func:`megascale_kernels.block_inner.block_inner`."""

    def __call__(
        self,
        inputs: torch.Tensor,
        bias: Parameter | None,
        context: block_inner.AttentionContext,
        activation: Activation | None,
    ) -> Input_co: ...


class ActivateOperator(Protocol[Input_co]):
    """:func:`megascale_kernels.activation.activate`."""

    def __call__(
        self, x: torch.Tensor, bias: Parameter | None, activation: Activation
    ) -> Input_co: ...


@dataclass(frozen=True, kw_only=True)
class LayerOperators(Generic[Input_co]):
    """One implementation of each operator of a layer."""

    norm: NormOperator[Input_co]
    add: AddOperator
    block_inner: BlockInnerOperator[Input_co]
    activate: ActivateOperator[Input_co]


@dataclass(frozen=True, kw_only=True)
class Operators(LayerOperators[torch.Tensor]):
    """One implementation of each operator; ``name`` is whose it is."""

    name: Literal["torch", "triton"]
    cross_entropy: CrossEntropy
    sum_of_parts: partial_sums.SumOfParts


def choose(kind: Literal["auto", "torch", "triton"], device: torch.device) -> Operators:
    """The operators of ``kind``; auto is triton on CUDA, else torch.

    Where Triton cannot run on ``device`` they are torch's, and one line in the log gives the cause.
    """
    if kind == "triton" or (kind == "auto" and device.type == "cuda"):
        obstacle = _obstacle(device)
        if obstacle is None:
            return triton_operators()
        _log_once(
            f"trainer.training.kernels is {kind}, but {obstacle}: torch's own operators are used"
        )
    return torch_operators()


def torch_operators() -> Operators:
    """The plain references."""
    return Operators(
        name="torch",
        norm=norm.norm,
        add=residual.add,
        block_inner=block_inner.block_inner,
        activate=activation.activate,
        cross_entropy=cross_entropy.cross_entropy,
        sum_of_parts=partial_sums.sum_of_parts,
    )


def triton_operators() -> Operators:
    """The fused operators, for CUDA tensors or, in Triton's interpreter, for any.

    Raises:
        ImportError: Triton is not installed.
    """
    # Imported here and not above: a CPU build of torch comes without Triton.
    from megascale_kernels.fused import activation as fused_activation
    from megascale_kernels.fused import block_inner as fused_block_inner
    from megascale_kernels.fused import cross_entropy as fused_cross_entropy
    from megascale_kernels.fused import norm as fused_norm
    from megascale_kernels.fused import partial_sums as fused_partial_sums
    from megascale_kernels.fused import residual as fused_residual

    return Operators(
        name="triton",
        norm=fused_norm.norm,
        add=fused_residual.add,
        block_inner=fused_block_inner.block_inner,
        activate=fused_activation.activate,
        cross_entropy=fused_cross_entropy.cross_entropy,
        sum_of_parts=fused_partial_sums.sum_of_parts,
    )


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``, or None; its interpreter (TRITON_INTERPRET=1) can."""
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
    """Why Triton's driver cannot be built, or None; it takes a C compiler, as launching does."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    # No compiler, no Python headers, no writable cache: each raises an error of its own kind.
    except Exception as error:
        return f"Triton cannot build its driver ({error})"
    return None


@functools.cache
def _log_once(line: str) -> None:
    logging.getLogger(__name__).warning(line)
