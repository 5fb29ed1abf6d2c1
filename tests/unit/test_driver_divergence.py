"""Divergence: what the step records show, and what the core makes of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import types_pb2
from megascale_driver.analysis.divergence import (
    Divergence,
    DivergenceKind,
    DivergenceTrack,
    StepSample,
    found,
    observe,
)
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import JobSubmitted, LossDiverged
from megascale_driver.core.values.job import JobPhase, Rollback
from megascale_driver.wire import messages as wire
from megascale_job.config import DataSkip, JobConfig
from megascale_job.loading import to_json
from megascale_job.sections.data import skipping

NAN = float("nan")


def config(*, warmup_steps: int = 0, **recovery: object) -> JobConfig:
    """A job without checkpoints; ten steps are a divergence unless ``recovery`` has another."""
    job = demo_job("a", spares=0)
    return replace(
        job,
        schedule=replace(job.schedule, warmup_steps=warmup_steps),
        recovery=replace(job.recovery, **recovery),  # type: ignore[arg-type]
        checkpoint=replace(job.checkpoint, uri="", interval_steps=0),
    )


def watch(
    job: JobConfig, *losses: float, norm: float = 1.0, attempt: int = 1
) -> list[tuple[int, Divergence]]:
    """The divergences that these losses of steps 1, 2, ... show, each with its step."""
    track, seen = DivergenceTrack(), []
    for step, loss in enumerate(losses, 1):
        track = observe(track, StepSample(attempt, step, loss, norm), job)
        if (diverged := found(track, job)) is not None:
            seen.append((step, diverged))
    return seen


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (math.inf, 1.0), (3.0, NAN)])
def test_what_stays_not_finite_is_a_divergence_after_so_many_steps(
    loss: float, norm: float
) -> None:
    job = config(divergence_steps=4)
    ((step, first),) = watch(job, *[loss] * 7, norm=norm)
    assert (step, first.kind, first.first_step, first.count) == (
        4,
        DivergenceKind.NON_FINITE,
        1,
        4,
    )
    assert watch(job, *[NAN, NAN, NAN, 3.0] * 5) == []
    assert watch(config(divergence_steps=0), *[NAN] * 50) == []


def test_half_of_a_short_job_is_enough() -> None:
    job = config()
    short = replace(job, training=replace(job.training, steps=8))
    assert watch(short, 3.0, 3.0, *[NAN] * 3) == []
    ((step, found_here),) = watch(short, 3.0, *[NAN] * 7)
    assert (step, found_here.kind, found_here.count) == (5, DivergenceKind.NON_FINITE, 4)
    single = replace(job, training=replace(job.training, steps=1))
    assert len(watch(single, NAN)) == 1


def test_a_loss_far_above_its_start_is_a_divergence_but_noise_is_none() -> None:
    job, choice = config(), random.Random(3)
    noise = [choice.lognormvariate(math.log(5.0), 0.6) for _ in range(5000)]
    assert sum(loss > 15.0 for loss in noise) > 50, "the noise reaches beyond the factor"
    assert watch(job, *noise) == []
    start = [11.0] * 10
    ((step, rise),) = watch(job, *start, *[34.0] * 15)
    assert (step, rise.kind, rise.first_step, rise.start_loss) == (
        20,
        DivergenceKind.LOSS_RISE,
        11,
        11.0,
    )
    assert watch(job, *start, *[32.0] * 50) == [], "below three times the start"
    assert watch(config(loss_rise_factor=0.0), *start, *[1e9] * 50) == []
    assert [step for step, _ in watch(config(warmup_steps=30), *start, *[34.0] * 35)] == [40]


def test_an_episode_does_not_span_attempts_and_the_start_is_that_of_the_job() -> None:
    job, track = config(divergence_steps=4), DivergenceTrack()
    for step in range(1, 11):
        track = observe(track, StepSample(1, step, 10.0, 1.0), job)
    for attempt, step in [(1, 11), (1, 12), (1, 13), (2, 11), (2, 12), (2, 13)]:
        track = observe(track, StepSample(attempt, step, 31.0, 1.0), job)
        assert found(track, job) is None
    assert track.start_loss == 10.0
    assert found(observe(track, StepSample(2, 14, 31.0, 1.0), job), job) is not None


def test_steps_without_any_target_are_no_divergence_and_hide_none() -> None:
    job, track = config(divergence_steps=4), DivergenceTrack()
    record = types_pb2.StepRecord(
        attempt=1, step=1, loss=NAN, gradient_norm=NAN, skipped_because="no_targets"
    )
    empty = wire.step_sample(record)
    for _ in range(20):
        track = observe(track, empty, job)
        assert found(track, job) is None
    for step in range(21, 24):
        track = observe(track, StepSample(1, step, NAN, NAN), job)
        track = observe(track, replace(empty, step=step), job)
        assert found(track, job) is None
    assert found(observe(track, StepSample(1, 24, NAN, NAN), job), job) is not None


def running(job: JobConfig) -> Desk:
    """Two nodes that run ``job``, named a."""
    desk = Desk("n1", "n2")
    desk.feed(JobSubmitted(desk.now_s, job, "me"))
    desk.run()
    return desk


def diverge(desk: Desk, kind: DivergenceKind, first_step: int = 91, attempt: int = 1) -> None:
    loss = NAN if kind is DivergenceKind.NON_FINITE else 40.0
    sample = StepSample(attempt, first_step + 9, loss, NAN, skipped_updates=9)
    desk.feed(LossDiverged(desk.now_s, "a", Divergence(kind, first_step, 10, sample, 11.0)))


def test_a_run_that_is_not_finite_ends_and_names_its_last_good_checkpoint() -> None:
    desk = running(config())
    desk.state = replace(
        desk.state, jobs={"a": replace(desk.job(), committed_step=80, committed_by_attempt=1)}
    )
    diverge(desk, DivergenceKind.NON_FINITE)
    assert desk.job().phase is JobPhase.STOPPING
    diverge(desk, DivergenceKind.NON_FINITE)
    desk.stop()
    job = desk.job()
    assert (job.phase, job.attempt, job.restarts) == (JobPhase.FAILED, 1, 0)
    for part in ("91 to 100", "loss nan", "that of step 80", "trainer.optimizer.learning_rate"):
        assert part in job.reason, job.reason
    (line,) = [line for line in desk.audit if line.reason == "LOSS_DIVERGED"]
    assert (line.mode, line.policy) == ("ENFORCE", "recovery.on_non_finite")
    assert "9 updates skipped" in line.evidence[0].digest
    assert job.committed_step == 80, "its checkpoints stay"


def test_a_checkpoint_from_within_the_divergence_is_not_called_good() -> None:
    desk = running(config())
    desk.state = replace(desk.state, jobs={"a": replace(desk.job(), committed_step=95)})
    diverge(desk, DivergenceKind.NON_FINITE)
    assert "step 95, is not older than the divergence" in desk.job().stop_reason


def test_a_risen_loss_is_only_observed_unless_the_job_asks_for_more() -> None:
    desk = running(config())
    for _ in range(3):
        diverge(desk, DivergenceKind.LOSS_RISE)
    assert desk.job().phase is JobPhase.RUNNING
    diverge(desk, DivergenceKind.LOSS_RISE, first_step=500)
    lines = [line for line in desk.audit if line.reason == "LOSS_DIVERGED"]
    assert [(line.mode, line.outcome) for line in lines] == [("OBSERVE", "the job continues")] * 2
    assert "above 3 times its start of 11" in lines[0].message

    strict = running(config(on_loss_rise="stop"))
    diverge(strict, DivergenceKind.LOSS_RISE)
    assert strict.job().phase is JobPhase.STOPPING
    lenient = running(config(on_non_finite="continue"))
    diverge(lenient, DivergenceKind.NON_FINITE)
    assert lenient.job().phase is JobPhase.RUNNING


def test_records_of_an_attempt_that_is_over_change_nothing() -> None:
    desk = running(config())
    diverge(desk, DivergenceKind.NON_FINITE, attempt=7)
    assert desk.job().phase is JobPhase.RUNNING
    for name in ("n1", "n2"):
        desk.report(name, AttemptPhase.FINISHED)
    diverge(desk, DivergenceKind.NON_FINITE)
    assert desk.job().phase is JobPhase.SUCCEEDED


def _committed(job: JobConfig, step: int) -> Desk:
    """A running job with checkpoints, of which the newest is of ``step``."""
    desk = running(job)
    stored = replace(job, checkpoint=replace(job.checkpoint, uri="/ckpt", interval_steps=10))
    job_now = replace(desk.job(), config=stored, committed_step=step, committed_by_attempt=1)
    desk.state = replace(desk.state, jobs={"a": job_now})
    return desk


@pytest.mark.parametrize("kind", list(DivergenceKind))
def test_a_run_is_taken_back_to_its_last_good_checkpoint_without_the_data_since(
    kind: DivergenceKind,
) -> None:
    desk = _committed(config(on_non_finite="roll_back", on_loss_rise="roll_back"), 90)
    diverge(desk, kind)
    assert desk.job().phase is JobPhase.STOPPING
    diverge(desk, kind)
    assert len(desk.job().rollbacks) == 1, "once for an episode"
    desk.stop()
    job = desk.job()
    assert (job.attempt, job.committed_step, job.pending_spec) == (2, 90, "")
    assert job.phase in (JobPhase.QUEUED, JobPhase.PREPARING)
    assert job.config.data.skips == (DataSkip(after_step=90, steps=10),)
    assert not job.abandoned(90, 1)
    assert job.abandoned(95, 1), "nothing that was written since is restored"
    [line] = [line for line in desk.audit if line.reason == "LOSS_DIVERGED"]
    assert line.mode == "ENFORCE"
    assert "up to step 90 and leaves out the data of steps 91 to 100" in line.outcome


def test_checkpoints_from_within_the_divergence_are_refused() -> None:
    desk = _committed(config(on_loss_rise="roll_back"), 95)
    diverge(desk, DivergenceKind.LOSS_RISE)
    desk.stop()
    job = desk.job()
    assert job.config.data.skips == (DataSkip(after_step=90, steps=10),)
    assert job.refused_steps == (95, 100, 110), "what is committed meanwhile as well"
    assert job.abandoned(95, 1) and not job.abandoned(90, 1)


def test_a_job_that_cannot_go_back_ends_and_says_why() -> None:
    job = config(on_non_finite="roll_back", max_roll_backs=2)
    bare = _committed(job, 0)
    diverge(bare, DivergenceKind.NON_FINITE, first_step=10)
    bare.stop()
    assert bare.job().phase is JobPhase.FAILED
    assert "there is no checkpoint to go back to" in bare.job().reason
    tired = _committed(job, 80)
    back = (Rollback(10, 0), Rollback(20, 0))
    tired.state = replace(tired.state, jobs={"a": replace(tired.job(), rollbacks=back)})
    diverge(tired, DivergenceKind.NON_FINITE)
    tired.stop()
    assert tired.job().phase is JobPhase.FAILED
    assert "taken back 2 times (recovery.max_roll_backs)" in tired.job().reason


def test_a_configuration_that_waits_gets_the_skip_as_well() -> None:
    desk = _committed(config(on_non_finite="roll_back"), 80)
    wanted = replace(desk.job().config, priority=7)
    desk.state = replace(desk.state, jobs={"a": replace(desk.job(), pending_spec=to_json(wanted))})
    diverge(desk, DivergenceKind.NON_FINITE)
    desk.stop()
    assert desk.job().config.priority == 7
    assert desk.job().config.data.skips == (DataSkip(after_step=90, steps=10),)


def test_a_checkpoint_that_is_due_counts_before_the_driver_has_heard_of_it() -> None:
    desk = _committed(config(on_non_finite="roll_back"), 0)
    diverge(desk, DivergenceKind.NON_FINITE, first_step=95)
    desk.stop()
    job = desk.job()
    assert job.config.data.skips == (DataSkip(after_step=90, steps=14),)
    assert (job.committed_step, job.refused_steps) == (0, (100, 110))
    assert not job.abandoned(94, 1) and job.abandoned(95, 1)


def test_skips_of_steps_that_are_given_up_become_part_of_the_new_one() -> None:
    """The data that was seen after the checkpoint, with what was left out in it, is left out."""
    skips = (DataSkip(after_step=50, steps=5), DataSkip(after_step=90, steps=7))
    assert skipping(skips, 80, 100) == (
        DataSkip(after_step=50, steps=5), DataSkip(after_step=80, steps=27),
    )  # fmt: skip
    assert skipping(skipping((), 100, 120), 100, 150) == (
        DataSkip(after_step=100, steps=20), DataSkip(after_step=100, steps=50),
    )  # fmt: skip
