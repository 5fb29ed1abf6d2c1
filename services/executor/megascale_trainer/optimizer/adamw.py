"""AdamW over a flat shard, run by run of equal decay, without a look at the device from the host.

States are the three rows of one float32 tensor [3, shard elements], in the order of
``parameter_table.STATES``: the tensor is the byte image that a snapshot copies. Bias correction
counts steps, skipped ones included, so that the step number alone describes where the optimizer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megascale_common.job.config import OptimizerConfig
from megascale_common.sizes.parameter_slices import ParameterTable, ShardRange
from megascale_common.sizes.parameter_table import STATES
from megascale_kernels.adamw import AdamWKernel, AdamWUpdate
from megascale_trainer.optimizer.step_control import StepControl


@dataclass(frozen=True, slots=True)
class _Run:
    """``start:stop`` of the shard of bucket ``bucket``, of parameters that all decay or all do not."""

    bucket: int
    start: int
    stop: int
    shard_start: int
    decay: bool


class AdamW:
    """Optimizer of one rank's shard; ``states`` is float32 [3, shard elements] on ``device``, zero
    at first.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        table: ParameterTable,
        device: torch.device,
        kernel: AdamWKernel,
    ) -> None:
        self._config, self._kernel = config, kernel
        self._runs = list(_runs(table))
        self.states = torch.zeros(
            (len(STATES), table.shard_elements), dtype=torch.float32, device=device
        )

    @property
    def master(self) -> torch.Tensor:
        """float32 master parameters of the shard."""
        return self.states[0]

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        control: StepControl,
        learning_rate: float,
        number: int,
    ) -> None:
        """Apply update ``number`` (from 1), or leave everything bit for bit as it was where
        ``control.apply`` is 0.

        Args:
            gradients: float32 shard of each bucket, summed over the global batch; may be
                overwritten.
            parameters: shard of each bucket in the compute dtype, which takes the rounded master.
            control: scale of the gradients and the apply flag.
        """
        config = self._config
        decaying = AdamWUpdate(
            learning_rate, config.beta1, config.beta2, config.epsilon, config.weight_decay, number
        )
        still = replace(decaying, weight_decay=0.0)
        for run in self._runs:
            part = slice(run.start, run.stop)
            self._kernel(
                self.states[:, run.shard_start : run.shard_start + run.stop - run.start],
                gradients[run.bucket][part],
                parameters[run.bucket][part],
                control.scale,
                control.apply,
                decaying if run.decay else still,
            )


def _runs(table: ParameterTable) -> Iterator[_Run]:
    """The shard as few runs of equal decay; padding inside goes with what stands before it, and
    stays zero.
    """
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    marks: dict[ShardRange, list[tuple[int, bool]]] = {owned: [] for owned in numbers}
    for owned, piece, start, _ in table.overlaps():
        marks[owned].append((start - owned.start, piece.decay))
    for owned, pieces in marks.items():
        changes = [
            mark
            for index, mark in enumerate(pieces)
            if index == 0 or mark[1] != pieces[index - 1][1]
        ]  # a shard of nothing but padding has none
        stops = [start for start, _ in changes[1:]] + [owned.stop - owned.start]
        for (start, decay), stop in zip(changes, stops, strict=False):
            yield _Run(numbers[owned], start, stop, owned.shard_offset + start, decay)
