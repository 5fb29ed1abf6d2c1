"""Groups whose operations return at once, to measure a step without communication.

Shapes are right; values are arbitrary, but finite and of ordinary size (matrix units draw less
power and clock higher on zeros or NaN). A rank takes its own part for those of the others. The
local copies for that are counted, because "without communication" still contains their time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _create_work_from_future  # type: ignore[attr-defined]

from megascale_trainer.parallel.groups import Edges, Group, Groups

_BACKEND = "silent"
_MESSAGE_STD = 0.02  # of what "arrives" from another pipeline stage


class SilentProcessGroup(dist.ProcessGroup):
    """A process group without peers; ``copied_bytes`` were read and written in their place."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.copied_bytes = 0
        self._messages: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """As if the other ranks had contributed zeros."""
        return _done()

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist.Work:
        """Every rank's part is this rank's; in place, the other parts stay as they were."""
        if not _shares_memory(output, source):
            output.view(-1, *source.shape).copy_(
                source.expand(output.numel() // source.numel(), *source.shape)
            )
            self.copied_bytes += _bytes(source) + _bytes(output)
        return _done()

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist.Work:
        """The sum is the first part of this rank's ``source``."""
        if not _shares_memory(output, source):
            output.copy_(source.view(-1, *output.shape)[0])
            self.copied_bytes += 2 * _bytes(output)
        return _done()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        """Nothing leaves."""
        return _done()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """A message of small random numbers, always the same."""
        for tensor in tensors:
            key = (tensor.shape, tensor.dtype)
            if key not in self._messages:
                self._messages[key] = torch.empty_like(tensor).normal_(std=_MESSAGE_STD)
            tensor.copy_(self._messages[key])
            self.copied_bytes += 2 * _bytes(tensor)
        return _done()

    def getBackendName(self) -> str:
        """What torch calls it."""
        return _BACKEND

    # torch 2.11 calls the same operations by older names.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


def create_silent_group(world_size: int) -> SilentProcessGroup:
    """A silent group of all ranks, to stand in for any group of them; collective.

    torch.distributed must be initialised;
    :func:`megascale_trainer.process.bootstrap.destroy_groups` destroys this group too.
    """
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
    group = dist.new_group(
        list(range(world_size)), backend=_BACKEND, use_local_synchronization=True
    )
    assert isinstance(group, SilentProcessGroup)
    return group


@contextlib.contextmanager
def silence(
    groups: Groups, silent: SilentProcessGroup | None, dimensions: Collection[str]
) -> Iterator[None]:
    """Leave out the communication of ``dimensions`` (tp, pp, dp, or all) while the body runs.

    It changes the inside of :class:`Group`, so that the trainer needs no code for benchmarks.
    """
    wanted = [group for name, group in _named(groups) if "all" in dimensions or name in dimensions]
    # A group of one rank has no handle, and nothing to leave out.
    handles = [(group, group._handle) for group in wanted if group._handle is not None]
    for group, _ in handles:
        group._handle = silent
    try:
        yield
    finally:
        for group, handle in handles:
            group._handle = handle


def all_groups(groups: Groups) -> list[Group]:
    """Every group of a rank; a rank without peers has one group several times."""
    return [group for _, group in _named(groups)]


def _named(groups: Groups) -> Iterator[tuple[str, Group]]:
    """Every group with its dimension, which is how the name of its field starts."""
    for field in fields(groups):
        value = getattr(groups, field.name)
        if isinstance(value, Edges):
            yield from (("pp", edge) for edge in vars(value).values() if isinstance(edge, Group))
        elif isinstance(value, Group):
            yield field.name.partition("_")[0], value


def _create(_store: Store, rank: int, size: int, _timeout: timedelta) -> SilentProcessGroup:
    return SilentProcessGroup(rank, size)


def _done() -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    work: dist.Work = _create_work_from_future(future)
    return work


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
