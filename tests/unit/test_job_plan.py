"""The plan of a running job: for which hardware there is one, and what the driver does with it."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.harness.desk import Desk
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import link_pb2
from megascale_common.node.spans import ops
from megascale_common.node.spans.record import NO_MICRO_BATCH, SPAN, Span, to_columns
from megascale_driver.core.queue.explain import explain
from megascale_driver.core.signs.plan import MAX_CHANGES
from megascale_driver.core.values.attempt import PlanVerdict
from megascale_driver.core.values.events import Event, PlanCompared
from megascale_driver.core.values.policy import Policy
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore
from megascale_driver.telemetry.views import SpanViews
from megascale_driver.telemetry.watches import PlanWatch
from megascale_job.config import (
    ExpertsConfig,
    FastAccumulation,
    JobConfig,
    OverlapConfig,
    TelemetryConfig,
)
from megascale_planner.devices import BadCalibration
from megascale_planner.job_plan import PARTS, by_device, plan_of
from megascale_planner.prediction import predict_one
from megascale_planner.step_time import StepTime
from megascale_planner.workload import Refused, from_row

RATES = {"gemm_flops": 1e11, "attention_flops": 4e10, "copy_bytes_s": 1e10}


def calibration(device: str = "cpu", **rates: float) -> str:
    found = {**RATES, "collective_bytes_s": 1e9, **rates}
    return json.dumps({"version": 1, "device": device, "attention_tokens": 256, "rates": found})


def job(**overlap: bool) -> JobConfig:
    config = demo_job("a")
    model = replace(config.model, layers=32, hidden_size=4096, heads=32, vocab_size=51200)
    sizes = replace(config.parallelism, overlap=OverlapConfig(**overlap))
    training = replace(config.training, precision="bf16")
    return replace(config, model=model, parallelism=sizes, training=training)


def test_the_plan_of_a_job_is_the_planners_prediction_by_the_terms_of_its_spans() -> None:
    config = job()
    plan = plan_of(config, "NVIDIA H200", 8, {})
    row = {"gpu": "h200", "layers": 32, "hidden": 4096, "heads": 32, "sequence": 64}
    row |= {"tp": 2, "pp": 2, "dp": 2, "global_batch": 16}
    expected = predict_one(from_row(row)[0])
    assert plan.step_s == pytest.approx(expected["step_time_s"])
    assert (plan.low_s, plan.high_s) == pytest.approx((expected["low"], expected["high"]))
    assert sum(plan.terms.values()) == pytest.approx(plan.step_s)
    named = [part for parts in PARTS.values() for part in parts]
    assert sorted(named) == sorted(StepTime.__dataclass_fields__)
    # What a job does not overlap it exposes.
    plain = plan_of(job(tp=False, pp=False, dp=False), "NVIDIA H200", 8, {})
    for term, hidden in (("tensor_parallel", 0.75), ("data_parallel", 0.8)):
        assert plan.terms[term] == pytest.approx((1 - hidden) * plain.terms[term])


def expert_job(**changes: Any) -> JobConfig:
    config = job()
    experts = ExpertsConfig(count=16, top_k=2, ffn_size=2048, shared_ffn_size=1024, dense_layers=1)
    model = replace(config.model, block="serial", mlp="swiglu", head_dim=64, experts=experts)
    sizes = replace(config.parallelism, ep=4)
    return replace(config, model=model, parallelism=sizes, **changes)


def test_the_plan_of_a_job_with_experts_has_the_same_terms() -> None:
    config = expert_job()
    plan = plan_of(config, "NVIDIA H200", 8, {})
    row = {"gpu": "h200", "layers": 32, "hidden": 4096, "heads": 32, "sequence": 64}
    row |= {"tp": 2, "pp": 2, "dp": 2, "global_batch": 16, "ffn": 16384, "head_dim": 64}
    row |= {"experts": 16, "top_k": 2, "expert_ffn": 2048, "shared_ffn": 1024, "dense_layers": 1}
    expected = predict_one(from_row({**row, "ep": 4})[0])
    assert plan.step_s == pytest.approx(expected["step_time_s"])
    assert {*plan.terms} == {*PARTS}
    assert sum(plan.terms.values()) == pytest.approx(plan.step_s)
    # Between the ranks of ep the others wait for the fullest.
    training = replace(config.training, forced_balance=True)
    even = plan_of(expert_job(training=training), "NVIDIA H200", 8, {})
    assert even.terms["straggler"] < plan.terms["straggler"]
    assert even.terms["data_parallel"] == plan.terms["data_parallel"] > 0


def fp8_job(**fp8: Any) -> JobConfig:
    config = job(dp=False)
    changed = replace(config.training.fp8, **fp8)
    return replace(config, training=replace(config.training, precision="fp8", fp8=changed))


def test_weights_that_travel_in_fp8_are_one_byte_of_six_less() -> None:
    """Four bytes of gradients and two of parameters, or one."""
    terms = []
    for gather in ("bf16", "fp8"):
        config = fp8_job(parameter_gather=gather)
        terms.append(plan_of(config, "NVIDIA H200", 8, {}).terms["data_parallel"])
    assert terms[1] == pytest.approx(terms[0] * 5 / 6)


def test_a_step_takes_longer_with_every_product_that_is_summed_in_float32() -> None:
    """Two of a layer's three products are gradients', 5/12 of the other an output projection."""
    seconds = {}
    for fast in get_args(FastAccumulation):
        config = fp8_job(fast_accumulation=fast)
        seconds[fast] = plan_of(config, "NVIDIA H200", 8, {}).terms["compute"]
    assert 1.01 < seconds["forward"] / seconds["all"] < 1.05
    gradients = seconds["forward"] - seconds["all"]
    assert seconds["none"] - seconds["all"] == pytest.approx(1.5 * gradients)
    for fast, without in (
        ("input_projections", "forward"),
        ("all_but_output_projections", "all"),
    ):
        assert seconds[fast] - seconds[without] == pytest.approx(5 / 24 * gradients)
    default = plan_of(fp8_job(), "NVIDIA H200", 8, {}).terms["compute"]
    assert default == seconds["all_but_output_projections"]


def test_layers_that_a_job_keeps_in_bf16_take_longer() -> None:
    seconds = []
    for ends in (0, 1, 2):
        config = fp8_job(layers_at_end_in_bf16=ends)
        seconds.append(plan_of(config, "NVIDIA H200", 8, {}).terms["compute"])
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


@pytest.mark.parametrize(
    ("device", "calibrations", "named"),
    [
        ("cpu", {}, "no prediction for cpu: measure them with `megascale plan calibrate"),
        ("NVIDIA L40S", {}, "no prediction for NVIDIA L40S"),
        ("NVIDIA H100 PCIe", {}, "no prediction for NVIDIA H100 PCIe"),
        ("", {}, "devices without a name"),
        ("cpu", {"cpu": json.dumps({"version": 1, "rates": {}})}, "gemm_flops"),
        (
            "cpu",
            {"cpu": json.dumps({"version": 1, "attention_tokens": 9, "rates": RATES})},
            "no rate of collectives",
        ),
    ],
)
def test_hardware_that_nobody_measured_has_no_plan_but_a_remedy(
    device: str, calibrations: dict[str, str], named: str
) -> None:
    with pytest.raises((Refused, BadCalibration), match=named):
        plan_of(job(), device, 8, calibrations)


def test_a_calibration_is_a_plan_for_its_device_with_a_wide_interval() -> None:
    files = by_device({"a.json": calibration(), "b.json": calibration("NVIDIA L40S")})
    plan = plan_of(demo_job("a"), "cpu", 4, files)
    assert plan.hardware.startswith("cpu, measured") and plan.low_s < 0.6 * plan.step_s
    twice = plan_of(demo_job("a"), "cpu", 4, {"cpu": calibration(gemm_flops=5e10)})
    assert twice.terms["compute"] > 1.2 * plan.terms["compute"]
    with pytest.raises(BadCalibration, match="another calibration of cpu"):
        by_device({"a.json": calibration(), "b.json": calibration()})
    with pytest.raises(BadCalibration, match=r"a\.json: version"):
        by_device({"a.json": "{}"})


def test_a_step_that_the_calibration_measured_sets_the_share_of_its_rates() -> None:
    step = {"layers": 2, "hidden": 512, "heads": 8, "micro_batch": 4, "global_batch": 16}
    step |= {"vocab": 1024, "sequence": 256}
    as_rates = json.loads(calibration("NVIDIA L40S"))
    found = {
        seconds: by_device(
            {"a.json": json.dumps(as_rates | {"training": step | {"step_time_s": seconds}})}
        )
        for seconds in (5.0, 20.0)
    }
    plans = {seconds: plan_of(job(), "NVIDIA L40S", 8, files) for seconds, files in found.items()}
    assert plans[20.0].step_s > 2 * plans[5.0].step_s
    broken = json.dumps(as_rates | {"training": step | {"step_time_s": 0}})
    with pytest.raises(BadCalibration, match=r"a\.json: training\.step_time_s: 0 is no positive"):
        by_device({"a.json": broken})


def test_a_job_that_the_planner_cannot_describe_has_no_plan() -> None:
    config = demo_job("a")
    layers = (0,) * config.model.layers
    windows = replace(config, model=replace(config.model, layer_windows=layers))
    with pytest.raises(Refused, match="layer_windows"):
        plan_of(windows, "NVIDIA H200", 8, {})


def test_a_job_with_uneven_stages_has_the_plan_of_its_slowest_stage() -> None:
    config = job()

    def step_s(*split: int) -> float:
        sizes = replace(config.parallelism, stage_layers=split)
        return plan_of(replace(config, parallelism=sizes), "NVIDIA H200", 8, {}).step_s

    assert step_s(16, 16) == step_s()
    assert step_s(14, 18) > step_s(15, 17) > step_s(16, 16)
    odd = replace(config, model=replace(config.model, layers=33))  # the default's remainder
    assert plan_of(odd, "NVIDIA H200", 8, {}).step_s > step_s()


def running(**options: Any) -> Desk:
    desk = Desk("n1", "n2", "n3")
    desk.submit(**options)
    desk.run()
    return desk


def verdict(desk: Desk, slower_by: str, sentence: str = "step 7.4 s") -> None:
    number = desk.job().attempt
    desk.feed(PlanCompared(desk.now_s, "a", number, slower_by, sentence, 1, 30, "NVIDIA H200"))


def lines(desk: Desk) -> list[tuple[str, str]]:
    reasons = ("SLOWER_THAN_PLAN", "AS_PLANNED")
    assert all(line.mode == "OBSERVE" for line in desk.audit if line.reason in reasons)
    return [(line.reason, line.message) for line in desk.audit if line.reason in reasons]


def test_a_change_of_the_verdict_is_one_line_and_explained() -> None:
    desk = running()
    for _ in range(3):
        verdict(desk, "data_parallel", "step 7.4 s, plan 6.5 s: data-parallel term +0.7 s")
    assert [reason for reason, _ in lines(desk)] == ["SLOWER_THAN_PLAN"]
    text = explain(desk.state, "a", desk.now_s, Policy())
    assert "; it is slower than planned: step 7.4 s, plan 6.5 s: data-parallel term +0.7 s" in text
    verdict(desk, "host")
    verdict(desk, "")
    assert [reason for reason, _ in lines(desk)][1:] == ["SLOWER_THAN_PLAN", "AS_PLANNED"]
    assert "slower than planned" not in explain(desk.state, "a", desk.now_s, Policy())
    assert desk.job().phase.value == "RUNNING" and desk.job().restarts == 0


def test_a_verdict_of_another_attempt_and_endless_changes_say_nothing_more() -> None:
    desk = running()
    desk.feed(PlanCompared(desk.now_s, "a", 9, "host", "x", 1, 30, ""))
    assert lines(desk) == []
    for number in range(2 * MAX_CHANGES):
        verdict(desk, "" if number % 2 else "host")
    assert len(lines(desk)) == MAX_CHANGES
    assert desk.job().current.plan == PlanVerdict("", "step 7.4 s", MAX_CHANGES)


def batch(desk: Desk, rank: int, node: str, steps: int) -> link_pb2.ReportSpansRequest:
    """Steps of 500 ms, of which all but the step itself is in no span but the optimizer's."""
    ms = 1_000_000
    rows = [
        Span((500 * step + begin) * ms, duration * ms, step, op, NO_MICRO_BATCH, 0)
        for step in range(steps)
        for op, begin, duration in ((0, 0, 500), (1, 90, 400))
    ]
    data = b"".join(SPAN.pack(*row) for row in rows)
    found = link_pb2.ReportSpansRequest(
        node=node, job="a", attempt=desk.job().attempt, rank=rank, count=len(rows),
        columns=zlib.compress(to_columns(data)),
    )  # fmt: skip
    for op in (ops.STEP, ops.OPTIMIZER):
        found.operations.add(name=op.name, kind=op.kind)
    return found


async def test_stored_spans_are_compared_with_the_plan_and_posted_once(tmp_path: Path) -> None:
    desk, posted = running(), list[Event]()
    intake = SpanIntake(store := SpanStore(tmp_path, 1 << 30, 1e9))
    views = SpanViews(intake, store)
    parts = views, lambda: desk.state, lambda: desk.now_s, posted.append
    watch, unmeasured = PlanWatch(*parts, {"cpu": calibration()}), PlanWatch(*parts, {})
    for slot in desk.job().slots:
        for rank in slot.ranks:
            assert intake.take(batch(desk, rank, slot.node, 40 + rank % 4)), "some are ahead"
    await intake.store_waiting()
    assert watch.message(desk.job()) is None, "nothing is compared yet"
    for _ in range(2):
        await watch.look()
    (event,) = posted
    assert isinstance(event, PlanCompared) and event.slower_by == "optimizer", event
    desk.feed(event)
    assert lines(desk) == [("SLOWER_THAN_PLAN", event.sentence)]
    message = watch.message(desk.job())
    assert message is not None and message.measured_step_s == pytest.approx(0.5)
    assert sum(term.measured_s for term in message.terms) == pytest.approx(0.5)
    assert sum(term.predicted_s for term in message.terms) == pytest.approx(
        message.predicted_step_s
    )
    assert [name for name, _ in watch.comparisons()] == ["a"]

    await unmeasured.look()
    refused = unmeasured.message(desk.job())
    assert refused is not None and "no prediction for cpu" in refused.problem
    assert list(unmeasured.comparisons()) == [] and len(posted) == 1
    await intake.close()


async def test_without_spans_the_step_records_are_compared(tmp_path: Path) -> None:
    desk, posted = running(), list[Event]()
    intake = SpanIntake(store := SpanStore(tmp_path, 1 << 30, 1e9))
    parts = SpanViews(intake, store), lambda: state, lambda: desk.now_s, posted.append
    silent = replace(desk.job().config, telemetry=TelemetryConfig(spans="none"))
    current = replace(desk.job().current, step=40)
    job = replace(desk.job(), config=silent, step_times=(2.0,) * 40, current=current)
    state = replace(desk.state, jobs={"a": job})
    watch = PlanWatch(*parts, {"cpu": calibration()})
    await watch.look()
    (event,) = posted
    assert isinstance(event, PlanCompared) and event.slower_by == "step", event
    assert (event.first_step, event.last_step) == (11, 40)
    await intake.close()
