"""The demo's plan, claims and pictures, without a cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.demo.node_loss import (
    Kill,
    curve,
    differing_steps,
    make_report,
    max_abs_difference,
    missing_steps,
    recovery_claims,
    timeline,
    twin_claims,
    write_png,
)
from megascale_cli.demo.plan import DemoPlan, PlanError, choose_plan, fault_plan
from megascale_cli.demo.recording import Recording
from megascale_client import parse_job
from megascale_client.messages import WatchJobResponse

START_S = 1_000_000.0
REPORT_FIELDS = [
    "device",
    "world_size",
    "tp",
    "pp",
    "dp",
    "steps",
    "attempts",
    "fault_to_detected_s",
    "detected_to_restarted_s",
    "fault_to_first_new_step_s",
    "steps_lost",
    "resumed_from_step",
    "restore_source",
    "first_loss",
    "final_loss",
    "loss_after_resume_matches",
    "max_loss_abs_diff",
    "nodes",
    "evicted_nodes",
]


def plan(**changes: Any) -> DemoPlan:
    values: dict[str, Any] = dict(
        device="cpu", nodes=3, devices_per_node=4, tp=2, pp=2, dp=2, steps=12
    )
    return DemoPlan(**{**values, **changes})


def at(offset_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round((START_S + offset_s) * 1e6))
    return stamp


def record(
    recording: Recording, attempt: int, step: int, offset_s: float, loss: float | None = None
) -> None:
    value = 5.0 / step if loss is None else loss
    made = types_pb2.StepRecord(attempt=attempt, step=step, loss=value, completed_at=at(offset_s))
    recording.add(driver_pb2.WatchJobResponse(step=made))


def event(recording: Recording, reason: str, subject: str, offset_s: float) -> None:
    made = types_pb2.Event(
        reason=reason, subject=subject, time=at(offset_s), message=reason.lower()
    )
    recording.add(driver_pb2.WatchJobResponse(event=made))


def job(recording: Recording, **fields: Any) -> None:
    update = driver_pb2.WatchJobResponse(job=driver_pb2.Job(**fields))
    recording.add(WatchJobResponse(update))


def interrupted() -> tuple[Recording, Kill]:
    """Attempt 1 completes 7 of 12 steps; n1 dies; attempt 2 resumes from step 4 on n3 and n2."""
    run = Recording("demo")
    job(run, attempt=1, nodes=["n1", "n2"], phase=types_pb2.JOB_PHASE_RUNNING)
    for step in range(1, 8):
        record(run, 1, step, step)
    event(run, "NODE_DEAD", "nodes/n1", 9.0)
    job(
        run, attempt=2, nodes=["n3", "n2"], phase=types_pb2.JOB_PHASE_STARTING, evicted_nodes=["n1"]
    )
    event(run, "ATTEMPT_STARTED", "jobs/demo", 11.5)
    for step in range(5, 13):
        record(run, 2, step, 8 + step)
    run.job.CopyFrom(
        driver_pb2.Job(
            attempt=2,
            phase=types_pb2.JOB_PHASE_SUCCEEDED,
            restored_step=4,
            restore_source=types_pb2.RESTORE_SOURCE_STORAGE,
            evicted_nodes=["n1"],
        )
    )
    return run, Kill(START_S + 7.5, "n1", (2, 4), 8, 0)


def uninterrupted() -> Recording:
    twin = Recording("demo-twin")
    job(twin, attempt=1, nodes=["n2", "n3"], phase=types_pb2.JOB_PHASE_RUNNING)
    for step in range(1, 13):
        record(twin, 1, step, 100 + step)
    twin.job.CopyFrom(driver_pb2.Job(attempt=1, phase=types_pb2.JOB_PHASE_SUCCEEDED))
    return twin


def test_a_run_that_shows_everything_is_accepted() -> None:
    run, kill = interrupted()
    claims = [*recovery_claims(plan(), run, kill), *twin_claims(plan(), run, uninterrupted(), True)]
    assert [claim.text for claim in claims if not claim.holds] == []


def test_the_report_has_the_agreed_fields_and_times() -> None:
    run, kill = interrupted()
    report = make_report(plan(), run, uninterrupted(), kill, ["n3", "n1", "n2"])
    assert list(report) == REPORT_FIELDS
    assert report["fault_to_detected_s"] == 1.5
    assert report["detected_to_restarted_s"] == 2.5
    assert report["fault_to_first_new_step_s"] == 5.5
    assert (report["steps_lost"], report["resumed_from_step"], report["restore_source"]) == (
        3,
        4,
        "storage",
    )
    assert (report["loss_after_resume_matches"], report["max_loss_abs_diff"]) == (True, 0.0)
    assert (report["nodes"], report["evicted_nodes"]) == (["n1", "n2", "n3"], ["n1"])
    assert (report["first_loss"], report["final_loss"]) == (5.0, 5.0 / 12)


def test_on_gpus_the_report_has_the_largest_difference_of_losses() -> None:
    run, kill = interrupted()
    twin = uninterrupted()
    twin.records[1, 8].loss += 0.25
    gpu = plan(device="cuda", devices_per_node=2, dp=1)
    report = make_report(gpu, run, twin, kill, ["n1"])
    assert (report["loss_after_resume_matches"], report["max_loss_abs_diff"]) == (None, 0.25)
    assert all(claim.holds for claim in twin_claims(gpu, run, twin, True))


def failing(run: Recording, kill: Kill | None) -> list[str]:
    return [claim.text for claim in recovery_claims(plan(), run, kill) if not claim.holds]


def test_each_thing_that_is_not_observed_fails_its_claim() -> None:
    assert failing(interrupted()[0], None) == ["one active node is killed outright"]
    run, kill = interrupted()
    assert "at least two" in failing(run, Kill(kill.at, "n1", (2,), 8, 0))[0]
    assert failing(run, Kill(kill.at, "n1", (2, 4), 8, 1)) == ["all processes of the node are dead"]
    assert failing(run, Kill(kill.at + 60, "n1", (2, 4), 8, 0)) == [
        "the driver finds the node dead"
    ]
    run.job.proto.restore_source = types_pb2.RESTORE_SOURCE_NONE
    assert "from storage" in failing(run, kill)[0]
    run, kill = interrupted()
    run.nodes_of_attempt[2] = ["n1", "n2"]
    assert failing(run, kill) == ["the spare takes over"]
    run, kill = interrupted()
    run.job.proto.phase = types_pb2.JOB_PHASE_FAILED
    assert "finishes by itself" in failing(run, kill)[0]
    run, kill = interrupted()
    del run.records[2, 9]
    assert failing(run, kill) == ["every step has its record"]


def test_the_smallest_change_of_one_loss_is_detected() -> None:
    run, twin = interrupted()[0], uninterrupted()
    twin.records[1, 9].loss = math.nextafter(twin.records[1, 9].loss, math.inf)
    (claim,) = [claim for claim in twin_claims(plan(), run, twin, True) if not claim.holds]
    assert claim.text.startswith("every step's loss")
    assert "steps 9 differ" in claim.seen


def test_a_repeated_step_with_another_loss_is_detected() -> None:
    run = interrupted()[0]
    run.records[1, 6].loss += 1e-12
    failed = [
        claim.text for claim in twin_claims(plan(), run, uninterrupted(), True) if not claim.holds
    ]
    assert failed == ["the steps repeated after the restart give the same losses as before it"]


def test_a_twin_on_other_or_restarted_nodes_is_refused() -> None:
    run = interrupted()[0]
    assert not twin_claims(plan(), run, uninterrupted(), False)[0].holds


def test_comparisons_treat_gaps_and_nan_as_different() -> None:
    assert missing_steps(3, {1: 1.0, 3: 1.0}) == [2]
    assert differing_steps({1: 1.0}, {1: 1.0, 2: 2.0}) == [2]
    assert differing_steps({1: math.nan}, {1: math.nan}) == [1]
    assert math.isnan(max_abs_difference({1: math.nan}, {1: 1.0}))
    assert max_abs_difference({1: 1.0}, {2: 1.0}) == math.inf


def choose(**changes: Any) -> DemoPlan:
    values: dict[str, Any] = dict(
        device="auto",
        gpus=0,
        nodes=None,
        devices_per_node=None,
        tp=None,
        pp=None,
        dp=None,
        steps=48,
        sabotage="none",
    )
    return choose_plan(**{**values, **changes})


def test_the_plan_follows_the_machine() -> None:
    cpu, gpu = choose(), choose(gpus=8)
    assert (cpu.device, cpu.nodes, cpu.devices_per_node, cpu.world_size) == ("cpu", 3, 4, 8)
    assert (gpu.device, gpu.nodes, gpu.devices_per_node, gpu.tp, gpu.pp, gpu.dp) == (
        "cuda",
        3,
        2,
        2,
        2,
        1,
    )
    assert choose(gpus=5).device == "cpu"
    small = choose(device="cuda", gpus=2, devices_per_node=1, tp=1, pp=1, dp=1)
    assert (small.nodes, small.active_nodes) == (2, 1)
    assert choose(gpus=4, devices_per_node=1, tp=1, pp=2).device == "cuda"
    assert choose(sabotage="no-spare").nodes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(nodes=2), "one node must be spare"),
        (dict(devices_per_node=3, tp=1), "do not fill nodes"),
        (dict(devices_per_node=1), "stays inside a node"),
        (dict(steps=5), "--steps 5"),
        (dict(steps=600), "--steps 600"),
        (dict(device="cuda", gpus=4), "more than the 4 GPUs"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_a_remedy(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        choose(**changes)


@pytest.mark.parametrize(
    ("commits", "last_step", "loses"),
    [
        (0, 20, False),
        (1, 20, False),
        (2, 19, False),
        (2, 20, True),
        # The third snapshot may become complete after the kill, and no step would be lost.
        (2, 24, False),
        (3, 24, False),
        (3, 28, True),
        (2, 28, True),
    ],
)
def test_a_node_is_killed_only_where_that_loses_steps(
    commits: int, last_step: int, loses: bool
) -> None:
    demo = choose(steps=48)
    assert demo.interval_steps == 8
    assert demo.kill_loses_steps(commits, last_step) is loses


@pytest.mark.parametrize(
    "chosen", [choose(), choose(gpus=8), choose(tp=1, pp=1, dp=1, devices_per_node=1)]
)
def test_the_job_is_one_that_the_client_understands(chosen: DemoPlan) -> None:
    spec = parse_job(chosen.job("demo", Path("/corpus"), Path("/checkpoints")))
    model = spec.trainer.model
    parameters = 12 * model.layers * model.hidden_size**2 + 2 * model.vocab_size * model.hidden_size
    assert parameters <= 1_000_000
    assert spec.trainer.training.steps <= 60
    assert spec.checkpoint.interval_steps * 3 < spec.trainer.training.steps


@pytest.mark.parametrize("pipeline", [True, False])
def test_the_jobs_of_the_faults_fill_their_nodes(pipeline: bool) -> None:
    chosen = fault_plan(pipeline=pipeline)
    spec = parse_job(chosen.job("demo", Path("/corpus"), Path("/checkpoints")))
    sizes = spec.trainer.parallelism
    assert sizes.pp * sizes.dp == chosen.nodes * chosen.devices_per_node == 4
    # Of two ranks that do the same work none is the slow one.
    assert sizes.dp >= (2 if pipeline else 3)


def test_timeline_and_curve_show_the_kill_in_its_place(tmp_path: Path) -> None:
    run, kill = interrupted()
    lines = timeline(run, kill)
    order = [
        next(i for i, line in enumerate(lines) if word in line)
        for word in ("SIGKILL", "NODE_DEAD", "STARTED")
    ]
    assert order == sorted(order)
    drawn = curve(run.losses(), 7, 4)
    assert sum(line.count("x") for line in drawn[:-1]) == 1
    assert "killed after step 7" in drawn[-1]
    picture = tmp_path / "loss.png"
    assert write_png(picture, run, uninterrupted(), 7) == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
