"""Training with experts on CUDA: fused and plain, graphs, recomputation, FP8, memory, hot experts.

The first layer is dense; routing is learned, with a bias per expert, unless a test says otherwise.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.options import Run, job
from tests.harness.ranks import REPOSITORY, RankPool
from tests.harness.training import assemble, hiding, tiny_job

from megascale_job.loading import to_mapping
from megascale_job.sizes.memory import rank_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

TRAIN_EACH = "tests.harness.training:train_each"
STEPS = 8
# Of a loss of 5.7. In bf16 and FP8 a token now and then chooses another expert.
LOSS_TOLERANCE = 5e-2
COUNT, TOP_K = 8, 2


def _job(
    precision: str = "bf16",
    kernels: str = "triton",
    parallelism: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
    **training: Any,
) -> dict[str, Any]:
    """Widths are multiples of what the kernels and FP8 need."""
    chosen = {"count": COUNT, "top_k": TOP_K, "ffn_size": 64, "shared_ffn_size": 64}
    return tiny_job(
        model={
            "hidden_size": 128,
            "heads": 8,
            "sequence_length": 64,
            "block": "serial",
            "mlp": "swiglu",
            "norm": "rmsnorm",
            "bias": False,
            "experts": {**chosen, "dense_layers": 1, "bias_rate": 0.01, **(experts or {})},
        },
        parallelism=parallelism or {},
        training={
            "precision": precision,
            "kernels": kernels,
            "micro_batch_size": 2,
            **training,
        },
        loss={"sequence_balance": 0.01, "router_z_loss": 1e-3},
    )


def _need(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, there are {torch.cuda.device_count()}")


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records]


def test_kernels_and_fp8_train_as_plain_operators_in_bf16_do(
    pool: RankPool, tmp_path: Path
) -> None:
    kinds = [("bf16", "torch"), ("bf16", "triton"), ("fp8", "torch"), ("fp8", "triton")]
    jobs = [_job(*kind) for kind in kinds]
    [found] = pool.run(TRAIN_EACH, 1, tmp_path, jobs=jobs, steps=STEPS)
    plain, *others = map(_losses, found)
    assert plain[-1] < plain[0] - 0.3, "the model did not learn"
    for kind, losses in zip(kinds[1:], others, strict=True):
        np.testing.assert_allclose(losses, plain, rtol=0, atol=LOSS_TOLERANCE, err_msg=str(kind))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_graphs_and_recomputation_change_no_bit(
    precision: str, pool: RankPool, tmp_path: Path
) -> None:
    """Graphs begin at the third step; the loads of experts differ from step to step."""
    ways = [
        (recompute, graphs)
        for recompute in ("none", "selective", "full")
        for graphs in (False, True)
    ]
    jobs = [
        _job(
            precision,
            parallelism={"recompute": recompute},
            deterministic=True,
            cuda_graphs=graphs,
        )
        for recompute, graphs in ways
    ]
    [found] = pool.run(TRAIN_EACH, 1, tmp_path, jobs=jobs, steps=STEPS)
    loads = [record["expert_loads"] for record in found[0]]
    assert all(one != other for one, other in pairwise(loads))
    wrong = [way for way, records in zip(ways, found, strict=True) if records != found[0]]
    assert not wrong, wrong


def test_a_step_never_waits_for_the_device(pool: RankPool, tmp_path: Path) -> None:
    jobs = [
        _job("bf16"),
        _job("fp8"),
        _job("bf16", parallelism={"recompute": "full"}),
        _job("bf16", experts={"score": "sigmoid", "groups": 4, "groups_kept": 2}),
    ]
    program = "tests.harness.training:step_without_sync"
    assert pool.run(program, 1, tmp_path, jobs=jobs) == [len(jobs)]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_resumed_run_is_the_same_run(graphs: bool, pool: RankPool, tmp_path: Path) -> None:
    job = _job("fp8", deterministic=True, cuda_graphs=graphs)
    program = "tests.harness.training:train_and_resume"
    [result] = pool.run(program, 1, tmp_path, job=job)
    assert result["resumed"] == result["uninterrupted"]
    assert result["states_equal"]


def test_all_tokens_may_choose_the_same_experts(pool: RankPool, tmp_path: Path) -> None:
    """From one step to the next, when graphs have been captured with other loads."""
    jobs = [
        _job(precision, kernels, experts={"bias_rate": 0.0}, deterministic=True, cuda_graphs=graphs)
        for precision in ("bf16", "fp8")
        for kernels, graphs in (("torch", False), ("triton", False), ("triton", True))
    ]
    program = "tests.harness.training:train_then_choose_alike"
    [found] = pool.run(program, 1, tmp_path, jobs=jobs)
    hot = [COUNT / TOP_K] * TOP_K + [0.0] * (COUNT - TOP_K)
    for plain, eager, graphed in (found[:3], found[3:]):
        assert graphed == eager
        for records in (plain, eager):
            assert all(loads == pytest.approx(hot) for loads in records[-1]["expert_loads"])
        np.testing.assert_allclose(_losses(eager), _losses(plain), rtol=0, atol=LOSS_TOLERANCE)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_memory_is_what_was_estimated(
    precision: str, recompute: str, pool: RankPool, tmp_path: Path
) -> None:
    """Widths of Qwen3-30B-A3B: the estimate counts what is kept, not what a GEMM needs a while."""
    run = Run(preset="m2", kernels="triton", precision=precision, recompute=recompute)
    config = job(run, 1, cuda=True)
    estimate = rank_memory(config, 0).total_bytes
    room = torch.cuda.get_device_properties(0).total_memory
    if estimate > 0.8 * room:
        pytest.skip(f"needs {estimate / 2**30:.0f} GiB, there are {room / 2**30:.0f}")
    program = "tests.harness.training:peaks_of_memory"
    [found] = pool.run(program, 1, tmp_path, job=to_mapping(config))
    assert found["trained"] == pytest.approx(estimate, rel=0.03)


def test_a_profile_has_all_kinds_of_an_experts_step(tmp_path: Path) -> None:
    """By the names of kernels, which no test without a device sees."""
    options = "--preset tiny-experts --ranks 1 --kernels triton --precision fp8 --cuda-graphs"
    command = [sys.executable, "benchmarks/throughput.py", *options.split(), "--steps", "5"]
    command += ["--folder", str(tmp_path), "--profile", "trace.json.gz"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = json.loads(done.stdout.splitlines()[-1])["results"]
    times_ms = line["profile"]["exclusive_ms"]
    none = ("communication", "copies", "other", "idle")
    missing = [kind for kind, spent in times_ms.items() if not spent and kind not in none]
    assert not missing, line["profile"]
    assert times_ms["other"] < 0.2 * line["profile"]["step_ms"], line["profile"]["largest"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2, "dp": 1}, {"dp": 4}], ids=str)
def test_experts_have_the_same_bits_for_any_ep(
    sizes: dict[str, int], precision: str, pool: RankPool, tmp_path: Path
) -> None:
    ranks = math.prod(sizes.values())
    _need(ranks)
    found = []
    for ep in (1, 2, 4)[: 2 if ranks == 2 else 3]:
        folder = tmp_path / str(ep)
        job = _job(precision, parallelism={**sizes, "ep": ep}, deterministic=True)
        results = pool.run("tests.harness.training:train", ranks, folder, job=job, steps=STEPS)
        losses = _losses(results[0]["records"])
        assert all(_losses(result["records"]) == losses for result in results), "ranks disagree"
        found.append((losses, assemble(folder, "final", ranks)))
    (losses, states), *others = found
    assert losses[-1] < losses[0] - 0.3, "the model did not learn"
    for other, values in others:
        assert other == losses
        for name, value in states.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)


@pytest.mark.parametrize(
    "parallelism",
    [{"dp": 2, "ep": 2, **hiding("dp")}, {"tp": 2, "ep": 2, **hiding("tp")}, {"pp": 2}],
    ids=str,
)
def test_layout_trains_as_one_device(
    parallelism: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    _need(2)
    jobs = [_job(precision, parallelism=parallelism) for precision in ("bf16", "fp8")]
    many = pool.run(TRAIN_EACH, 2, tmp_path / "two", jobs=jobs, steps=STEPS)
    [alone] = pool.run(
        TRAIN_EACH, 1, tmp_path / "one", jobs=[_job("bf16"), _job("fp8")], steps=STEPS
    )
    for ours, theirs in zip(many[0], alone, strict=True):
        np.testing.assert_allclose(_losses(ours), _losses(theirs), rtol=0, atol=LOSS_TOLERANCE)
