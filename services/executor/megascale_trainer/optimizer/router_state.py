"""The state of routers: the load of each expert, and the bias that moves against its excess.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664, Algorithm 1: after each
update the bias of an expert rises by ``bias_rate`` if its load was below the mean, and falls if it
was above. The mean is known beforehand: every token of the global batch has ``top_k`` choices.

The choices of a step arrive as gradients: see Note [Load as a gradient] in
:mod:`megascale_trainer.model.blocks.moe`. They never reach the optimizer or the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megascale_job.blocks.parts import Extent
from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import BufferPlan, ParameterTable


@dataclass(frozen=True)
class StageLoads:
    """The load of each expert on this rank's stage in one step.

    ``values``: float32 [layers, experts], on the device: choices over their mean (1: even); None:
    the stage has no experts. ``own`` are those of this rank, one of ``parts`` of an ep group.
    """

    values: torch.Tensor | None
    own: slice
    parts: int

    def by_layer(self, flat: list[float]) -> tuple[tuple[float, ...], ...]:
        """``values`` again, from its numbers in one list."""
        if self.values is None:
            return ()
        width = self.values.shape[1]
        return tuple(tuple(flat[at : at + width]) for at in range(0, len(flat), width))

    def share(self, by_layer: tuple[tuple[float, ...], ...]) -> float:
        """The load of this rank's experts over the mean of the ep group's ranks, all layers."""
        total = sum(map(sum, by_layer))
        return (
            self.parts * sum(sum(loads[self.own]) for loads in by_layer) / total if total else 0.0
        )


@dataclass(frozen=True)
class _Shard:
    """The state of routers in one range of the rank's shard.

    Args:
        bucket: number of the range.
        place: its part of the rank's flat shard.
        rates: float32, of each value: the step of a bias, 0 for a load.
        is_load: of each value.
    """

    bucket: int
    place: slice
    rates: torch.Tensor
    is_load: torch.Tensor


class RouterState:
    """Counts the choices of a step and gives routers their new state.

    Args:
        master: float32 [shard elements], the rank's parameters.
    """

    def __init__(self, config: JobConfig, table: ParameterTable, master: torch.Tensor) -> None:
        experts, training = config.model.experts, config.training
        tokens = training.global_batch_size * config.model.sequence_length
        self._mean = tokens * experts.top_k / max(1, experts.count)
        self._loads = [t.name for t in table.tensors if t.name.endswith("router.load")]
        first, number = Extent(experts.count, "experts").part(table.at, config.layout)
        self._own = slice(first, first + number)
        self._parts = config.layout.ep
        self._master = master
        self._shards: list[_Shard] = []
        names = {plan.name: plan for plan in table.buffers}
        for number, owned in enumerate(table.shard_ranges):
            if not names[owned.buffer].counted:
                continue
            size = owned.stop - owned.start
            rates, is_load = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
            for other, piece, start, stop in table.overlaps():
                if other == owned:
                    part = slice(start - owned.start, stop - owned.start)
                    rates[part] = experts.bias_rate if piece.name.endswith(".bias") else 0.0
                    is_load[part] = piece.name.endswith(".load")
            place = slice(owned.shard_offset, owned.shard_offset + size)
            device = master.device
            self._shards.append(_Shard(number, place, rates.to(device), is_load.to(device)))

    def loads(self, values: Mapping[str, torch.Tensor]) -> StageLoads:
        """The loads in the stored tensors ``values``, by name."""
        found = [values[name] for name in self._loads]
        relative = torch.stack(found) / self._mean if found else None
        return StageLoads(relative, self._own, self._parts)

    def take_choices(self, gradients: list[tuple[BufferPlan, torch.Tensor]]) -> list[torch.Tensor]:
        """The choices in the counted ranges of ``gradients``, which become zero there."""
        taken = []
        for shard in self._shards:
            _, counts = gradients[shard.bucket]
            taken.append(counts.clone())
            counts.zero_()
        return taken

    def update(
        self, choices: list[torch.Tensor], parameters: list[torch.Tensor], apply: torch.Tensor
    ) -> None:
        """New loads and biases into the master values and ``parameters``.

        Args:
            choices: of :meth:`take_choices`.
            parameters: this rank's shard of each bucket.
            apply: 1, or 0 to leave every bit as it is (a skipped update).
        """
        for shard, counts in zip(self._shards, choices, strict=True):
            old = self._master[shard.place]
            moved = old + shard.rates * torch.sign(self._mean - counts)
            new = torch.where(shard.is_load, counts, moved)
            old.copy_(torch.where(apply > 0, new, old))
            parameters[shard.bucket].copy_(old)
