"""AdamW over a flat shard, run by run of equal decay, without waiting for the device.

Bias correction counts only the updates that were applied: as many as the moments hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from megascale_job.sizes.parameter_table import DEFAULT_STATES
from megascale_kernels import adamw
from megascale_kernels.adamw import AdamWKernel, AdamWUpdate, BiasCorrection
from megascale_trainer.optimizer.interface import OptimizerFactory, OptimizerSetup, decay_runs
from megascale_trainer.optimizer.step_control import StepControl


class AdamW:
    """See :class:`megascale_trainer.optimizer.interface.Optimizer`."""

    state_names: ClassVar[tuple[str, ...]] = DEFAULT_STATES

    def __init__(self, setup: OptimizerSetup) -> None:
        self._config = setup.config
        self._states = setup.states
        self._kernel = _kernel(setup.kernels)
        self._runs = list(decay_runs(setup.table))

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        control: StepControl,
        learning_rate: float,
        number: int,
    ) -> None:
        config = self._config
        decaying = AdamWUpdate(
            learning_rate=learning_rate,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            bias=BiasCorrection(config.beta1, config.beta2, number, control.skipped),
        )
        still = replace(decaying, weight_decay=0.0)
        for run in self._runs:
            self._kernel(
                run.of_states(self._states),
                run.of_buckets(gradients),
                run.of_buckets(parameters),
                control.scale,
                control.apply,
                decaying if run.decay else still,
            )


def _kernel(kernels: Literal["torch", "triton"]) -> AdamWKernel:
    if kernels == "torch":
        return adamw.adamw
    from megascale_kernels.fused import adamw as fused  # needs Triton

    return fused.adamw


OPTIMIZER: OptimizerFactory = AdamW
