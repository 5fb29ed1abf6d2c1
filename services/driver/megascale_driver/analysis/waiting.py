"""Who waits for whom: of each rank the operations that it is inside of and the ranks it waits for.

A rank inside operation n of a communication group waits for the members that have entered fewer.
The status pages say how many each has entered (MegaScale, section 5.2). Which ranks hold all
others up is :func:`megascale_driver.analysis.progress.suspects`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from megascale_driver.analysis.progress import NamedGroups, RankView
from megascale_job.layout import RankLayout

MAX_LISTED = 8  # ranks that one rank waits for; the others are counted


@dataclass(frozen=True, slots=True)
class Waits:
    """What one rank is inside of, and for whom it waits: ``waits_for`` and so many ``more``."""

    inside: tuple[str, ...]
    waits_for: tuple[int, ...]
    more: int


def waits(views: Sequence[RankView], layout: RankLayout) -> dict[int, Waits]:
    """By rank, of those with a readable page. Linear in ranks but for sorting each group."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    names: dict[str, NamedGroups] = {}
    for view in views:
        for count in view.status.operations if view.status is not None else ():
            named = names.get(count.group)
            if named is None:
                named = names[count.group] = NamedGroups(count.group, layout)
            members = groups.setdefault((count.group, named.key(view.rank)), [])
            members.append((count.entered, view.rank))
    for members in groups.values():
        members.sort()
    return {view.rank: _of(view, groups, names) for view in views if view.status is not None}


def _of(
    view: RankView,
    groups: dict[tuple[str, int], list[tuple[int, int]]],
    names: dict[str, NamedGroups],
) -> Waits:
    assert view.status is not None
    inside, late, more = [], dict[int, None](), 0
    for count in view.status.operations:
        if count.completed >= count.entered:
            continue
        inside.append(count.group)
        members = groups[count.group, names[count.group].key(view.rank)]
        behind = bisect_left(members, (count.entered, -1))
        for _, rank in members[: min(behind, MAX_LISTED)]:
            late[rank] = None
        more += max(behind - MAX_LISTED, 0)
    listed = tuple(late)[:MAX_LISTED]
    return Waits(tuple(inside), listed, more + len(late) - len(listed))
