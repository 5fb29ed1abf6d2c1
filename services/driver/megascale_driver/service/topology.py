"""The logical topology of a job for clients: place, progress and waits of each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megascale.v1 import driver_pb2
from megascale_common.service.errors import invalid
from megascale_common.service.status import answers
from megascale_driver.analysis.progress import RankView, Waits, culprits, waits
from megascale_driver.core.signs import hang
from megascale_driver.core.values.job import Job
from megascale_driver.service.driver import Calls, Context
from megascale_job.layout import AXES, GroupName, RankLayout

# Data that the ranks of a group exchange, by its name.
_DIRECTIONS: dict[GroupName, str] = {
    "tp": "both ways: activations are gathered before a layer's products and reduced behind them",
    "cp": "both ways: parts of the sequence for all heads go, some heads of all of it come",
    "gradient": "both ways: gradients are reduced, parameters gathered",
    "dp": "both ways: gradients are reduced, parameters gathered",
    "pp": "activations to the next rank, gradients to the one before",
    "ep": "both ways: tokens go to the ranks of their experts, and the results back",
    "expert_gradient": "both ways: gradients of the experts are reduced, parameters gathered",
}


class TopologyCalls(Calls):
    """Answers from the status pages in the newest heartbeats."""

    @answers
    async def GetTopology(
        self, request: driver_pb2.GetTopologyRequest, context: Context
    ) -> driver_pb2.GetTopologyResponse:
        """Place, progress and waits of each rank, and the ranks that hold the others up.

        A job without an attempt in progress has no ranks.
        """
        job = self._driver.job(request.job)
        layout = job.config.layout
        answer = driver_pb2.GetTopologyResponse(attempt=job.attempt, rank_count=layout.world_size)
        for axis in AXES:
            answer.axes[axis] = getattr(layout, axis)
        shown = set(range(layout.world_size))
        if request.HasField("rank"):
            if not 0 <= request.rank < layout.world_size:
                remedy = f"give 0 to {layout.world_size - 1}"
                raise invalid("rank", f"it is {request.rank}", remedy)
            shown = _add_groups(answer, layout, request.rank)
        if not job.active:  # no rank runs
            return answer
        views = await self._rank_views(job)
        found = waits([view for view in views.values() if view.status is not None], layout)
        held_up_by = self._standstill(answer, job, views)
        for rank in sorted(shown):
            _add_rank(answer, layout, rank, views.get(rank), found.get(rank), held_up_by)
        return answer

    async def _rank_views(self, job: Job) -> dict[int, RankView]:
        """Each rank's status in the newest heartbeat of its node, by rank."""
        pages = {found.node: found for found in await self._engine.heartbeats.status_pages(job)}
        views: dict[int, RankView] = {}
        for slot in job.slots:
            found = pages.get(slot.node)
            known = {} if found is None else {status.rank: status for status in found.statuses}
            for rank in slot.ranks:
                status = known.get(rank)
                written_at_s = -math.inf
                if found is not None and status is not None:
                    written_at_s = found.at_s - status.age_s
                views[rank] = RankView(rank, slot.node, written_at_s, status)
        return views

    def _standstill(
        self,
        answer: driver_pb2.GetTopologyResponse,
        job: Job,
        views: Mapping[int, RankView],
    ) -> frozenset[int]:
        """If no rank advances: the ranks that hold the others up. Adds a sentence to the answer."""
        now_s = self._engine.clock.now_s()
        readable = any(view.status is not None for view in views.values())
        if not readable or not hang.is_stalled(job, now_s, self._engine.policy):
            return frozenset()
        guilty, lost = culprits(tuple(views.values()), job.config.layout)
        answer.still_s = hang.still_s(job, now_s)
        more = len(guilty) - 1
        rest = f"{more} more hold the others up" if more else "the others wait for it"
        what = str(lost[0]) if lost else f"{guilty[0]}, and {rest}"
        answer.standstill = f"no rank has completed a step for {answer.still_s:.0f} s: {what}"
        return frozenset(view.rank for view in guilty)


def _add_groups(answer: driver_pb2.GetTopologyResponse, layout: RankLayout, rank: int) -> set[int]:
    """Add the rank's groups that have other members; returns all ranks of these groups."""
    members = {rank}
    # Without cp the gradients are reduced over dp alone, and with ep 1 those of experts with them.
    names = [
        name
        for name in _DIRECTIONS
        if name in AXES or (layout.cp > 1 if name == "gradient" else layout.ep > 1)
    ]
    for name in names:
        group = layout.members(rank, name)
        if len(group) > 1:
            answer.groups.add(name=name, ranks=group, direction=_DIRECTIONS[name])
            members.update(group)
    return members


def _add_rank(
    answer: driver_pb2.GetTopologyResponse,
    layout: RankLayout,
    rank: int,
    view: RankView | None,
    found: Waits | None,
    held_up_by: frozenset[int],
) -> None:
    place = layout.coordinates(rank)
    message = answer.ranks.add(rank=rank, node="" if view is None else view.node)
    message.tp = place.tp
    message.cp = place.cp
    message.dp = place.dp
    message.pp = place.pp
    message.holds_up = rank in held_up_by
    if view is None or view.status is None or found is None:
        return
    status = view.status
    message.phase = status.phase.lower()
    message.step = status.step
    message.silent_s = status.age_s
    for count in status.operations:
        message.operations.add(group=count.group, entered=count.entered, completed=count.completed)
    message.inside.extend(found.inside)
    message.waits_for.extend(found.waits_for)
    message.waits_for_more = found.more
