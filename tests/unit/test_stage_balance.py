"""Splits of layers over stages: the fastest one, what it gains, and when it is proposed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.harness import planner_rows as rows
from tests.harness.properties import examples
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_planner.devices import GPUS
from megascale_planner.prediction import predict_line, predict_one
from megascale_planner.search import (
    Balance,
    Split,
    UnitCosts,
    balance_of,
    balanced,
    costs_of,
)
from megascale_planner.systems import SYSTEMS, System
from megascale_planner.workload import Workload, from_row

FP8: dict[str, Any] = {"precision": "fp8"}
OURS = SYSTEMS["ours"]


def costs(head_layers: float, embedding_layers: float = 0.0) -> UnitCosts:
    return UnitCosts(1.0, head_layers, embedding_layers)


def slowest(split: Split, pp: int, units: UnitCosts) -> float:
    """Layers of the slowest pipeline stage, its ends included."""
    stages = [float(sum(split[stage::pp])) for stage in range(pp)]
    stages[0] += units.embedding_s
    stages[-1] += units.head_s
    return max(stages)


@examples(60)
@given(
    st.integers(4, 14),
    st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1)]),
    st.floats(0, 4),
    st.floats(0, 0.1),
)
def test_no_split_has_a_faster_slowest_stage(
    layers: int, sizes: tuple[int, int], head: float, embedding: float
) -> None:
    pp, chunks = sizes
    units = costs(head, embedding)
    found = balanced(layers, pp, chunks, units)
    assert sum(found) == layers and len(found) == pp * chunks and min(found) >= 1
    every = (
        split
        for split in itertools.product(range(1, layers), repeat=pp * chunks)
        if sum(split) == layers
    )
    best = min(slowest(split, pp, units) for split in every)
    # The remainder stays on the first stages, as in an even split: at most the embedding is lost.
    assert best <= slowest(found, pp, units) <= best + embedding


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "head", "split"),
    [
        (16, 2, 2, 1.4, (5, 4, 4, 3)),
        (32, 2, 2, 1.4, (9, 8, 8, 7)),
        (32, 4, 1, 1.4, (9, 8, 8, 7)),
        (16, 2, 2, 0.85, (4, 4, 4, 4)),  # 9 layers are no faster than 8.85
        (16, 2, 2, 0.0, (4, 4, 4, 4)),
        (22, 2, 2, 5.0, (7, 7, 6, 2)),  # the chunk beside the head has fewest
        (32, 2, 1, 1.0, (16, 16)),  # as fast as (17, 15), and the first stage keeps less
        (7, 3, 1, 0.0, (3, 2, 2)),
        (3, 2, 2, 1.0, ()),
        (8, 1, 1, 1.0, ()),
    ],
)
def test_splits_that_can_be_seen_by_hand(
    layers: int, pp: int, chunks: int, head: float, split: Split
) -> None:
    assert balanced(layers, pp, chunks, costs(head)) == split


def test_the_fastest_split_that_fits_is_taken() -> None:
    def fits(split: Split) -> bool:
        return sum(split[::2]) <= 17

    assert balanced(32, 2, 2, costs(4.0)) == (9, 9, 9, 5)
    assert balanced(32, 2, 2, costs(4.0), fits) == (9, 10, 8, 5)
    assert balanced(32, 2, 2, costs(4.0), lambda split: False) == ()


def workload(preset: str, layers: int, layout: tuple[int, int, int, int], **more: Any) -> Workload:
    return from_row(rows.own(preset, layers, layout, **more))[0]


def balance(of: Workload, system: System = OURS) -> Balance | None:
    return balance_of(of, GPUS[of.gpu], system)


def test_the_head_stays_in_bf16_where_layers_are_in_fp8() -> None:
    """Measured at 4096 columns: 0.85 layers in bf16, 1.4 in FP8."""
    own = workload("7b", 16, (1, 2, 2, 1), batch=32)
    found = {
        precision: costs_of(replace(own, precision=precision), GPUS["h200"], OURS)
        for precision in ("bf16", "fp8")
    }
    assert found["bf16"].head_layers == pytest.approx(0.85, rel=0.05)
    assert found["fp8"].head_layers == pytest.approx(1.4, rel=0.05)
    assert found["bf16"].head_s == found["fp8"].head_s


def test_the_measured_gain_is_predicted() -> None:
    """2 H100s, 7B widths, 16 layers: 40,015 tokens/s/GPU beside 37,982 with an even split."""
    own = workload("7b", 16, (1, 2, 2, 1), batch=32, gpu="h100", **FP8)
    found = balance(own, replace(OURS, fp8_sums=1.0))  # all sums were fast then
    assert found is not None and found.stage_layers == (5, 4, 4, 3)
    assert found.gain == pytest.approx(40015 / 37982 - 1, abs=0.01)
    assert balance(replace(own, stage_layers=found.stage_layers)) is None
    assert balance(replace(own, precision="bf16")) is None
    # From the first stage to the last is the wrong way.
    wrong = replace(own, stage_layers=(3, 4, 4, 5))
    assert predict_one(wrong)["step_time_s"] > 1.08 * predict_one(own)["step_time_s"]
    assert balance(workload("7b", 16, (2, 1, 1, 1), batch=32, gpu="h100", **FP8)) is None


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ([4, 4], "stage_layers: [4, 4] are not 4 numbers"),
        ([4, 4, 4, 5], "add up to 16"),
        ([4, 4, 8, 0], "positive whole numbers"),
        ([4, 4, 4.0, 4], "positive whole numbers"),
        ("4444", "positive whole numbers"),
    ],
)
def test_a_row_with_another_split_is_refused(listed: object, named: str) -> None:
    row = {**rows.own("7b", 16, (1, 2, 2, 1), 32), "stage_layers": listed}
    assert named in predict_line(json.dumps(row), 1, None)["refused"]


def job(stage_layers: list[int], precision: str = "fp8") -> dict[str, Any]:
    model = {"layers": 32, "hidden_size": 4096, "heads": 32, "vocab_size": 51200}
    sizes = {"tp": 2, "pp": 2, "virtual_stages": 2, "stage_layers": stage_layers}
    batch = {"steps": 10, "global_batch_size": 64, "micro_batch_size": 4, "precision": precision}
    trainer = {
        "model": {**model, "sequence_length": 2048},
        "parallelism": sizes,
        "training": batch,
        "data": {"sources": [{"prefix": "/corpus"}]},
    }
    return {"name": "a", "trainer": trainer}


@pytest.mark.parametrize(
    ("spec", "memory_gib", "named"),
    [
        (job([]), 0, "[9, 8, 8, 7]"),
        (job([]), 80, "[9, 8, 8, 7]"),
        (job([]), 53, ""),  # the even split fits, this one does not
        (job([9, 8, 8, 7]), 0, ""),
        (job([], "bf16"), 0, ""),
        (job([7, 8, 8, 9], "bf16"), 0, "[8, 8, 8, 8]"),
    ],
)
def test_the_plan_of_a_job_names_a_faster_split(
    spec: dict[str, Any], memory_gib: int, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    line = ["plan", str(file), "--device-memory-gib", str(memory_gib)]
    done = CliRunner().invoke(build_app(), line)
    facts = json.loads(CliRunner().invoke(build_app(), [*line, "--json"]).output)
    assert (done.exit_code, facts["refused"]) == (0, [])
    assert ("balanced_stages" in facts, "stage_layers: [" in done.output) == (bool(named),) * 2
    if named:
        found = facts["balanced_stages"]
        said = f"stage_layers: {named} is predicted {100 * found['gain']:.1f} % faster: the head "
        assert f"{said}costs as much as {found['head_layers']:.1f} layers" in done.output
        assert found["gain"] > 0.01 and str(found["stage_layers"]) == named


@pytest.mark.parametrize(
    ("changes", "memory_gib", "named"),
    [
        ({}, 0, True),
        ({"pipeline_schedule": "zero_bubble"}, 0, False),
        ({}, 50, False),  # neither schedule fits: the job is refused
        ({"pp": 1, "virtual_stages": 1}, 0, False),
    ],
)
def test_the_plan_of_a_job_names_a_faster_schedule(
    changes: dict[str, Any], memory_gib: int, named: bool, tmp_path: Path
) -> None:
    """Measured on four H200s: 1.7 % in bf16."""
    spec = job([], "bf16")
    spec["trainer"]["parallelism"] |= changes
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    line = ["plan", str(file), "--device-memory-gib", str(memory_gib)]
    said = CliRunner().invoke(build_app(), line).output
    found = json.loads(CliRunner().invoke(build_app(), [*line, "--json"]).output)
    assert ("pipeline_schedule: zero_bubble is predicted" in said) == named
    assert ("faster_schedule" in found) == named
    if named:
        assert 0.015 < found["faster_schedule"]["gain"] < 0.03
        assert "the largest rank needs 5" in said


def test_a_faster_schedule_that_does_not_fit_is_not_named(tmp_path: Path) -> None:
    spec = job([])
    spec["trainer"]["parallelism"] |= {"pp": 4, "virtual_stages": 1}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec))

    def plan(memory_gib: float) -> dict[str, Any]:
        line = ["plan", str(file), "--json", "--device-memory-gib", str(memory_gib)]
        found: dict[str, Any] = json.loads(CliRunner().invoke(build_app(), line).output)
        return found

    roomy = plan(0)
    own = max(rank["total_bytes"] for rank in roomy["memory_of_a_rank"]) / 2**30
    other = roomy["faster_schedule"]["largest_rank_bytes"] / 2**30
    assert other > own, "later stages keep what their weight gradients read"
    assert "faster_schedule" in plan(other + 0.1)
    between = plan((own + other) / 2)
    assert between["refused"] == [] and "faster_schedule" not in between


def test_without_numpy_a_job_is_planned_all_the_same() -> None:
    code = (
        "import json, sys; sys.modules['numpy'] = None\n"
        "from megascale_client import parse_job\n"
        "from megascale_cli.planning import plan_job\n"
        f"plan = plan_job(parse_job({job([])!r}), 8, 0)\n"
        "print(json.dumps([plan['refused'], plan['parameters'], 'balanced_stages' in plan]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], 6_862_151_680, False]
