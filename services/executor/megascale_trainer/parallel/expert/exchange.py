"""Rows to the ranks of their experts and back, in two ways.

``rows``: an all-to-all over the ep group sends each row to the rank of its expert. Rows arrive
ordered by expert, then by the rank that sent them, then by position, and come back to be summed in
the order of a token's choices: so every sum and every product of a row has the same order for any
ep. The sizes of the messages depend on the routing, so the host waits for the counts.

``tokens``: all ranks of the group gather all tokens; each spreads the rows of its own experts and
sums them per token, and a reduce-scatter adds the ranks' sums (MegaScale-MoE, arXiv 2505.11432,
section 3). Shapes are static and the host waits for nothing. It moves each token once to every
rank, which is less than its rows where top_k is above ep. Memory of rows is that of all tokens of
the group, because all of them may choose this rank's experts. Sums over ranks have another order
than with one rank.

A group of one rank exchanges nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_trainer.parallel.groups import Group


class Exchange(Protocol):
    """The way of one micro-batch's rows to their experts and back.

    ``plan`` orders the rows that this rank spreads and joins, ``groups`` those of its experts.
    """

    @property
    def plan(self) -> RowPlan: ...

    @property
    def groups(self) -> ExpertGroups: ...

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens [T, ...] to those of ``plan``."""
        ...

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Sums for the tokens of ``plan``, added over the ranks: those of this rank's tokens."""
        ...

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of ``plan`` to the rows of this rank's experts."""
        ...

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`there`."""
        ...


@dataclass(frozen=True)
class TokenExchange:
    """All ranks have all tokens of ``group``: see :class:`Exchange`."""

    group: Group
    plan: RowPlan

    @property
    def groups(self) -> ExpertGroups:
        return self.plan.groups

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty((x.shape[0] * self.group.size, *x.shape[1:]))
        self.group.all_gather(whole, x.contiguous())
        return whole

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        part = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        self.group.reduce_scatter(part, x.contiguous())
        return part

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def token_exchange(chosen: torch.Tensor, experts: int, group: Group) -> TokenExchange:
    """The exchange of all tokens of ``group``; all its ranks call this together.

    Args:
        chosen: int32 [T, top_k] of this rank; T is the same on all ranks.
        experts: of each rank.
    """
    whole = chosen.new_empty((chosen.shape[0] * group.size, chosen.shape[1]))
    group.all_gather(whole, chosen.contiguous())
    return TokenExchange(group, row_plan(whole, experts, group.index * experts))


@dataclass(frozen=True)
class RowExchange:
    """Each row goes to the rank of its expert: see :class:`Exchange`."""

    group: Group
    plan: RowPlan
    groups: ExpertGroups
    sent: list[int]  # rows for each rank
    received: list[int]
    order: torch.Tensor | None  # of the received rows; None: they stay as they are

    def by_rank(self) -> ExpertGroups:
        """The rows of each expert and each rank that sent them, expert by expert."""
        assert self.groups.parts is not None, "rows of one rank alone"
        return expert_groups(self.groups.parts, sum(self.received))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is None:
            return rows
        arrived = rows.new_empty((sum(self.received), *rows.shape[1:]))
        self._move(arrived, rows, self.received, self.sent)
        return arrived[self.order]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
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
        return RowExchange(group, plan, plan.groups, [], [], None)
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
    return RowExchange(group, plan, groups, counts.sum(1).tolist(), received, order)


def _even(counts: torch.Tensor) -> list[int]:
    return [counts.shape[1]] * counts.shape[0]


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: where each of n runs begins, and the end of the last."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat((torch.zeros_like(ends[:1]), ends))
