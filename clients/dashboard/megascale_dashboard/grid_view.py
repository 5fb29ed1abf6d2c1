"""The ranks of a job as a block of tp x dp x pp, each with its node and the node's state."""

from __future__ import annotations

from collections.abc import Iterable

from megascale.v1 import driver_pb2
from megascale_client import Job, JobPhase, Node
from megascale_dashboard import job_view, node_view
from megascale_dashboard.shown import Page

AXES = ("tp", "cp", "dp", "pp")  # innermost first, as the rank layout has them


def grid(
    job: Job, nodes: Iterable[Node], topology: driver_pb2.GetTopologyResponse | None = None
) -> Page:
    """The block: sizes of the axes, and for each rank its node and what is known of it.

    ``node`` has indices into ``names``; -1 where no node reports the rank. ``state`` of a rank is
    "lost" (its node is dead), "silent" (suspect or unknown), "culprit" (it holds up a job that
    stands still), "training", "waiting" (the job is in another phase than RUNNING), or "absent".
    ``strides`` has, for each axis longer than 1, the distance between the numbers of two
    neighbours: with it a page finds a rank's three lines. ``standstill`` is a sentence on a job
    that stands still, ``waits`` what ranks are inside of and for whom they wait.
    """
    sizes = job_view.layout(job)
    world = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    mine = sorted(
        (node for node in nodes if node.job == job.spec.name and node.ranks),
        key=lambda node: node_view.in_order(node.name),
    )
    node_of, states = [-1] * world, ["absent"] * world
    for index, node in enumerate(mine):
        for rank in node.ranks:
            if rank < world:
                node_of[rank], states[rank] = index, _state(node, job)
    places = [] if topology is None else list(topology.ranks)
    for place in places:
        if place.holds_up and place.rank < world:
            states[place.rank] = "culprit"
    return {
        "standstill": "" if topology is None else topology.standstill,
        "waits": {str(place.rank): _waits(place) for place in places if place.inside},
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "phase_reason": job.phase_reason,
        "axes": sizes,
        "world": world,
        "names": [node.name for node in mine],
        "node": node_of,
        "state": states,
        "strides": {axis: stride for axis, stride in _strides(sizes).items() if sizes[axis] > 1},
    }


def _waits(place: driver_pb2.RankPlace) -> str:
    """What a rank is inside of, and for whom it waits, in words."""
    inside = f"inside {', '.join(place.inside)}"
    if not place.waits_for:
        return inside
    more = f" and {place.waits_for_more} more" if place.waits_for_more else ""
    return f"{inside}, waits for {', '.join(map(str, place.waits_for))}{more}"


def _strides(sizes: dict[str, int]) -> dict[str, int]:
    """The distance between the numbers of two neighbours along each axis."""
    strides, stride = {}, 1
    for axis in AXES:
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _state(node: Node, job: Job) -> str:
    alive = "training" if job.phase == JobPhase.RUNNING else "waiting"
    gone = {"dead": "lost", "suspect": "silent", "unknown": "silent"}
    return gone.get(node_view.state(node), alive)
