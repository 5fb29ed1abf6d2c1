"""Figures of experts: a bounded number in a record, and what each rank passes on with its spans."""

from __future__ import annotations

import math
from typing import Any

from megascale_common.node.spans.ops import EXPERT_SHARE, HOT_EXPERT, Op
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_executor.agent.reports.step_reports import to_proto
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_trainer.launch.display import step_line
from megascale_trainer.process.expert_loads import MAX_HOT_LAYERS, ExpertLoads
from megascale_trainer.telemetry.timer import StepTimer
from megascale_trainer.telemetry.trackers import scalars
from megascale_trainer.trainer import StepRecord

Figures = list[tuple[Op, int, float, int, int]]


class Timer(StepTimer):
    """Keeps the figures."""

    def __init__(self) -> None:
        self.figures: Figures = []

    def figure(
        self, op: Op, step: int, value: float, *, micro_batch: int = NO_MICRO_BATCH, seq: int = 0
    ) -> None:
        self.figures.append((op, step, value, micro_batch, seq))


def job(layers: int = 4, dense: int = 1, count: int = 4, **sizes: int) -> JobConfig:
    model = {
        "layers": layers,
        "hidden_size": 64,
        "heads": 4,
        "vocab_size": 257,
        "sequence_length": 128,
        "block": "serial",
        "mlp": "swiglu",
        "ffn_size": 128,
        "experts": {"count": count, "dense_layers": dense},
    }
    trainer: dict[str, Any] = {
        "model": {**model, "experts": {"count": count, "dense_layers": dense}},
        "parallelism": sizes,
        "training": {"steps": 60, "global_batch_size": 24},
        "data": {"sources": [{"prefix": "/data/corpus"}]},
    }
    if not count:
        del trainer["model"]["experts"]
    return loading.from_mapping({"name": "demo", "trainer": trainer})


def record(loads: tuple[tuple[float, ...], ...] = (), **fields: Any) -> StepRecord:
    return StepRecord(
        step=fields.pop("step", 12),
        loss=2.5,
        z_loss=0.0,
        gradient_norm=1.0,
        clip_factor=1.0,
        skipped=False,
        learning_rate=1e-3,
        consumed_samples=0,
        consumed_tokens=0,
        votes=0,
        balance=1.25,
        router_z=0.5,
        expert_loads=loads,
        **fields,
    )


LOADS = ((0.5, 1.0, 2.0, 0.5), (1.0, 1.0, 1.0, 1.0), (0.0, 3.0, 0.5, 0.5))


def test_a_record_has_the_losses_the_extremes_and_the_hottest_expert_of_a_layer() -> None:
    found = ExpertLoads(job(), 0).values(record(LOADS))
    assert found["balance"] == 1.25 and found["router_z"] == 0.5
    assert (found["expert_load_max"], found["expert_load_min"]) == (3.0, 0.0)
    hot = [(one["layer"], one["expert"], one["load"]) for one in found["hot_experts"]]
    assert hot == [(3, 1, 3.0), (1, 2, 2.0), (2, 0, 1.0)], "layer 0 is dense"
    assert ExpertLoads(job(), 0).values(record()) == {"balance": 1.25, "router_z": 0.5}
    assert ExpertLoads(job(count=0), 0).values(record(LOADS)) == {}


def test_the_size_of_a_record_does_not_grow_with_the_model() -> None:
    many = ExpertLoads(job(layers=60, count=64), 0)
    assert len(many.layers) == 59
    found = many.values(record(tuple((1.0,) * 64 for _ in many.layers)))
    assert len(found["hot_experts"]) == MAX_HOT_LAYERS


def test_what_is_not_a_number_is_no_load() -> None:
    found = ExpertLoads(job(), 0).values(record((LOADS[0], (math.nan,) * 4, LOADS[2])))
    assert (found["expert_load_max"], found["expert_load_min"]) == (3.0, 0.0)
    assert [one["layer"] for one in found["hot_experts"]] == [3, 1]


def test_trackers_and_the_wire_get_the_values_under_one_name() -> None:
    values = ExpertLoads(job(), 0).values(record(LOADS))
    assert set(scalars(values)) == {"balance", "router_z", "expert_load_max", "expert_load_min"}
    message = to_proto({"step": 12, **values})
    assert (message.balance, message.expert_load_max) == (1.25, 3.0)
    hottest = message.hot_experts.experts[0]
    assert (hottest.layer, hottest.expert, hottest.load) == (3, 1, 3.0)
    plain = to_proto({"step": 12})
    assert not plain.HasField("balance") and not plain.HasField("hot_experts")


def test_a_line_of_progress_has_balance_and_the_largest_load() -> None:
    line = {"step": 3, "loss": 2.5, "tokens_per_s": 10.0, "memory_bytes": 0, "data_wait_s": 0.0}
    line["step_time_s"] = 0.25
    experts = ExpertLoads(job(), 0).values(record(LOADS))
    assert "loss 2.5000  balance 1.2500  largest expert load 3.00  10" in step_line(
        {**line, **experts}, 4
    )
    assert "expert" not in step_line(line, 4)


def test_a_hot_rank_passes_on_its_own_experts_for_the_step_before() -> None:
    # Rank 3 is the second one of its ep group: experts 2 and 3.
    loads, timer = ExpertLoads(job(dp=4, ep=2), 3), Timer()
    loads.pass_on(record(LOADS, expert_share=1.4), timer)
    assert timer.figures == [
        (EXPERT_SHARE, 11, 1.4, NO_MICRO_BATCH, 0),
        (HOT_EXPERT, 11, 2.0, 2, 1),
        (HOT_EXPERT, 11, 1.0, 2, 2),
        (HOT_EXPERT, 11, 0.5, 2, 3),
    ]


def test_an_even_rank_passes_on_its_share_and_a_dense_one_nothing() -> None:
    timer = Timer()
    loads = ExpertLoads(job(dp=4, ep=2), 1)
    loads.pass_on(record(LOADS, expert_share=1.0), timer)
    assert timer.figures == [(EXPERT_SHARE, 11, 1.0, NO_MICRO_BATCH, 0)]
    for fields in ({"expert_share": 0.0}, {"expert_share": math.nan}, {"step": 1}):
        loads.pass_on(record(LOADS, **fields), timer)
    assert len(timer.figures) == 1


def test_each_stage_reads_its_own_layers() -> None:
    config = job(layers=8, dp=2, pp=2, ep=2, virtual_stages=2)
    assert ExpertLoads(config, 0).layers == (1, 4, 5)
    assert ExpertLoads(config, 2).layers == (2, 3, 6, 7)
