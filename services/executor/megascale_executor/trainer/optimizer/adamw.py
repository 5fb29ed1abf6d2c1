"""AdamW over a flat shard (Loshchilov and Hutter, arXiv 1711.05101), without a look at the device from the host.

States are the three rows of one float32 tensor [3, shard elements], in the order of ``parameter_table.STATES``: the
tensor is the byte image that a snapshot copies. Bias correction counts steps, skipped ones included, so that the step
number alone describes where the optimizer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale_common.job_config import OptimizerConfig
from megascale_common.parameter_slices import ParameterTable, ShardRange
from megascale_common.parameter_table import STATES
from megascale_executor.trainer.optimizer.step_control import StepControl


@dataclass(frozen=True, slots=True)
class _Run:
    """``start:stop`` of the shard of bucket ``bucket``, of parameters that all decay or all do not."""

    bucket: int
    start: int
    stop: int
    shard_start: int
    decay: bool


class AdamW:
    """Optimizer of one rank's shard; ``states`` is float32 [3, shard elements] on ``device``, zero at first."""

    def __init__(self, config: OptimizerConfig, table: ParameterTable, device: torch.device) -> None:
        self._config = config
        self._runs = list(_runs(table))
        self.states = torch.zeros((len(STATES), table.shard_elements), dtype=torch.float32, device=device)

    @property
    def master(self) -> torch.Tensor:
        """float32 master parameters of the shard."""
        return self.states[0]

    def update(
        self, gradients: Sequence[torch.Tensor], control: StepControl, learning_rate: float, number: int
    ) -> None:
        """Apply update ``number`` (from 1), or leave every state bit for bit as it was where ``control.apply`` is 0.

        Args:
            gradients: float32 shard of each bucket, summed over the global batch; overwritten.
            control: scale of the gradients and the apply flag.
        """
        config = self._config
        step_size = learning_rate * control.apply
        weight1, weight2 = (1.0 - config.beta1) * control.apply, (1.0 - config.beta2) * control.apply
        correction1, correction2 = 1.0 - config.beta1**number, 1.0 - config.beta2**number
        for run in self._runs:
            # nan_to_num and not a product alone: in a skipped step the gradient may be NaN, and NaN * 0 is NaN
            gradient = gradients[run.bucket][run.start : run.stop].nan_to_num_(0.0, 0.0, 0.0).mul_(control.scale)
            master, mean, square = self.states[:, run.shard_start : run.shard_start + run.stop - run.start]
            mean.lerp_(gradient, weight1)
            square.lerp_(gradient.square_(), weight2)
            change = (mean / correction1).div_((square / correction2).sqrt_().add_(config.epsilon))
            if run.decay:
                change.add_(master, alpha=config.weight_decay)
            master.sub_(change.mul_(step_size))


def _runs(table: ParameterTable) -> Iterator[_Run]:
    """The shard as few runs of equal decay; padding inside goes with what stands before it, and stays zero."""
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    marks: dict[ShardRange, list[tuple[int, bool]]] = {owned: [] for owned in numbers}
    for owned, piece, start, _ in table.overlaps():
        marks[owned].append((start - owned.start, piece.decay))
    for owned, pieces in marks.items():
        changes = [
            mark for index, mark in enumerate(pieces) if index == 0 or mark[1] != pieces[index - 1][1]
        ]  # a shard of nothing but padding has none
        stops = [start for start, _ in changes[1:]] + [owned.stop - owned.start]
        for (start, decay), stop in zip(changes, stops, strict=False):
            yield _Run(numbers[owned], start, stop, owned.shard_offset + start, decay)
