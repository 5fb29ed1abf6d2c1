"""Training with the layers' GEMMs in FP8: layouts, recomputation, resuming, and broken steps.

On a CPU the numbers are those of the formats, multiplied in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.reference_model import ReferenceModel
from tests.harness.training import CPU, hiding, micro_batches, pieces_of, sample, tiny_job

from megascale_job.loading import from_accepted
from megascale_kernels import quantize as plain
from megascale_kernels.gemm import Gemm
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.parallel.tensor.fp8 import Fp8Arithmetic
from megascale_trainer.trainer import StepRecord, Trainer

STEPS = 3
TRAIN = "tests.harness.training:train"
# A loss of 5.7 over 256 tokens. Ranks have scales of their own for their parts of a weight, and so
# other rounding; 0.004 was seen.
LOSS_TOLERANCE = 2e-2

MODELS: dict[str, dict[str, Any]] = {
    "parallel": {"block": "parallel"},
    "serial": {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm", "ffn_size": 128},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2, overlapped": {"tp": 2, **hiding("tp")},
    "tp4, overlapped, full recompute": {"tp": 4, "recompute": "full", **hiding("tp")},
    "tp2pp2dp2, all overlapped": {"tp": 2, "pp": 2, "dp": 2, **hiding("tp", "pp", "dp")},
    "pp2vpp2": {"pp": 2, "virtual_stages": 2},
    "dp2, overlapped": {"dp": 2, **hiding("dp")},
}


@pytest.fixture(scope="module")
def alone(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], list[dict[str, Any]]]:
    """Records of one process, by model, precision and format; run once each."""

    @functools.cache
    def run(model: str, precision: str, kind: str) -> list[dict[str, Any]]:
        job = _job(model, {}, precision, kind)
        folder = tmp_path_factory.mktemp(f"{model}-{precision}-{kind}")
        records: list[dict[str, Any]] = pool.run(TRAIN, 1, folder, job=job, steps=STEPS)[0][
            "records"
        ]
        return records

    return run


@pytest.mark.parametrize(
    ("model", "kind"), [("parallel", "hybrid"), ("parallel", "e4m3"), ("serial", "hybrid")]
)
def test_losses_are_close_to_those_of_bf16(
    model: str, kind: str, alone: Callable[[str, str, str], list[dict[str, Any]]]
) -> None:
    ours, theirs = alone(model, "fp8", kind), alone(model, "bf16", "hybrid")
    assert [record["loss"] for record in ours] != [record["loss"] for record in theirs]
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 0.15, "the model did not learn"
    for our, their in zip(ours, theirs, strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=LOSS_TOLERANCE)
        assert our["gradient_norm"] == pytest.approx(their["gradient_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("layout", "model", "kind"),
    [
        pytest.param("tp2", "parallel", "hybrid", marks=pytest.mark.slow),
        pytest.param("tp2, overlapped", "parallel", "hybrid", marks=pytest.mark.slow),
        ("tp2, overlapped", "parallel", "e4m3"),
        pytest.param("tp4, overlapped, full recompute", "serial", "hybrid", marks=pytest.mark.slow),
        ("tp2pp2dp2, all overlapped", "serial", "hybrid"),
        pytest.param("pp2vpp2", "parallel", "hybrid", marks=pytest.mark.slow),
        pytest.param("dp2, overlapped", "parallel", "hybrid", marks=pytest.mark.slow),
    ],
)
def test_layout_trains_as_one_process(
    layout: str,
    model: str,
    kind: str,
    pool: RankPool,
    alone: Callable[[str, str, str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    sizes = LAYOUTS[layout]
    world_size = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    job = _job(model, sizes, "fp8", kind)
    results = pool.run(TRAIN, world_size, tmp_path, job=job, steps=STEPS)
    for result in results:
        assert result["records"] == results[0]["records"], "ranks disagree"
    for our, their in zip(results[0]["records"], alone(model, "fp8", kind), strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=LOSS_TOLERANCE)
        assert our["gradient_norm"] == pytest.approx(their["gradient_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("recompute", "model"),
    [
        ("selective", "parallel"),
        ("full", "serial"),
        pytest.param("selective", "serial", marks=pytest.mark.slow),
        pytest.param("full", "parallel", marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_no_bit(
    recompute: str,
    model: str,
    pool: RankPool,
    alone: Callable[[str, str, str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    job = _job(model, {"recompute": recompute}, "fp8", "hybrid")
    again = pool.run(TRAIN, 1, tmp_path, job=job, steps=STEPS)[0]["records"]
    assert again == alone(model, "fp8", "hybrid")


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, **hiding("tp")},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_run(
    sizes: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """Checkpoints hold no scale: all of them follow from the restored values."""
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp"))
    job = _job("parallel", sizes, "fp8", "hybrid")
    program = "tests.harness.training:train_and_resume"
    for result in pool.run(program, ranks, tmp_path, job=job, steps=2):
        assert result["resumed"] == result["uninterrupted"]
        assert result["states_equal"]


@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_float64_but_for_rounding(model: str, kind: str) -> None:
    """A gradient passes several roundings, of up to 6 % of a value in e4m3 and 12 % in e5m2."""
    tolerance = 0.15
    job = _job(model, {}, "fp8", kind)
    config = from_accepted({**job, "training": {**job["training"], "global_batch_size": 2}})
    trainer = _started(config)
    whole = {key.split("|")[0]: value for key, value in pieces_of(trainer).items()}
    exact = ReferenceModel(config, whole)
    entropy, z_loss = exact.loss([sample(config, 0), sample(config, 1)])
    torch.autograd.backward(entropy + z_loss)
    [record] = _run(trainer, 0, 1)
    # Of one step, AdamW's mean gradient is (1 - beta1) of the clipped one.
    share = (1 - config.optimizer.beta1) * record.clip_factor
    for key, mean in pieces_of(trainer, "exp_avg").items():
        wanted = exact.parameters[name := key.split("|")[0]].grad
        assert wanted is not None
        error = (torch.from_numpy(mean).double() / share - wanted.flatten()).norm() / wanted.norm()
        assert error < tolerance, (name, float(error))


def test_weights_are_cast_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    casts: list[tuple[int, ...]] = []
    quantize = plain.quantize

    def counted(x: torch.Tensor, *arguments: Any, **options: Any) -> plain.Operand:
        casts.append(tuple(x.shape))
        return quantize(x, *arguments, **options)

    monkeypatch.setattr(plain, "quantize", counted)
    trainer = _started(_job("parallel", {}, "fp8", "hybrid"))
    weight = (448, 64)  # q, k, v and up, of 64 columns
    for step, times in ((0, 4), (1, 8)):
        _run(trainer, step, step + 1)
        assert casts.count(weight) == times, "once for each of the 4 layers and step"
    trainer.evaluate([micro_batches(trainer.config, 2, 0)])
    assert casts.count(weight) == 12, "the parameters have changed"


@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
@pytest.mark.parametrize(
    ("setting", "inputs", "outputs", "gradients"),
    [
        (None, True, False, True),
        ("all_but_output_projections", True, False, True),
        ("input_projections", True, False, False),
        ("forward", True, True, False),
        ("all", True, True, True),
        ("none", False, False, False),
    ],
)
def test_products_are_summed_in_float32_but_for_those_that_the_job_names(
    setting: str | None,
    inputs: bool,
    outputs: bool,
    gradients: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = _job("parallel", {}, "fp8", kind)
    job["training"]["global_batch_size"] = 2  # one micro-batch: its forward, then its backward
    if setting is not None:
        job["training"]["fp8"]["fast_accumulation"] = setting
    trainer = _started(job)
    seen: dict[str, list[bool]] = {"forward": [], "dx": [], "dw": []}
    multiply, gradient, product = Gemm.multiply, Fp8Arithmetic.gradient, "forward"

    def noted(self: Gemm, *sides: Any, accumulate: bool = False, fast: bool = True) -> None:
        seen["dw" if accumulate else product].append(fast)
        multiply(self, *sides, accumulate=accumulate, fast=fast)

    def begun(self: Fp8Arithmetic, *arguments: Any, **options: Any) -> plain.Operand:
        nonlocal product
        product = "dx"
        return gradient(self, *arguments, **options)

    monkeypatch.setattr(Gemm, "multiply", noted)
    monkeypatch.setattr(Fp8Arithmetic, "gradient", begun)
    _run(trainer, 0, 1)
    layers = trainer.config.model.layers
    assert seen == {
        "forward": [inputs, outputs] * layers,
        "dx": [gradients] * 2 * layers,
        "dw": [gradients] * 2 * layers,
    }


def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_is_not() -> None:
    """Scales of a broken tensor are NaN, and so are results: the update is masked, and counted."""
    trainer = _started(_job("parallel", {}, "fp8", "hybrid"))
    [first] = _run(trainer, 0, 1)
    before = trainer.state.states()["master"].clone()
    broken = micro_batches(trainer.config, 1, 0)
    broken[0].loss_weight[0, 0] = float("inf")
    record = trainer.train_step(broken).read()
    assert (first.skipped, record.skipped) == (False, True)
    assert torch.equal(trainer.state.states()["master"], before)
    [after] = _run(trainer, 2, 3)
    assert not after.skipped and after.loss < first.loss


def test_layers_in_bf16_are_those_of_bf16() -> None:
    """A layer that the job keeps in bf16 has the bits of bf16; the others differ."""
    job = _job("parallel", {}, "fp8", "hybrid")
    losses = []
    for start, end in ((0, 0), (0, 3), (2, 2)):
        fp8 = {"layers_at_start_in_bf16": start, "layers_at_end_in_bf16": end}
        changed = {**job, "training": {**job["training"], "fp8": fp8}}
        losses.append(_run(_started(changed), 0, 2)[-1].loss)
    in_bf16 = _run(_started(_job("parallel", {}, "bf16", "hybrid")), 0, 2)[-1].loss
    assert losses[2] == in_bf16
    assert len({*losses}) == 3


@pytest.mark.parametrize(
    ("overlap", "kind", "per_layer"), [(False, "hybrid", 5), (True, "hybrid", 5), (True, "e4m3", 4)]
)
def test_a_layer_communicates_as_in_bf16_and_agrees_on_one_amax(
    overlap: bool, kind: str, per_layer: int, pool: RankPool, tmp_path: Path
) -> None:
    """Of a gradient that is gathered under one scale; all operations show on the status page."""
    counts = []
    for layers in (1, 2):
        job = tiny_job(
            model={"layers": layers},
            parallelism={"tp": 2, "overlap": {"tp": overlap}},
            training={"global_batch_size": 3, "precision": "fp8", "fp8": {"format": kind}},
        )
        program = "tests.harness.training:status_rows"
        rows = pool.run(program, 2, tmp_path / str(layers), job=job)
        assert all(entered == completed for row in rows for entered, completed in row.values())
        counts.append(rows[0]["tp"][0])
    assert counts[1] - counts[0] == 3 * per_layer, "three micro-batches"


def _started(job: dict[str, Any] | Any) -> Trainer:
    torch.set_num_threads(1)
    config = from_accepted(job) if isinstance(job, dict) else job
    trainer = Trainer(config, 0, single_process_groups(), CPU)
    trainer.initialise()
    return trainer


def _run(trainer: Trainer, first: int, last: int) -> list[StepRecord]:
    steps = range(first, last)
    return [trainer.train_step(micro_batches(trainer.config, step, 0)).read() for step in steps]


def _job(model: str, sizes: dict[str, Any], precision: str, kind: str) -> dict[str, Any]:
    training = {"precision": precision, "fp8": {"format": kind}, "micro_batch_size": 2}
    return tiny_job(model=MODELS[model], parallelism=sizes, training=training)
