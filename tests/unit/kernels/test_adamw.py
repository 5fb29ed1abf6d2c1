"""The AdamW update, plain and fused: against float64, and a skipped step changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.harness.kernels import DEVICE, blank

from megascale_kernels.adamw import AdamWKernel, AdamWUpdate, BiasCorrection, adamw

NONE_SKIPPED = torch.zeros((), dtype=torch.float64, device=DEVICE)
UPDATE = AdamWUpdate(3e-3, 1e-8, 0.1, BiasCorrection(0.9, 0.95, 1, NONE_SKIPPED))
SIZE = 2500  # no multiple of a block
ONE, ZERO, QUARTER = torch.tensor([1.0, 0.0, 0.25], device=DEVICE)


def _compile(size: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Two steps, whose numbers differ: one kernel."""
    from megascale_kernels.fused import adamw as fused

    shard, scalar = torch.zeros(4, size), torch.ones(())
    for number in (1, 16):
        update = replace(
            UPDATE,
            bias=replace(UPDATE.bias, number=number),
            learning_rate=float(number - 1),
            weight_decay=1.0,
        )
        fused.adamw(shard[:3], shard[3], blank(size, dtype=dtype), scalar, scalar, update)


COMPILED = {
    "adamw": lambda: _compile(1 << 16),
    "small adamw": lambda: _compile(100, torch.float32),
}


@pytest.fixture(params=["torch", "triton"])
def kernel(request: pytest.FixtureRequest) -> AdamWKernel:
    """Each implementation; they promise the same."""
    if request.param == "torch":
        return adamw
    pytest.importorskip("triton")
    from megascale_kernels.fused import adamw as fused

    return fused.adamw


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _exact(states: torch.Tensor, gradient: torch.Tensor, update: AdamWUpdate) -> torch.Tensor:
    """The states after ``update``, float64 [3, n]."""
    master, mean, square = states.unbind()
    mean = update.beta1 * mean + (1 - update.beta1) * gradient
    square = update.beta2 * square + (1 - update.beta2) * gradient**2
    mean_hat, square_hat = (
        mean / (1 - update.beta1**update.bias.number),
        square / (1 - update.beta2**update.bias.number),
    )
    step = mean_hat / (square_hat.sqrt() + update.epsilon) + update.weight_decay * master
    return torch.stack((master - update.learning_rate * step, mean, square))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_five_updates_follow_the_formula_in_float64(
    weight_decay: float, kernel: AdamWKernel
) -> None:
    # a run inside a wider shard, as the optimizer has it
    shard = torch.zeros(3, SIZE + 64, device=DEVICE)
    shard[0] = _random(SIZE + 64, seed=4)
    beside = shard[:, :64].clone()
    states, exact = shard[:, 64:], shard[:, 64:].double()
    parameters, largest = torch.zeros_like(states[0]), torch.zeros_like(exact[0])
    for number in range(1, 6):
        gradient = 10 ** (3 * _random(SIZE, seed=number)) * _random(SIZE, seed=-number)
        scaled, update = (
            0.25 * gradient.double(),
            replace(UPDATE, bias=replace(UPDATE.bias, number=number), weight_decay=weight_decay),
        )
        exact = _exact(exact, scaled, update)
        kernel(states, gradient, parameters, QUARTER, ONE, update)
        torch.testing.assert_close(states[0].double(), exact[0], atol=5e-7, rtol=2e-7)
        # moments lose digits where gradients of both signs cancel: held to the largest so far
        largest = torch.maximum(largest, scaled.abs())
        for ours, wanted, power in zip(states[1:], exact[1:], (1, 2), strict=True):
            assert bool(((ours - wanted).abs() <= 5e-7 * largest**power).all())
        assert torch.equal(parameters, states[0])
    assert torch.equal(shard[:, :64], beside), "wrote outside of its run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_no_bit(dtype: torch.dtype, kernel: AdamWKernel) -> None:
    states = _random(3, SIZE, seed=5)
    states[2].abs_()
    states[1, ::7] = -0.0
    parameters = states[0].to(dtype)
    before = states.clone(), parameters.clone()
    gradient = torch.full((SIZE,), float("nan"), device=DEVICE)
    gradient[::2] = float("inf")
    kernel(
        states,
        gradient,
        parameters,
        ZERO,
        ZERO,
        replace(UPDATE, bias=replace(UPDATE.bias, number=3)),
    )
    for ours, wanted in zip((states, parameters), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def test_parameters_are_the_rounded_master(kernel: AdamWKernel) -> None:
    states = torch.zeros(3, SIZE, device=DEVICE)
    states[0] = _random(SIZE, seed=6)
    parameters = torch.zeros(SIZE, dtype=torch.bfloat16, device=DEVICE)
    kernel(states, torch.ones_like(states[0]), parameters, ONE, ONE, UPDATE)
    # one step of bf16 and not half of one: Triton's interpreter cuts where the device rounds
    torch.testing.assert_close(parameters.float(), states[0], rtol=2**-7, atol=0)


def test_plain_rounds_the_master_to_nearest() -> None:
    states = torch.zeros(3, SIZE, device=DEVICE)
    states[0] = _random(SIZE, seed=6)
    parameters = torch.zeros(SIZE, dtype=torch.bfloat16, device=DEVICE)
    adamw(states, torch.ones_like(states[0]), parameters, ONE, ONE, UPDATE)
    assert torch.equal(parameters, states[0].bfloat16())


def test_bias_correction_counts_the_updates_that_were_applied() -> None:
    for number in (1, 2, 10, 999, 100_000):
        update = replace(UPDATE, bias=replace(UPDATE.bias, number=number))
        wanted = [1.0 - update.beta1**number, 1.0 - update.beta2**number]
        assert update.bias.corrections.tolist() == torch.tensor(wanted).tolist()
        assert (
            update.bias.factors.tolist() == torch.tensor([1.0 / each for each in wanted]).tolist()
        )
        later = replace(
            UPDATE, bias=replace(UPDATE.bias, number=number + 7, skipped=NONE_SKIPPED + 7)
        )
        torch.testing.assert_close(
            later.bias.corrections, update.bias.corrections, rtol=1e-7, atol=0
        )
        torch.testing.assert_close(later.bias.factors, update.bias.factors, rtol=2e-7, atol=0)
