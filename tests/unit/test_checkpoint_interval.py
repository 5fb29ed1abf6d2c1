"""The interval of Young and Daly, and what `checkpoint.interval: auto` decides from it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.harness.training import tiny_job

from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values import accounting
from megascale_driver.core.values.attempt import FailureCount
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.goodput import Ledger
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.config import CheckpointConfig, JobConfig
from megascale_job.loading import from_accepted, from_mapping
from megascale_job.problems import JobError
from megascale_job.sizes import failures
from megascale_job.sizes.failures import (
    best_interval_s,
    device_hours_per_failure,
    interval_steps,
)
from megascale_trainer.save.auto_interval import (
    FIRST_STEPS,
    LEAST_STEPS,
    MOST_GROWTH,
    WARM_UP_STEPS,
    AutoCadence,
    SaveCost,
    wished_steps,
)
from megascale_trainer.save.snapshot_schedule import STORE_BUSY, Votes


def wall_s(work_s: float, interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected time of a run without restarts' own time: Daly 2006, equation (20)."""
    pieces = work_s / interval_s
    return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1) * pieces


def lost_share(cost_s: float, interval_s: float, mtbf_s: float) -> float:
    """Share of the run's time that saves and repeated work take together, to the first order."""
    return cost_s / interval_s + interval_s / (2 * mtbf_s)


@given(st.floats(0.05, 600), st.floats(3600, 3.6e6))
def test_no_other_interval_makes_the_run_much_shorter(cost_s: float, mtbf_s: float) -> None:
    best_s = best_interval_s(cost_s, mtbf_s)
    ours_s = wall_s(1e6, best_s, cost_s, mtbf_s)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert ours_s <= wall_s(1e6, factor * best_s, cost_s, mtbf_s) * 1.0001


def test_the_figures_of_the_formula() -> None:
    # 12,288 GPUs, one failure in 50,000 device hours each: one every 4.07 hours.
    mtbf_s = failures.mtbf_s(50_000.0, 12_288)
    assert mtbf_s == pytest.approx(14_648.4, rel=1e-4)
    assert best_interval_s(1.0, mtbf_s) == pytest.approx(math.sqrt(2 * mtbf_s), rel=0.01)
    assert lost_share(1.0, best_interval_s(1.0, mtbf_s), mtbf_s) == pytest.approx(0.0117, rel=0.01)
    assert best_interval_s(0.0, mtbf_s) == 0.0
    assert best_interval_s(3 * mtbf_s, mtbf_s) == mtbf_s
    for cost_s, failure_s in ((-1.0, 10.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="must be 0 or more"):
            best_interval_s(cost_s, failure_s)


def test_an_interval_is_no_shorter_than_twice_what_the_storage_takes() -> None:
    given_ = {"step_s": 0.5, "mtbf_s": 3600.0, "least": 4, "most": 1000}
    assert interval_steps(cost_s=0.0, persist_s=0.0, **given_) == 4
    assert interval_steps(cost_s=0.0, persist_s=30.0, **given_) == 120
    assert interval_steps(cost_s=2.0, persist_s=30.0, **given_) == 238
    assert interval_steps(cost_s=1e4, persist_s=30.0, **given_) == 1000


def test_the_fleet_s_own_count_corrects_the_published_figure() -> None:
    assert device_hours_per_failure(50_000, 0, 0.0) == 50_000
    assert device_hours_per_failure(50_000, 0, 150_000) == 200_000
    assert device_hours_per_failure(50_000, 99, 950_000) == 10_000


def job(name: str = "a", **checkpoint: object) -> Job:
    values = {"uri": "/c", "interval": "auto", **checkpoint}
    return Job(name, config=from_accepted(tiny_job(checkpoint=values)))


def test_faults_and_trained_hours_of_all_jobs_are_counted() -> None:
    hour_us = 3_600_000_000
    ledger = Ledger(productive_us=2 * hour_us, lost_us=hour_us, waiting_us=9 * hour_us, faults=3)
    jobs = [replace(job(name), goodput=ledger) for name in ("a", "b")]
    devices = jobs[0].config.layout.world_size
    assert accounting.failure_count(jobs) == FailureCount(6, 2 * 3.0 * devices)


def test_a_job_s_explanation_has_interval_cost_and_rate() -> None:
    running = replace(job(device_mtbf_hours=100.0), phase=JobPhase.RUNNING)

    def text(**record: float) -> str:
        state = Cluster(jobs={"a": replace(running, last_record=record)})
        return explain(state, "a", 0.0, Policy())

    assert "it decides how often it saves once it has taken steps" in text()
    assert "saves every 10 steps until it has measured" in text(checkpoint_interval_steps=10)
    devices = running.config.layout.world_size
    found = text(checkpoint_interval_steps=37, checkpoint_cost_s=0.25)
    assert "it saves every 37 steps: a save costs 0.25 s" in found
    assert f"one failure is expected every {100 / devices:.3g} hours" in found


def test_a_save_costs_what_its_steps_take_beyond_quiet_ones() -> None:
    cost = SaveCost()
    for _ in range(WARM_UP_STEPS):
        cost.add(30.0, disturbed=False)
    assert cost.step_s is None and cost.cost_s is None
    for _ in range(4):
        cost.add(1.0, disturbed=False)
    assert cost.step_s == 1.0 and cost.cost_s is None
    cost.began()
    for time_s in (1.5, 1.25, 1.0):
        cost.add(time_s, disturbed=True)
    assert cost.cost_s is None, "not before it has ended"
    cost.add(1.0, disturbed=False)
    assert cost.cost_s == 0.75
    cost.began()
    cost.add(0.9, disturbed=True)
    cost.began()  # the next one begins before a quiet step: a cost below 0 counts as none
    assert cost.cost_s == pytest.approx(0.375)
    cost.began()  # one that disturbed no step at all
    assert cost.cost_s == 0.0


def test_a_rank_that_has_not_measured_wishes_the_present_interval() -> None:
    cost = SaveCost()
    assert wished_steps(cost, 0.0, 3600.0, present=10, most=100) == 10
    for _ in range(8):
        cost.add(0.5, disturbed=False)
    cost.began()
    cost.add(1.0, disturbed=True)
    cost.add(0.5, disturbed=False)
    assert wished_steps(cost, 0.0, 3600.0, present=10, most=1000) == 120  # 59.7 s
    assert wished_steps(cost, 0.0, 3600.0, present=10, most=50) == 50
    assert wished_steps(cost, 0.0, 1e-3, present=10, most=1000) == LEAST_STEPS


class Rank:
    """The cadence of one rank, driven in the order of the step loop."""

    def __init__(self, steps: int, world: int, snapshot_interval: int, *, late: bool) -> None:
        self.cadence = AutoCadence(
            snapshot_interval=snapshot_interval, last_step=steps, done=0, world_size=world
        )
        self.steps, self.late = steps, late
        self.decided: dict[int, Votes] = {}
        self.asked: set[int] = set()
        self.taken: list[tuple[int, bool]] = []
        self.previous: tuple[int, int, int] | None = None

    def settle(self, step: int, votes: int, wishes: int) -> None:
        subject = self.cadence.subject(step)
        if subject is not None:
            self.decided[subject] = Votes.of(votes)
        self.cadence.decide(step, wishes)

    def step(self, step: int, votes: int, wishes: int) -> None:
        if step == self.steps and self.previous is not None:
            self.settle(*self.previous)
            self.previous = None
        subject = self.cadence.subject(step)
        if subject is not None:
            self.asked.add(subject)
        if self.previous is not None:
            self.settle(*self.previous)
        self.previous = step, votes, wishes
        if not self.late or step in (1, self.steps):
            self.settle(*self.previous)
            self.previous = None
        found = self.decided.pop(step, None)
        if found is not None:
            self.asked.discard(step)
            self.taken.append((step, self.cadence.persists(step, found)))
        ahead = self.cadence.ahead(step)
        if ahead is not None:
            self.asked.add(ahead)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=120, max_size=120),
    st.sampled_from([0, 1, 2, 5]),
    st.booleans(),
)
def test_all_ranks_decide_the_same_and_no_slot_is_left_over(
    steps: list[tuple[int, bool]], snapshot_interval: int, late: bool
) -> None:
    """Ranks wish different intervals; what they do follows from the sums alone."""
    ranks = [Rank(len(steps), 3, snapshot_interval, late=late) for _ in range(3)]
    for step, (wish, busy) in enumerate(steps, start=1):
        wishes = wish + (wish // 2 + 4) + 9
        for rank in ranks:
            rank.step(step, STORE_BUSY if busy else 0, wishes)
    first = ranks[0]
    assert all(rank.taken == first.taken for rank in ranks)
    assert first.asked == set(), "a slot was asked for that no step took"
    taken = [step for step, _ in first.taken]
    assert taken[-1] == len(steps)
    persisted = [step for step, persisted in first.taken if persisted]
    assert persisted[-1] == len(steps) and len(persisted) > 1
    if not snapshot_interval:
        assert persisted == taken and taken[0] == FIRST_STEPS
        gaps = [later - earlier for earlier, later in itertools.pairwise(taken[:-1])]
        assert min(gaps, default=LEAST_STEPS) >= LEAST_STEPS
    else:
        due = [step for step in range(2, len(steps)) if step % snapshot_interval == 0]
        assert taken == [*due, len(steps)]


def test_an_interval_follows_the_mean_wish_within_bounds_and_grows_while_a_store_is_busy() -> None:
    rank = Rank(1000, 2, 0, late=False)
    for step in range(1, 400):
        rank.step(step, 0, 2 * 100)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(rank.taken)]
    assert gaps[:3] == [MOST_GROWTH * FIRST_STEPS, 100, 100]
    for step in range(400, 800):
        rank.step(step, STORE_BUSY, 2 * 20)
    assert rank.cadence.interval > 100, "the mean alone would make it 20"


@pytest.mark.parametrize(
    ("checkpoint", "field"),
    [
        ({"uri": "/c", "interval": "auto", "interval_steps": 5}, "checkpoint.interval_steps"),
        ({"interval": "auto"}, "checkpoint.uri"),
        ({"uri": "/c", "device_mtbf_hours": 0.0}, "checkpoint.device_mtbf_hours"),
        ({"uri": "/c", "max_step_slowdown": 1.5}, "checkpoint.max_step_slowdown"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(
    checkpoint: dict[str, object], field: str
) -> None:
    with pytest.raises(JobError) as caught:
        from_mapping(tiny_job(checkpoint=checkpoint))
    fields = [problem.field for problem in caught.value.problems]
    assert [found for found in fields if found.startswith("checkpoint")] == [field]


def test_auto_goes_with_snapshots_at_any_interval() -> None:
    values = {"uri": "/c", "interval": "auto", "snapshot_interval_steps": 7}
    read: JobConfig = from_accepted(tiny_job(checkpoint=values))
    assert isinstance(read.checkpoint, CheckpointConfig)
    assert read.checkpoint.memory_interval_steps == 7
