"""What ``precision: fp8`` adds to a rank: operators, linear operators and weights in FP8.

The layers' GEMMs are in FP8; embedding, head, attention and the layers that the job keeps in bf16
stay as they are. Transfers of both kinds share one order and one peer memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import ParameterTable, fp8_weights
from megascale_kernels.cache_folder import cache_folder
from megascale_kernels.casts import casts
from megascale_kernels.fp8_activation import Fp8Activation
from megascale_kernels.fp8_operators import fp8_operators
from megascale_kernels.gemm import Gemm
from megascale_kernels.operators import LayerOperators, Operators
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms, OverlappedFp8Gemms, PlainFp8Gemms
from megascale_kernels.quantize import Factor, Operand
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.fp8_linear import FastSums, Fp8Linears
from megascale_trainer.parallel.tensor.fp8_weights import Fp8Weights
from megascale_trainer.parallel.tensor.overlapped_matmul import OverlappedMatmuls
from megascale_trainer.parallel.tensor.sharding import TensorParallel

_ADA = (8, 9)  # the first compute capability with FP8
_CHOICE_S = 0.02  # for how long each proposed algorithm is timed


@dataclass(frozen=True)
class Fp8:
    """What a stage hands to its layers in FP8; ``layers`` are their indices in the model."""

    layers: range
    operators: LayerOperators[Fp8Activation]
    linears: Fp8Linears
    weights: Fp8Weights

    def choose_algorithms(self, table: ParameterTable, tokens: int, device: torch.device) -> None:
        """Time the algorithms of all GEMMs of this rank's layers now.

        Inside an operator it would keep the other ranks in a barrier, or run beside a receive.

        Args:
            tokens: of a micro-batch, over all tp ranks.
        """
        shapes = {
            (tensor.shape, tensor.name.endswith("in.weight"))
            for tensor in fp8_weights(self.layers, table)
        }
        for shape, column in sorted(shapes):
            self.linears.rehearse(shape[0], shape[1], tokens, device, column=column)


def fp8_of(
    config: JobConfig, operators: Operators, tp: TensorParallel, device: torch.device
) -> Fp8 | None:
    """What the job asks for; None without FP8.

    Raises:
        ValueError: ``device`` has no FP8.
    """
    if not config.fp8_layers:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _ADA:
        raise ValueError(
            f"trainer.training.precision is fp8, but {torch.cuda.get_device_name(device)} is older "
            "than compute capability 8.9: use bf16"
        )
    # With a measured choice two runs may take different algorithms, which round differently.
    gemm = Gemm(_choices_file(), timed=not config.training.deterministic, duration_s=_CHOICE_S)
    made = casts(operators.name)
    weights = Fp8Weights(made)
    linears = Fp8Linears(
        tp.size,
        _gemms(tp, gemm),
        gemm,
        made,
        weights,
        tp.weight_gradients,
        by_row=config.training.fp8.format == "e4m3",
        fast=FastSums.of(config.training.fp8.fast_accumulation),
    )
    return Fp8(
        config.fp8_layers,
        fp8_operators(operators, made, weights.norm_scale, linears.gemms.own_part),
        linears,
        weights,
    )


def _choices_file() -> Path | None:
    """Where this machine keeps its fastest algorithms; None: no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "gemm-choices.json"


def _gemms(tp: TensorParallel, gemm: Gemm) -> Fp8Gemms:
    if not isinstance(tp.matmuls, OverlappedMatmuls):
        return PlainFp8Gemms(tp.group, gemm)
    return _Counted(tp.group, OverlappedFp8Gemms(tp.matmuls.transfers, gemm))


class _Counted:
    """Overlapped FP8 GEMMs and agreements, each counted as one operation of the group."""

    def __init__(self, group: Group, gemms: OverlappedFp8Gemms) -> None:
        self._group, self._gemms = group, gemms

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        with self._group.operation(part.data):
            return self._gemms.all_gather_matmul(part, factor, fast=fast)

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        with self._group.operation(x.data):
            return self._gemms.matmul_reduce_scatter(x, factor, meanwhile, fast=fast)

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        with self._group.operation(amax):
            return self._gemms.largest(amax)

    def own_part(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._gemms.own_part(like, dtype)

    def rows_at_once(self, rows: int) -> Sequence[int]:
        return self._gemms.rows_at_once(rows)
