"""LAMB's passes, plain and fused: against float64, and a skipped step changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.harness.kernels import DEVICE, blank

from megascale_kernels.adamw import AdamWUpdate, BiasCorrection
from megascale_kernels.lamb import LambKernel, LambRuns, Segment

NONE_SKIPPED = torch.zeros((), dtype=torch.float64, device=DEVICE)
UPDATE = AdamWUpdate(3e-3, 1e-6, 0.1, BiasCorrection(0.9, 0.999, 1, NONE_SKIPPED))
# Long, tiny, next to each other, with a gap; blocks are of 1024.
WIDE = (Segment(0, 1600, True), Segment(1600, 1608, False), Segment(1664, 4032, True))
ODD = (Segment(3, 1500, True), Segment(1500, 1501, False), Segment(1601, 2500, True))
ONE, ZERO, QUARTER = torch.tensor([1.0, 0.0, 0.25], device=DEVICE)


def _compile(segments: Sequence[Segment], size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Two updates, whose numbers differ: one kernel of each kind."""
    from megascale_kernels.fused import lamb as fused

    runs = fused.LambRuns(segments, torch.device("cpu"))
    shard, scalar = torch.zeros(4, size), torch.ones(())
    sums, ratios = torch.zeros((2, len(segments)), dtype=torch.float64), torch.ones(len(segments))
    for number in (1, 16):
        update = replace(
            UPDATE, bias=replace(UPDATE.bias, number=number), weight_decay=float(number)
        )
        runs.direction(shard[:3], shard[3], scalar, scalar, update, sums)
        runs.apply(shard[:3], shard[3], blank(size, dtype=dtype), ratios, scalar, float(number))


def _compile_blocks() -> None:
    """Without the kernel of sums, which reads few values."""
    from megascale_kernels.fused import lamb as fused

    sums = fused._lamb_sum_kernel
    fused._lamb_sum_kernel = {(1, 2): lambda *arguments, **options: None}
    _compile([Segment(0, 1 << 16, True)], 1 << 16)
    fused._lamb_sum_kernel = sums


COMPILED = {
    "lamb": _compile_blocks,
    "small lamb": lambda: _compile([Segment(0, 99, True)], 128, torch.float32),
}


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """The class of each implementation; they promise the same."""
    if request.param == "torch":
        return LambRuns
    pytest.importorskip("triton")
    from megascale_kernels.fused import lamb as fused

    return fused.LambRuns


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _exact(
    states: torch.Tensor, gradient: torch.Tensor, segments: Sequence[Segment], update: AdamWUpdate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New moments [2, n], directions [n] and sums of squares [2, segments], in float64."""
    master, mean, square = states.unbind()
    mean = update.beta1 * mean + (1 - update.beta1) * gradient
    square = update.beta2 * square + (1 - update.beta2) * gradient**2
    change = mean / (1 - update.beta1**update.bias.number)
    change = change / ((square / (1 - update.beta2**update.bias.number)).sqrt() + update.epsilon)
    sums = []
    for one in segments:
        part = slice(one.start, one.stop)
        change[part] += (update.weight_decay if one.decay else 0.0) * master[part]
        sums.append((master[part].square().sum(), change[part].square().sum()))
    return torch.stack((mean, square)), change, torch.tensor(sums, device=DEVICE).T


@pytest.mark.parametrize("segments", [WIDE, ODD])
@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_four_updates_follow_the_formula_in_float64(
    weight_decay: float, segments: tuple[Segment, ...], kernels: Any
) -> None:
    size = 4096
    runs: LambKernel = kernels(segments, DEVICE)
    states = torch.zeros(3, size + 64, device=DEVICE)[:, 64:]  # rows of a wider shard
    states[0] = _random(size, seed=4)
    exact, parameters = states.double(), states[0].clone()
    inside = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    for one in segments:
        inside[one.start : one.stop] = True
    ratios = torch.rand(len(segments), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for number in range(1, 5):
        update = replace(
            UPDATE, bias=replace(UPDATE.bias, number=number), weight_decay=weight_decay
        )
        gradient = _random(size, seed=number)
        given = gradient.clone()
        moments, change, wanted = _exact(exact, 0.25 * gradient.double(), segments, update)
        exact[1:] = torch.where(inside, moments, exact[1:])
        sums = torch.full((2, len(segments) + 3), 7.0, dtype=torch.float64, device=DEVICE)
        runs.direction(states, gradient, QUARTER, ONE, update, sums[:, 1:-2])
        torch.testing.assert_close(sums[:, 1:-2], wanted, atol=0, rtol=5e-6)
        assert bool((sums[:, [0, -2, -1]] == 7.0).all()), "wrote outside of its segments"
        torch.testing.assert_close(states.double(), exact, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient[~inside], given[~inside], atol=0, rtol=0)
        for one, ratio in zip(segments, ratios.tolist(), strict=True):
            part = slice(one.start, one.stop)
            exact[0, part] -= 3e-3 * ratio * change[part]
        runs.apply(states, gradient, parameters, ratios, ONE, 3e-3)
        torch.testing.assert_close(states.double(), exact, atol=1e-6, rtol=1e-6)
        assert torch.equal(parameters, states[0])


def test_the_sums_repeat_bit_for_bit(kernels: Any) -> None:
    found = []
    for _ in range(2):
        states = _random(3, 4096, seed=5)
        states[2].abs_()
        sums = torch.zeros((2, 3), dtype=torch.float64, device=DEVICE)
        kernels(WIDE, DEVICE).direction(
            states,
            _random(4096, seed=6),
            ONE,
            ONE,
            replace(UPDATE, bias=replace(UPDATE.bias, number=3)),
            sums,
        )
        found.append(sums)
    assert torch.equal(found[0], found[1])
    assert bool((found[0] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_no_bit(dtype: torch.dtype, kernels: Any) -> None:
    states = _random(3, 4096, seed=5)
    states[2].abs_()
    states[1, ::7] = -0.0
    parameters = states[0].to(dtype)
    before = states.clone(), parameters.clone()
    gradient = torch.full((4096,), float("nan"), device=DEVICE)
    gradient[::2] = float("inf")
    runs = kernels(WIDE, DEVICE)
    sums = torch.zeros((2, 3), dtype=torch.float64, device=DEVICE)
    runs.direction(
        states, gradient, ZERO, ZERO, replace(UPDATE, bias=replace(UPDATE.bias, number=3)), sums
    )
    broken = torch.full((3,), float("nan"), device=DEVICE)
    runs.apply(states, gradient, parameters, broken, ZERO, 1.0)
    for ours, wanted in zip((states, parameters), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def test_parameters_are_the_rounded_master(kernels: Any) -> None:
    states = torch.zeros(3, 4096, device=DEVICE)
    states[0] = _random(4096, seed=6)
    parameters = torch.zeros(4096, dtype=torch.bfloat16, device=DEVICE)
    runs = kernels([Segment(0, 4096, True)], DEVICE)
    runs.apply(states, torch.ones(4096, device=DEVICE), parameters, ONE[None], ONE, 1e-3)
    # one step of bf16 and not half of one: Triton's interpreter cuts where the device rounds
    torch.testing.assert_close(parameters.float(), states[0], rtol=2**-7, atol=0)


def test_a_shard_of_nothing_but_padding(kernels: Any) -> None:
    states = torch.zeros(3, 64, device=DEVICE)
    sums = torch.zeros((2, 0), dtype=torch.float64, device=DEVICE)
    runs = kernels([], DEVICE)
    runs.direction(states, states[0], ONE, ONE, UPDATE, sums)
    runs.apply(states, states[0], states[0], ONE[None][:0], ONE, 1e-3)
    assert not states.any()
