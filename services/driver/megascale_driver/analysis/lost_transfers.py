"""Transfers between pipeline stages that were sent and have not arrived, in a job that hangs.

A rank that receives is inside an operation that its peer has entered too: it waits for no rank, so
it counts as one that holds the others up, and so may its peer. Neither need be broken: what lies
between them is. Both ends are named then, as a set, so that no node alone is blamed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megascale_driver.analysis.progress import OperationCount, RankRow, RankView, suspects
from megascale_job.layout import RankLayout

# As the trainer names pipeline edges. Activations go from the first stage to the second, gradients
# back.
_EDGE = re.compile(r"pp(\d+)-(\d+)\.(activation|gradient)")


class LostTransfer(NamedTuple):
    """The newest transfer of an edge: ``source`` has sent it, ``target`` waits for it."""

    payload: str
    source: RankView
    target: RankView

    def __str__(self) -> str:
        between = "the transport between its ranks"
        if self.source.node != self.target.node:
            between = f"the link between {self.source.node} and {self.target.node}"
        return (
            f"rank {self.source.rank} has sent {_ARTICLES[self.payload]} {self.payload} that rank "
            f"{self.target.rank} waits for: {between} is the suspect"
        )


_ARTICLES = {"activation": "an", "gradient": "a"}


class Culprits(NamedTuple):
    """The ranks that hold the others up, the most likely first, and what was lost among them."""

    ranks: tuple[RankView, ...]
    lost: tuple[LostTransfer, ...]


def culprits(rows: Sequence[RankRow], layout: RankLayout) -> Culprits:
    """The suspects of :func:`megascale_driver.analysis.progress.suspects`, and what was lost.

    Of a transfer that was sent and has not arrived, both ends are among them.
    """
    found = suspects(rows, layout)
    if not any(_edges(view) for view in found):
        return Culprits(found, ())
    by_rank = {row[0]: row for row in rows}
    lost = dict.fromkeys(
        transfer
        for view in found
        for count in _edges(view)
        if (transfer := _lost(view, count, by_rank, layout)) is not None
    )
    ends = [end for transfer in lost for end in (transfer.source, transfer.target)]
    return Culprits(tuple(dict.fromkeys((*found, *ends))), tuple(lost))


def _edges(view: RankView) -> list[OperationCount]:
    """Operations between stages that the rank is inside of."""
    return [
        count
        for count in (view.status.operations if view.status is not None else ())
        if count.completed < count.entered and _EDGE.fullmatch(count.group)
    ]


def _lost(
    view: RankView, count: OperationCount, by_rank: dict[int, RankRow], layout: RankLayout
) -> LostTransfer | None:
    """The transfer of an edge, if its receiver waits for one that its sender has entered."""
    edge = _EDGE.fullmatch(count.group)
    assert edge is not None
    low, high = int(edge[1]), int(edge[2])
    line = layout.group_of(view.rank, ["pp"])
    if max(low, high) >= len(line):
        return None
    first, second = (
        RankView._make(row) if (row := by_rank.get(line[stage])) is not None else None
        for stage in (low, high)
    )
    source, target = (first, second) if edge[3] == "activation" else (second, first)
    if source is None or target is None:
        return None
    sent, received = _count(source, count.group), _count(target, count.group)
    if sent is None or received is None or not received.completed < received.entered:
        return None
    return LostTransfer(edge[3], source, target) if received.entered <= sent.entered else None


def _count(view: RankView, group: str) -> OperationCount | None:
    operations = view.status.operations if view.status is not None else ()
    return next((count for count in operations if count.group == group), None)
