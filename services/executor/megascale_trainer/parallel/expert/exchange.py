"""Rows to the ranks of their experts and back, plain: an all-to-all over the ep group.

Rows arrive ordered by expert, then by the rank that sent them, then by position. So every sum over
a token's rows, and every product of a row, has the same order for any ep.

The sizes of the messages depend on the routing, so the host waits for the counts. A group of one
rank exchanges nothing and never waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_trainer.parallel.groups import Group


@dataclass(frozen=True)
class RowExchange:
    """The way of one micro-batch's rows, ordered by expert as in a :class:`RowPlan`, and back.

    ``groups``: the rows of this rank's experts after :meth:`there`.
    """

    group: Group
    groups: ExpertGroups
    sent: list[int]  # rows for each rank
    received: list[int]
    order: torch.Tensor | None  # of the received rows; None: they stay as they are

    def by_rank(self) -> ExpertGroups:
        """The rows of each expert and each rank that sent them, expert by expert."""
        assert self.groups.parts is not None, "rows of one rank alone"
        return expert_groups(self.groups.parts, sum(self.received))

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [sent, ...] of this rank's tokens to [received, ...] of this rank's experts."""
        if self.order is None:
            return rows
        arrived = rows.new_empty((sum(self.received), *rows.shape[1:]))
        self._move(arrived, rows, self.received, self.sent)
        return arrived[self.order]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`there`."""
        if self.order is None:
            return rows
        ordered = torch.empty_like(rows)
        ordered[self.order] = rows
        arrived = rows.new_empty((sum(self.sent), *rows.shape[1:]))
        self._move(arrived, ordered, self.sent, self.received)
        return arrived

    def _move(
        self, arrived: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        with self.group.timed("all_to_all"):
            # As bytes: a communicator need not know the dtype, and FP8 travels too.
            size = math.prod(rows.shape[1:]) * rows.element_size()
            self.group.all_to_all(
                arrived.view(-1).view(torch.uint8),
                rows.contiguous().view(-1).view(torch.uint8),
                [count * size for count in received],
                [count * size for count in sent],
            )


def row_exchange(plan: RowPlan, group: Group) -> RowExchange:
    """The exchange of the rows of ``plan``; all ranks of ``group`` call this together.

    Rank i of the group has the i-th part of the experts.
    """
    if group.size == 1:
        return RowExchange(group, plan.groups, [], [], None)
    counts = plan.groups.offsets.diff().view(group.size, -1)  # [ranks, experts of each]
    arriving = torch.empty_like(counts)
    group.all_to_all(arriving.view(-1), counts.contiguous().view(-1), _even(counts), _even(counts))
    # Received rows are ordered by rank, then expert: sort them by expert, and stay stable.
    experts = torch.arange(counts.shape[1], device=counts.device)
    received = arriving.sum(1).tolist()
    key = experts.repeat(group.size).repeat_interleave(
        arriving.flatten(), output_size=sum(received)
    )
    by_expert = arriving.t()  # [experts, ranks]
    parts = _offsets(by_expert.flatten())
    groups = expert_groups(_offsets(by_expert.sum(1)), sum(received), parts)
    order = torch.sort(key, stable=True).indices
    return RowExchange(group, groups, counts.sum(1).tolist(), received, order)


def _even(counts: torch.Tensor) -> list[int]:
    return [counts.shape[1]] * counts.shape[0]


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: where each of n runs begins, and the end of the last."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat((torch.zeros_like(ends[:1]), ends))
