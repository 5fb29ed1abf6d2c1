"""A rank's optimizer states as the bytes of a slot, and the copies between the two."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale_job.config import JobConfig
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.parameter_table import (
    ParameterTable,
    parameter_table,
    shard_layout,
    slot_bytes,
)
from megascale_trainer.optimizer.registry import optimizer_factory
from megascale_trainer.save.host_copy import CopyEnd, Landed, parts


def layout_of_rank(config: JobConfig, rank: int) -> ShardLayout:
    """The layout of a rank's state in a slot, before its trainer is built.

    Raises:
        ValueError: this build or this node's packages refuse sizes or names.
    """
    states = optimizer_factory(config.optimizer.name).state_names
    return shard_layout(parameter_table(config, rank), tuple(states))


def largest_slot_bytes(config: JobConfig) -> int:
    """Size of the largest slot of all ranks: stages differ, and ranks of one stage are alike.

    Raises:
        ValueError: as :func:`layout_of_rank`.
    """
    states = tuple(optimizer_factory(config.optimizer.name).state_names)
    stages = config.layout.members(0, "pp")
    return max(slot_bytes(parameter_table(config, rank), states) for rank in stages)


class StateImage:
    """The flat states of a rank's optimizer.

    ``values`` is float32 [names, shard elements], zeros at first; row 0 is the master parameters.
    The tensor that the optimizer updates is also the byte image that a snapshot copies and a
    restore fills.
    """

    def __init__(self, table: ParameterTable, names: tuple[str, ...], device: torch.device) -> None:
        self.values = torch.zeros(
            (len(names), table.shard_elements), dtype=torch.float32, device=device
        )
        self._names = names
        self._layout = shard_layout(table, names)
        self._copied: CopyEnd | None = None

    @property
    def master(self) -> torch.Tensor:
        """float32 master parameters of the shard; a view."""
        return self.values[0]

    def states(self) -> dict[str, torch.Tensor]:
        """This rank's flat float32 shard of each optimizer state, by name; views."""
        return dict(zip(self._names, self.values.unbind(), strict=True))

    def shard_layout(self) -> ShardLayout:
        """The places of every logical parameter's states in a slot of this rank."""
        return self._layout

    def state_image(self) -> torch.Tensor:
        """The states in the form of a slot, uint8 on the device; a view.

        A restore writes the pieces of the layout into it, and zeros between them.
        """
        return self.values.view(-1).view(torch.uint8)

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        """Enqueue a copy of the states into ``slot``, uint8 [slot_bytes], on the current stream.

        The slot may be on any device. ``landed`` is enqueued after each part of the copy.
        """
        image = self.state_image()
        self._check_slot(slot)
        for start, stop in parts(0, image.numel()):
            slot[start:stop].copy_(image[start:stop], non_blocking=True)
            landed(stop)

    def wait_before_update(self, copied: CopyEnd) -> None:
        """Make the next update wait for ``copied``; on CUDA the device waits, not the host.

        A snapshot's copy still reads the states, which the update overwrites.
        """
        self._copied = copied

    def take_copied(self) -> CopyEnd | None:
        """The copy for which the next update must wait; a second call returns None."""
        copied = self._copied
        self._copied = None
        return copied

    def load_from(
        self, slot: torch.Tensor, ready: Callable[[int], object] = lambda stop: None
    ) -> None:
        """Take the states from ``slot``, uint8 [slot_bytes]; ``ready`` waits for its first bytes.

        Bytes that no piece of the layout describes (padding) become zero. From pinned memory the
        copies are only enqueued, on the current stream.

        :meth:`megascale_trainer.trainer.Trainer.finish_load`, which all ranks call together, then
        publishes the parameters.
        """
        image = self.state_image()
        self._check_slot(slot)
        end = 0
        # Padding between the pieces becomes zero, whatever the slot has there.
        image.zero_()
        # In the order of the slot, so that copies begin while later parts are still being pinned.
        for piece in sorted(self._layout.pieces, key=lambda piece: piece.slot_offset_bytes):
            end = piece.slot_offset_bytes + piece.size_bytes
            for start, stop in parts(piece.slot_offset_bytes, end):
                ready(stop)
                image[start:stop].copy_(slot[start:stop], non_blocking=True)

    def _check_slot(self, slot: torch.Tensor) -> None:
        if slot.dtype != torch.uint8 or slot.dim() != 1 or slot.numel() < self._layout.slot_bytes:
            raise ValueError(
                f"a slot of this rank is uint8 [{self._layout.slot_bytes}], "
                f"got {slot.dtype} {list(slot.shape)}"
            )
