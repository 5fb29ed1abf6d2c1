"""The router: choices against a loop in Python, gradients in float64, the kernel beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from tests.harness.kernels import DEVICE, relative_error

from megascale_kernels import router as plain
from megascale_kernels.router import RouterSettings, RoutingGradients

pytest.importorskip("triton")

SETTINGS = {
    "mixtral": (8, RouterSettings(2)),
    "qwen3": (128, RouterSettings(8)),
    "olmoe": (64, RouterSettings(8, normalise=False)),
    "deepseek-v3": (64, RouterSettings(6, "sigmoid", scale=2.5, groups=8, groups_kept=4)),
    "not a power of two": (60, RouterSettings(4, "sigmoid")),
    "groups of 10": (60, RouterSettings(4, groups=6, groups_kept=2)),
}


def _compile(experts: int, settings: RouterSettings) -> None:
    from megascale_kernels.fused import router as fused

    logits, bias = torch.zeros(512, experts), torch.zeros(experts)
    routing = fused.choose(logits, bias, 4, settings)
    gradients = RoutingGradients(routing.weights, routing.score_sums, routing.z_sums)
    fused.gradient(gradients, logits, routing.chosen, settings)


COMPILED = {
    f"router of {name}": lambda name=name: _compile(*SETTINGS[name])
    for name in ("mixtral", "qwen3", "deepseek-v3")
}


def _logits(tokens: int, experts: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(tokens, experts, generator=generator)).to(DEVICE)


def _bias(experts: int) -> torch.Tensor:
    return 0.1 * torch.randn(experts, generator=torch.Generator().manual_seed(9)).to(DEVICE)


def _best(keys: list[float], count: int) -> list[int]:
    """The indices of the largest keys; the lower index first where they are equal."""
    return sorted(range(len(keys)), key=lambda index: (-keys[index], index))[:count]


def _chosen_by_hand(keys: list[float], settings: RouterSettings) -> list[int]:
    width = len(keys) // settings.groups
    groups = [keys[group * width : (group + 1) * width] for group in range(settings.groups)]
    sums = [sum(sorted(group)[-2:]) for group in groups]
    kept = _best(sums, settings.groups_kept) if settings.groups > 1 else [0]
    inside = [
        key if settings.groups == 1 or index // width in kept else -float("inf")
        for index, key in enumerate(keys)
    ]
    return _best(inside, settings.top_k)


@limits(max_examples=40, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 20), experts=st.integers(1, 12))
def test_the_best_are_chosen_and_ties_go_to_the_lower_index(
    data: st.DataObject, tokens: int, experts: int
) -> None:
    """Few different values make many ties; an expert may get no token, or all of them."""
    values = st.lists(st.integers(-2, 2), min_size=experts, max_size=experts)
    logits = torch.tensor([data.draw(values) for _ in range(tokens)], dtype=torch.float32)
    settings = RouterSettings(data.draw(st.integers(1, experts)))
    found = plain.choose(logits, None, 1, settings)
    for token in range(tokens):
        wanted = _chosen_by_hand(logits.softmax(-1)[token].tolist(), settings)
        assert found.chosen[token].tolist() == wanted


@pytest.mark.parametrize("name", SETTINGS)
def test_choices_weights_and_sums(name: str) -> None:
    from megascale_kernels.fused import router as fused

    experts, settings = SETTINGS[name]
    sequences = 3
    logits, bias = _logits(21, experts), _bias(experts)
    scores = logits.softmax(-1) if settings.score == "softmax" else logits.sigmoid()
    for routing in (
        plain.choose(logits, bias, sequences, settings),
        fused.choose(logits, bias, sequences, settings),
    ):
        for token in range(21):
            chosen = _chosen_by_hand((scores + bias)[token].tolist(), settings)
            assert routing.chosen[token].tolist() == chosen
            own = scores[token, chosen]
            own = settings.scale * (own / own.sum() if settings.normalise else own)
            torch.testing.assert_close(routing.weights[token], own, rtol=1e-5, atol=1e-7)
        shares = scores / scores.sum(-1, keepdim=True)
        z = logits.logsumexp(-1).square()
        for sequence in range(sequences):
            of_sequence = shares[sequence::sequences].sum(0)
            torch.testing.assert_close(routing.score_sums[sequence], of_sequence)
            torch.testing.assert_close(routing.z_sums[sequence], z[sequence::sequences].sum())


def test_equal_and_missing_scores_choose_experts_that_exist() -> None:
    from megascale_kernels.fused import router as fused

    logits = torch.zeros(4, 60, device=DEVICE)
    logits[1] = torch.nan
    logits[2, 7] = torch.nan
    logits[3, 5:] = -1e4  # their scores underflow to 0
    for choose in (plain.choose, fused.choose):
        chosen = choose(logits, None, 1, RouterSettings(8)).chosen
        for token in (0, 1, 2, 3):
            assert chosen[token].tolist() == list(range(8))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients(name: str) -> None:
    """Of the plain operator in float64 by differences; the kernel beside the plain one."""
    from megascale_kernels.fused import router as fused

    experts, settings = SETTINGS[name]
    logits, bias = _logits(12, experts), _bias(experts)
    routing = plain.choose(logits, bias, 2, settings)
    generator = torch.Generator().manual_seed(3)
    gradients = RoutingGradients(
        *(
            torch.randn(field.shape, generator=generator).to(DEVICE)
            for field in (routing.weights, routing.score_sums, routing.z_sums)
        )
    )
    wide = RoutingGradients(
        gradients.weights.double(), gradients.score_sums.double(), gradients.z_sums.double()
    )
    exact = plain.gradient(wide, logits.double(), routing.chosen, settings)
    for gradient in (plain.gradient, fused.gradient):
        found = gradient(gradients, logits, routing.chosen, settings)
        assert relative_error(found, exact) < 1e-5


def test_autograd_reaches_the_logits_and_passes_over_the_choice() -> None:
    settings = RouterSettings(2, normalise=False)
    logits = _logits(4, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda leaf: tuple(
            field
            for name, field in vars_of(plain.route(leaf, None, 2, settings)).items()
            if name != "chosen"
        ),
        (logits,),
    )
    bare = replace(settings, normalise=True)
    routing = plain.route(logits, None, 2, bare)
    assert not routing.chosen.requires_grad
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(4, dtype=torch.float64))


def vars_of(routing: plain.Routing) -> dict[str, torch.Tensor]:
    """The fields of a routing by name."""
    return {name: getattr(routing, name) for name in routing.__slots__}
