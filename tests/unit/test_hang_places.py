"""Hangs of a job of 16 ranks (TP2 PP4 DP2), from the real schedule: the culprit is named.

The trainer's step loop, pipeline schedule, groups and status pages run in one process
(tests/harness/held_job.py). One rank is held at a place; when no other can go on, the driver's own
analysis gets what the heartbeats would have brought it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.harness.held_job import STILL_S, HeldJob, Point, held_job

from megascale_driver.analysis.progress import RankView, culprits
from megascale_driver.core import machine
from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Cluster,
    Identity,
    Liveness,
    Node,
    Report,
)
from megascale_driver.core.values.events import PagesRead, RankPages
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy

NOW_S = 10_000.0
RANKS_PER_NODE = 2
Match = Callable[[Point], bool]


def at(what: str, inside: str | None = None) -> Match:
    """Points of this name, in this part of the step if it is given."""
    return lambda point: point.what == what and inside in (None, point.inside)


# Where a rank hangs with its host: what it was about to do. In the order of a step, since the job
# goes on from each; one rank of each stage, replica and tensor-parallel place.
HOST_PLACES = {
    "host loop, between steps": (5, at("between steps")),
    "loader": (0, at("data")),
    "slot of a snapshot": (10, at("slot of a snapshot")),
    "forward, a tp collective not entered": (1, at("enter tp", "forward")),
    "forward, behind a tp collective": (6, at("completed tp", "forward")),
    "receive of an activation without its send": (2, at("send_activation")),
    "receive not posted, so its send does not end": (3, at("post_gradient")),
    "backward, a tp collective not entered": (15, at("enter tp", "backward")),
    "backward, behind a tp collective": (8, at("completed tp", "backward")),
    "receive of a gradient without its send": (13, at("send_gradient")),
    "gradients, reduce-scatter not entered": (10, at("enter dp")),
    "copy of a snapshot": (11, at("copy of a snapshot")),
    "world all-reduce of the norm not entered": (7, at("enter world", "")),
    "optimizer": (12, at("update")),
    "parameters, all-gather not entered": (4, at("enter dp", "gather_parameters")),
    "loader of the evaluation": (3, at("held_out data")),
    "evaluation, a tp collective not entered": (14, at("enter tp", "forward")),
    "evaluation, its all-reduce not entered": (0, at("enter world", "")),
    "snapshot": (9, at("snapshot")),
    "garbage collection": (14, at("garbage collection")),
}


@pytest.fixture(
    scope="module",
    params=["plain", pytest.param("overlapped", marks=pytest.mark.slow)],
)
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeldJob]:
    with held_job(tmp_path_factory.mktemp("held"), hidden=request.param == "overlapped") as job:
        for _ in range(2):  # all train, whichever test is the first
            with held(job, 0, at("between steps")):
                pass
        yield job


def node_of(rank: int) -> str:
    return f"n{rank // RANKS_PER_NODE}"


def verdict(job: HeldJob) -> tuple[set[int], str, set[str]]:
    """Ranks that the driver's verdict names, its message, and the node that it blames, if any."""
    statuses = job.statuses()
    nodes = sorted({node_of(rank) for rank in statuses})
    slots = tuple(
        NodeSlot(node, ranks, ranks, "i")
        for node in nodes
        for ranks in [tuple(rank for rank in statuses if node_of(rank) == node)]
    )
    running = Job(
        "a",
        job.config,
        phase=JobPhase.RUNNING,
        timer_s=NOW_S - 3 * STILL_S,
        step_times=(1.0,) * 100,
        current=Attempt(number=1, slots=slots),
    )
    report = Report(job="a", attempt=1, phase=AttemptPhase.RUNNING)
    alive = Node("", Identity("i"), liveness=Liveness.ALIVE, connected=True, report=report)
    state = Cluster(nodes={node: replace(alive, name=node) for node in nodes}, jobs={"a": running})
    pages = tuple(
        RankPages(slot.node, "i", NOW_S - 1.0, tuple(statuses[rank] for rank in slot.ranks))
        for slot in slots
    )
    after, outcome = machine.step(state, PagesRead(NOW_S, "a", 1, pages), Policy())
    (line,) = [line for line in outcome.audit if line.reason == "HANG_SUSPECTED"]
    named = {
        int(item.source.rpartition("/")[2])
        for item in line.evidence
        if item.digest.startswith("suspect")
    }
    (fault,) = after.jobs["a"].current.faults
    return named, line.message, {fault.node} - {""}


def named_by_pages(job: HeldJob) -> set[int]:
    statuses = job.statuses()
    views = [RankView(r, node_of(r), 0.0, status) for r, status in statuses.items()]
    return {view.rank for view in culprits(views, job.config.layout).ranks}


@contextmanager
def held(job: HeldJob, rank: int, match: Match) -> Iterator[Point]:
    """While the body runs, the rank is held where it comes to ``match`` first."""
    job.hold(rank, match)
    try:
        yield job.until_held()
    finally:
        job.hold(-1, lambda point: False)
        job.go_on()


@pytest.mark.parametrize("place", HOST_PLACES)
def test_a_rank_whose_host_hangs_is_named_alone(job: HeldJob, place: str) -> None:
    rank, match = HOST_PLACES[place]
    with held(job, rank, match):
        named, message, blamed = verdict(job)
        assert named == {rank}, message
        assert blamed == {node_of(rank)}
        assert f"rank {rank} on node {node_of(rank)}" in message


@pytest.mark.parametrize(
    ("source", "target", "payload"), [(5, 9, "an activation"), (14, 10, "a gradient")]
)
def test_of_a_transfer_that_never_arrives_both_ends_are_named_and_no_node_is_blamed(
    job: HeldJob, source: int, target: int, payload: str
) -> None:
    job.ranks.lost = lambda sender, receiver: (sender, receiver) == (source, target)
    job.ranks.until_still()
    named, message, blamed = verdict(job)
    assert named == {source, target} and not blamed, message
    assert message.endswith(
        f"rank {source} has sent {payload} that rank {target} waits for: the link between "
        f"{node_of(source)} and {node_of(target)} is the suspect"
    )
    job.ranks.deliver()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_collective_that_never_ends_for_one_rank_is_named_by_it(job: HeldJob, kind: str) -> None:
    job.ranks.stuck = {(6, kind)}
    job.ranks.until_still()
    named, message, _ = verdict(job)
    layout = job.config.layout
    first = 6 // layout.stage_size * layout.stage_size
    assert 6 in named and named <= set(range(first, first + layout.stage_size)), message
    job.ranks.stuck = set()


def test_a_collective_that_all_have_entered_and_none_ends_names_all_of_them(job: HeldJob) -> None:
    everyone = range(job.config.layout.world_size)
    job.ranks.stuck = {(rank, "world all_reduce") for rank in everyone}
    job.ranks.until_still()
    named, message, blamed = verdict(job)
    assert named == set(everyone) and not blamed, message
    job.ranks.stuck = set()


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(16))
def test_wherever_in_two_steps_a_rank_hangs_it_is_named_alone(job: HeldJob, rank: int) -> None:
    points = 0
    with held(job, rank, lambda point: True):
        last = job.step[rank] + 2
        while job.step[rank] <= last:
            points += 1
            assert named_by_pages(job) == {rank}, (job.held, job.step[rank])
            job.go_on()
            job.until_held()
    assert points > 250
