"""The rank layout: coordinates of each global rank in the parallel grid, and groups of ranks. Pure.

Axes are ordered innermost first: ``tp`` (tensor), ``cp`` (context), ``dp`` (data), ``pp``
(pipeline). So neighbouring ranks differ in ``tp`` first, which keeps a tensor-parallel group on one
node (MegaScale section 3.4), and the ranks of one pipeline stage are contiguous. Expert parallelism
``ep`` is no axis of its own: it is folded over the ranks of a stage, ``ep`` consecutive ones at a
time (parallel folding, Liu et al., arXiv 2504.14960).

Groups have names: :meth:`RankLayout.members` has the ranks of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["tp", "cp", "dp", "pp"]
AXES: tuple[Axis, ...] = get_args(Axis)
# ``gradient``: the ranks of a stage that hold the same parameters, and sum their gradients: cp and
# dp. ``ep``: the ranks that share one copy of a stage's experts. ``expert_gradient``: those that
# hold the same experts, and sum their gradients.
GroupName = Literal["tp", "cp", "dp", "pp", "gradient", "ep", "expert_gradient", "world"]
GROUP_NAMES: tuple[GroupName, ...] = get_args(GroupName)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of one rank in the grid; each value counts from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """A grid of ``tp * cp * dp * pp`` ranks, with ``ep`` folded over those of a stage.

    Raises:
        ValueError: an axis is smaller than 1, or ``ep`` does not divide the ranks of a stage.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.ep < 1 or self.stage_size % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide tp * cp * dp = {self.stage_size}, the ranks of a "
                "pipeline stage"
            )
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(
                    f"{axis}={self.size(axis)}: the size of a parallel axis is at least 1"
                )

    def size(self, axis: Axis) -> int:
        """Number of ranks along ``axis``."""
        return int(getattr(self, axis))

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole grid."""
        return self.stage_size * self.pp

    def span(self, name: GroupName) -> tuple[int, int]:
        """(stride, extent) of the groups of a name.

        A group has the ranks that agree in ``rank % stride`` and in ``rank // extent``.
        """
        stage = self.stage_size
        spans: dict[GroupName, tuple[int, int]] = {
            "tp": (1, self.tp),
            "cp": (self.tp, self.tp * self.cp),
            "dp": (self.tp * self.cp, stage),
            "pp": (stage, self.world_size),
            "gradient": (self.tp, stage),
            "ep": (1, self.ep),
            "expert_gradient": (self.ep, stage),
            "world": (1, self.world_size),
        }
        return spans[name]

    def members(self, rank: int, name: GroupName) -> range:
        """The ranks of the group of this name with ``rank`` in it, ascending."""
        stride, extent = self.span(name)
        first = rank // extent * extent + rank % stride
        return range(first, first + extent, stride)

    def index_in(self, at: Coordinates, name: GroupName) -> int:
        """The number of the rank at ``at`` in its group of this name."""
        stride, extent = self.span(name)
        return self.rank(at) % extent // stride

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global ``rank``.

        Raises:
            ValueError: ``rank`` is outside the grid.
        """
        if not 0 <= rank < self.world_size:
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            raise ValueError(f"rank {rank} is outside the layout of {ranks}")
        values: dict[str, int] = {}
        rest = rank
        for axis in AXES:
            rest, values[axis] = divmod(rest, self.size(axis))
        return Coordinates(**values)

    def rank(self, at: Coordinates) -> int:
        """Global rank at the given coordinates (the inverse of :meth:`coordinates`)."""
        number, stride = 0, 1
        for axis in AXES:
            number += int(getattr(at, axis)) * stride
            stride *= self.size(axis)
        return number


def readers_of(ranks: Sequence[int], layout: RankLayout) -> dict[int, tuple[int, int]]:
    """(reader, readers) per rank: its index among the node's ranks with its dp coordinate."""
    by_dp: dict[int, list[int]] = {}
    for rank in ranks:
        by_dp.setdefault(layout.coordinates(rank).dp, []).append(rank)
    return {
        rank: (index, len(group)) for group in by_dp.values() for index, rank in enumerate(group)
    }
