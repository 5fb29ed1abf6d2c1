"""Which snapshots are taken for each interval, whenever the results of the steps are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.harness.training import tiny_job

from megascale_common.node.status_page import StatusPageWriter
from megascale_job.loading import from_accepted
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.save.snapshot import Snapshotter
from megascale_trainer.save.snapshot_schedule import ReplicaRounds

STEPS = 24


class Slots:
    """The trainer's side of a daemon that always has a slot; ``busy`` steps get none."""

    copied = None

    def __init__(self, busy: frozenset[int] = frozenset()) -> None:
        self.busy = busy
        self.reserved: set[int] = set()
        self.taken: list[int] = []
        self.skipped: list[int] = []
        self.replicas = ReplicaRounds(enabled=False)

    def reserve(self, step: int) -> int:
        if step in self.busy:
            return 1
        assert step not in self.reserved
        self.reserved.add(step)
        return 0

    def reserve_or_wait(self, step: int, timeout_s: float) -> int:
        return self.reserve(step)

    def ask_ahead(self, step: int) -> None:
        assert step not in self.reserved

    def take(self, step: int, small_state: dict[str, Any], *, votes: int, **how: bool) -> bool:
        self.reserved.discard(step)
        (self.skipped if votes else self.taken).append(step)
        return not votes

    def settle(self, step: int, small_state: dict[str, Any], *, finite: bool) -> None:
        assert finite

    def seal_if_copied(self, *, wait: bool = False) -> None:
        return


def run(folder: Path, interval: int, slots: Slots, *, late: bool) -> None:
    """The order of the step loop; ``late``: a result is read after the next step was launched."""
    job = from_accepted(
        tiny_job(training={"steps": STEPS}, checkpoint={"uri": "/ckpt", "interval_steps": interval})
    )
    page = StatusPageWriter(folder / "page", rank=0, attempt=1)
    steps = SnapshotSteps(job, page, cast(Snapshotter, slots))
    previous: tuple[int, int] | None = None
    for step in range(1, STEPS + 1):
        if step == STEPS and previous is not None:
            steps.settle(*previous, 0, finite=True)
            previous = None
        current = step, steps.vote(step)
        if previous is not None:
            steps.settle(*previous, 0, finite=True)
        previous = current
        if not late or step in (1, STEPS):
            steps.settle(*current, 0, finite=True)
            previous = None
        steps.after(step, 0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100, 0])
def test_every_due_step_and_the_last_have_a_snapshot(
    tmp_path: Path, interval: int, late: bool
) -> None:
    slots = Slots()
    run(tmp_path, interval, slots, late=late)
    due = [step for step in range(1, STEPS) if interval and step % interval == 0]
    # The slot of the first step would have to be reserved before it.
    assert slots.taken == [step for step in due if step > 1] + [STEPS]
    assert slots.reserved == set(), "every reserved slot was taken or given back"


@pytest.mark.parametrize("late", [False, True])
def test_a_step_is_skipped_without_an_effect_on_its_neighbours(tmp_path: Path, late: bool) -> None:
    slots = Slots(frozenset({5, 6, 11}))
    run(tmp_path, 1, slots, late=late)
    assert slots.skipped == [5, 6, 11]
    assert slots.taken == [step for step in range(2, STEPS + 1) if step not in slots.busy]
    assert slots.reserved == set()
