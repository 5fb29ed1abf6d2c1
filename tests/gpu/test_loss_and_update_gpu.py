"""Cross entropy, gradient norm, AdamW, LAMB on CUDA at training shapes: exact, small, no sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megascale_job.layout import Coordinates
from megascale_job.sizes.parameter_table import BufferPlan
from megascale_kernels.adamw import AdamWUpdate, BiasCorrection, adamw
from megascale_kernels.cross_entropy import CrossEntropy, cross_entropy
from megascale_kernels.lamb import LambRuns, Segment
from megascale_trainer.optimizer.step_control import StageSums, local_totals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 8192
ON = "cuda" if torch.cuda.is_available() else "cpu"
NONE_SKIPPED = torch.zeros((), dtype=torch.float64, device=ON)
UPDATE = AdamWUpdate(3e-4, 1e-8, 0.1, BiasCorrection(0.9, 0.95, 7, NONE_SKIPPED))
SIZE = 16 * 2**20 + 72  # a bucket of 64 MiB and a bit
SLACK = 1.5  # how much larger the fused error may be than torch's


def _alone(tensor: torch.Tensor) -> None:
    """The reduction of one rank."""


def _fused_cross_entropy() -> CrossEntropy:
    pytest.importorskip("triton")
    from megascale_kernels.fused import cross_entropy as fused

    return fused.cross_entropy


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype
    )


def _need_gib(size: float) -> None:
    if torch.cuda.mem_get_info()[0] < size * 2**30:
        pytest.skip(f"needs {size} GiB of free device memory")


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _loss(
    kernel: CrossEntropy, logits: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, log Z and the gradient of sum(loss + 1e-3 log Z^2), which overwrites the logits."""
    logits.requires_grad_()
    loss, log_z = kernel(logits, targets, 0, columns, _alone, _alone)
    [gradient] = torch.autograd.grad(loss.sum() + 1e-3 * log_z.square().sum(), logits)
    return loss.detach(), log_z.detach(), gradient


@pytest.mark.parametrize(("width", "columns"), [(51200, 51200), (25600, 25600), (6400, 6389)])
def test_cross_entropy_is_as_exact_as_torchs_and_repeats(width: int, columns: int) -> None:
    fused = _fused_cross_entropy()
    _need_gib(TOKENS * width * 24 / 2**30)
    logits = 4 * _random(TOKENS, width, seed=1, dtype=torch.bfloat16)
    targets = torch.randint(
        0, columns, (TOKENS,), device="cuda", generator=torch.Generator("cuda").manual_seed(2)
    )
    exact = _loss(cross_entropy, logits.double(), targets, columns)
    errors = {}
    for name, kernel in (("torch", cross_entropy), ("fused", fused)):
        found = _loss(kernel, logits.clone(), targets, columns)
        errors[name] = [
            float((ours.double() - wanted).abs().max())
            for ours, wanted in zip(found, exact, strict=True)
        ]
    floors = (1e-5, 1e-5, 1e-6)
    for ours, theirs, floor in zip(errors["fused"], errors["torch"], floors, strict=True):
        assert ours <= SLACK * theirs + floor, errors
    one, two = (_loss(fused, logits.clone(), targets, columns) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))


def test_cross_entropy_keeps_nothing_of_the_size_of_the_logits_and_never_waits() -> None:
    fused = _fused_cross_entropy()
    logits = _random(TOKENS, 25600, seed=1, dtype=torch.bfloat16)
    targets = torch.zeros(TOKENS, dtype=torch.long, device="cuda")
    _loss(fused, logits.clone(), targets, 25600)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with _no_sync():
        _loss(fused, logits, targets, 25600)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 100


def test_cross_entropy_beyond_two_to_the_31_elements() -> None:
    fused = _fused_cross_entropy()
    tokens, width = 65536, 51200
    _need_gib(10)
    logits = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    logits[-1] = _random(width, seed=3, dtype=torch.bfloat16)
    wanted = logits[-1].double().softmax(-1)
    targets = torch.full((tokens,), 17, device="cuda")
    loss, _, gradient = _loss(fused, logits, targets, width)
    assert float(loss[-1]) == pytest.approx(float(-wanted[17].log()), abs=1e-4)
    rest = gradient[-1].double()
    assert float(rest[17]) < -0.9
    rest[17], wanted[17] = 0.0, 0.0
    torch.testing.assert_close(
        rest, wanted * float(rest.sum() / wanted.sum()), atol=1e-6, rtol=2e-2
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adamw_is_as_exact_as_torchs_and_rounds_to_nearest(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from megascale_kernels.fused import adamw as fused

    begin = torch.stack([_random(SIZE, seed=seed) for seed in (4, 5, 6)])
    begin[1] *= 1e-3
    begin[2] = begin[2].square() * 1e-6
    gradient = _random(SIZE, seed=7) * 2e-3
    scale, apply = torch.tensor([0.5, 1.0], device="cuda")
    master, mean, square = begin.double()
    mean = UPDATE.beta1 * mean + (1 - UPDATE.beta1) * 0.5 * gradient.double()
    square = UPDATE.beta2 * square + (1 - UPDATE.beta2) * (0.5 * gradient.double()).square()
    correction1, correction2 = 1.0 - UPDATE.beta1**7, 1.0 - UPDATE.beta2**7
    step = (mean / correction1) / (
        (square / correction2).sqrt() + UPDATE.epsilon
    ) + UPDATE.weight_decay * master
    exact = torch.stack((master - UPDATE.learning_rate * step, mean, square))
    errors = {}
    for name, kernel in (("torch", adamw), ("fused", fused.adamw)):
        states, parameters = begin.clone(), torch.zeros(SIZE, dtype=dtype, device="cuda")
        kernel(states, gradient.clone(), parameters, scale, apply, UPDATE)
        assert torch.equal(parameters, states[0].to(dtype))
        errors[name] = (states - exact).abs().amax(dim=1).tolist()
    for ours, theirs in zip(errors["fused"], errors["torch"], strict=True):
        assert ours <= SLACK * theirs, errors


def test_adamw_skips_without_a_trace_and_never_waits() -> None:
    pytest.importorskip("triton")
    from megascale_kernels.fused import adamw as fused

    states, gradient = (
        torch.stack([_random(SIZE, seed=seed) for seed in (4, 5, 6)]),
        _random(SIZE, seed=7),
    )
    gradient[::3], states[1, ::5] = float("nan"), -0.0
    parameters, before = states[0].bfloat16(), states.clone()
    zero = torch.zeros((), device="cuda")
    fused.adamw(states, gradient, parameters, zero, zero, UPDATE)
    with _no_sync():
        later = replace(UPDATE, bias=replace(UPDATE.bias, number=8, skipped=1.0 + NONE_SKIPPED))
        fused.adamw(states, gradient, parameters, zero, zero, later)
    assert torch.equal(states.view(torch.int32), before.view(torch.int32))
    assert torch.equal(parameters, before[0].bfloat16())


def test_adamw_of_a_shard_whose_states_pass_two_to_the_31_elements() -> None:
    pytest.importorskip("triton")
    from megascale_kernels.fused import adamw as fused

    _need_gib(14)
    shard = torch.empty(3, 2**30 + 64, device="cuda")
    states = shard[:, -4096:]
    states.zero_()
    parameters, one = (
        torch.zeros(4096, dtype=torch.bfloat16, device="cuda"),
        torch.ones((), device="cuda"),
    )
    fused.adamw(
        states,
        torch.ones(4096, device="cuda"),
        parameters,
        one,
        one,
        replace(UPDATE, bias=replace(UPDATE.bias, number=1)),
    )
    torch.testing.assert_close(states[0], torch.full_like(states[0], -UPDATE.learning_rate))
    torch.testing.assert_close(states[2], torch.full_like(states[2], 1 - UPDATE.beta2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lamb_is_exact_repeats_and_never_waits(dtype: torch.dtype) -> None:
    """Both passes over a bucket of three parameters, beside the plain ones, against float64."""
    pytest.importorskip("triton")
    from megascale_kernels.fused import lamb as fused

    cuts = (0, 2**20 + 8, 2**20 + 4096, SIZE)
    segments = [
        Segment(start, stop, number != 1) for number, (start, stop) in enumerate(pairwise(cuts))
    ]
    begin = torch.stack([_random(SIZE, seed=seed) for seed in (4, 5, 6)])
    begin[1] *= 1e-3
    begin[2] = begin[2].square() * 1e-6
    gradient = _random(SIZE, seed=7) * 2e-3
    scale, apply = torch.tensor([0.5, 1.0], device="cuda")
    master, mean, square = begin.double()
    mean = UPDATE.beta1 * mean + (1 - UPDATE.beta1) * 0.5 * gradient.double()
    square = UPDATE.beta2 * square + (1 - UPDATE.beta2) * (0.5 * gradient.double()).square()
    correction1, correction2 = 1.0 - UPDATE.beta1**7, 1.0 - UPDATE.beta2**7
    change = (mean / correction1) / ((square / correction2).sqrt() + UPDATE.epsilon)
    sums = torch.zeros((2, 3), dtype=torch.float64, device="cuda")
    ratios, wanted = torch.tensor([0.3, 1.0, 2.0], device="cuda"), master.clone()
    for number, one in enumerate(segments):
        part = slice(one.start, one.stop)
        change[part] += (UPDATE.weight_decay if one.decay else 0.0) * master[part]
        sums[0, number] = master[part].square().sum()
        sums[1, number] = change[part].square().sum()
        wanted[part] -= UPDATE.learning_rate * ratios[number].double() * change[part]
    exact, errors, results = torch.stack((wanted, mean, square)), {}, []
    for name, kind in (("torch", LambRuns), ("fused", fused.LambRuns), ("again", fused.LambRuns)):
        states, parameters = begin.clone(), torch.zeros(SIZE, dtype=dtype, device="cuda")
        runs, direction = kind(segments, begin.device), gradient.clone()
        found = torch.zeros_like(sums)
        with _no_sync() if name == "again" else nullcontext():
            runs.direction(states, direction, scale, apply, UPDATE, found)
            runs.apply(states, direction, parameters, ratios, apply, UPDATE.learning_rate)
        torch.testing.assert_close(found, sums, atol=0, rtol=1e-5)
        assert torch.equal(parameters, states[0].to(dtype))
        errors[name] = (states - exact).abs().amax(dim=1).tolist()
        results.append((states, found))
    for one, two in zip(results[1], results[2], strict=True):
        assert torch.equal(one, two), "it must repeat bit for bit"
    for ours, theirs in zip(errors["fused"], errors["torch"], strict=True):
        assert ours <= SLACK * theirs, errors


def test_lamb_skips_without_a_trace() -> None:
    pytest.importorskip("triton")
    from megascale_kernels.fused import lamb as fused

    states = torch.stack([_random(SIZE, seed=seed) for seed in (4, 5, 6)])
    gradient = torch.full((SIZE,), float("nan"), device="cuda")
    parameters, before = states[0].bfloat16(), states.clone()
    zero, nan = torch.zeros((), device="cuda"), torch.full((1,), float("nan"), device="cuda")
    runs = fused.LambRuns([Segment(0, SIZE, True)], states.device)
    sums = torch.zeros((2, 1), dtype=torch.float64, device="cuda")
    runs.direction(states, gradient, zero, zero, UPDATE, sums)
    runs.apply(states, gradient, parameters, nan, zero, 1.0)
    assert torch.equal(states.view(torch.int32), before.view(torch.int32))
    assert torch.equal(parameters, before[0].bfloat16())


def test_the_benchmark_of_operators_runs_dry(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from benchmarks import operators

    ways = "eager,torch_fused,plain,fused,cudnn,flash"
    assert operators.main(["--quick", "--ways", ways]) == 0, capsys.readouterr().out


def test_the_norm_of_gradients_is_exact_and_makes_no_copy() -> None:
    plan = cast(BufferPlan, SimpleNamespace(replicated_over=()))
    shards = [(plan, _random(size, seed=size)) for size in (SIZE, 1000, SIZE + 4)]
    at = Coordinates(tp=0, cp=0, dp=0, pp=0)
    local_totals(StageSums(), shards, at, 0, shards[0][1].device)  # loads what it needs
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with _no_sync():
        totals = local_totals(StageSums(), shards, at, 0, shards[0][1].device)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    exact = sum(shard.double().square().sum().item() for _, shard in shards)
    assert totals[3].item() == pytest.approx(exact, rel=1e-12)
