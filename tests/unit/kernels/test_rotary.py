"""Rotary embedding against complex rotation in float64, and its defining property."""

from __future__ import annotations

import pytest
import torch

from megascale_kernels.rotary import (
    HeadNorms,
    Heads,
    apply_rotary,
    llama3_frequencies,
    rotary_frequencies,
    rotary_table,
    split_heads,
    yarn_frequencies,
)
from megascale_trainer.weights import Weight

THETA = 10_000.0
CPU = torch.device("cpu")
FREQUENCIES = rotary_frequencies(16, THETA, CPU)


def test_rotary() -> None:
    generator = torch.Generator().manual_seed(4)
    position = torch.randint(0, 200_000, (2, 9), generator=generator)
    x = torch.randn(9, 2, 3, 16, generator=generator)
    out = apply_rotary(x, rotary_table(position, FREQUENCIES))
    frequency = THETA ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = position.t()[:, :, None, None] * frequency
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(
        out.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-5
    )


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator) for _ in range(2))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        tables = (
            rotary_table(torch.tensor([[p]]), FREQUENCIES) for p in (query_position, key_position)
        )
        return sum_product(
            *(apply_rotary(t, table) for t, table in zip((q, k), tables, strict=True))
        )

    def sum_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum()

    torch.testing.assert_close(score(5, 2), score(1005, 1002), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-3)


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(ValueError, match="even head size, got 15"):
        rotary_frequencies(15, THETA, CPU)


def test_llama3_divides_low_frequencies_and_keeps_high_ones() -> None:
    """The wavelengths of Llama 3.1: factor 8, from 8192 tokens on below, to 2048 above."""
    frequencies = rotary_frequencies(128, 500_000.0, CPU)
    changed = llama3_frequencies(frequencies, 8.0, 1.0, 4.0, 8192)
    wavelength = 2 * torch.pi / frequencies
    ratio = frequencies / changed
    assert torch.equal(ratio[wavelength < 2048], torch.ones_like(ratio[wavelength < 2048]))
    torch.testing.assert_close(
        ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0)
    )
    between = ratio[(wavelength >= 2048) & (wavelength <= 8192)]
    assert len(between) > 4
    assert (between.diff() > 0).all()
    assert between.min() > 1.0
    assert between.max() < 8.0


# Those of transformers' _compute_yarn_parameters (5.23) for the fields that Qwen publishes for its
# models of 32,768 tokens, every eighth of 64: factor 4, theta 1e6, heads of 128.
QWEN_YARN = (
    1.0,
    0.177827939,
    0.0316227786,
    0.00537532149,
    0.000602941145,
    4.44569851e-05,
    7.90569356e-06,
    1.40585337e-06,
)


def test_yarn_gives_the_published_frequencies() -> None:
    frequencies = rotary_frequencies(128, 1e6, CPU)
    changed = yarn_frequencies(frequencies, 1e6, 4.0, 32.0, 1.0, 32768)
    found = changed[::8]
    torch.testing.assert_close(found, torch.tensor(QWEN_YARN).double(), rtol=2e-6, atol=0)
    turns = 32768 * frequencies / (2 * torch.pi)
    assert torch.equal(changed[turns > 40], frequencies[turns > 40])
    assert torch.equal(changed[turns < 0.8], frequencies[turns < 0.8] / 4)
    assert ((frequencies / changed).diff() >= 0).all()


def test_yarn_mixes_no_frequency_if_its_bounds_are_neighbours() -> None:
    frequencies = rotary_frequencies(16, 50.0, CPU)
    turns = 256 * frequencies / (2 * torch.pi)
    changed = yarn_frequencies(frequencies, 50.0, 4.0, 1e5, 40.7, 256)
    assert turns[0] > 40.7 > turns[1]
    expected = frequencies / torch.tensor([1.0] + [4.0] * 7).double()
    torch.testing.assert_close(changed, expected)


def test_a_scale_of_the_table_multiplies_what_it_rotates() -> None:
    x = torch.randn(5, 3, 2, 16, generator=torch.Generator().manual_seed(8))
    position = torch.arange(5).expand(3, -1)
    plain, scaled = (rotary_table(position, FREQUENCIES, scale) for scale in (1.0, 1.25))
    torch.testing.assert_close(apply_rotary(x, scaled), 1.25 * apply_rotary(x, plain))
    old = position.t()[:, :, None, None].double() * FREQUENCIES
    assert torch.equal(plain.cos, old.cos().float()) and torch.equal(plain.sin, old.sin().float())


def test_heads_are_normalised_before_they_are_turned() -> None:
    generator = torch.Generator().manual_seed(6)
    heads = Heads(2, 1, 16)
    position = torch.arange(5).expand(3, -1)
    inputs = torch.randn(5, 3, heads.width, generator=generator)
    query, key = (
        Weight(torch.rand(16, generator=generator).requires_grad_(), torch.zeros(16))
        for _ in range(2)
    )
    table = rotary_table(position, FREQUENCIES)
    q, k, v = split_heads(inputs, heads, table, HeadNorms(query, key, 1e-6))
    plain_q, plain_k, plain_v = split_heads(inputs, heads, None)
    for found, plain, weight in ((q, plain_q, query), (k, plain_k, key)):
        size = plain.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        normed = (plain / size * weight.value).permute(2, 0, 1, 3)
        torch.testing.assert_close(found, apply_rotary(normed, table).permute(1, 2, 0, 3))
    assert torch.equal(v, plain_v)


def test_all_heads_of_a_token_are_normalised_together() -> None:
    generator = torch.Generator().manual_seed(7)
    heads, table = Heads(4, 2, 16), rotary_table(torch.arange(5).expand(3, -1), FREQUENCIES)
    inputs = torch.randn(5, 3, heads.width, generator=generator)
    query, key = (
        Weight(torch.rand(size, generator=generator).requires_grad_(), torch.zeros(size))
        for size in (64, 32)
    )
    found = split_heads(inputs, heads, table, HeadNorms(query, key, 1e-6, "projection"))
    columns = [*inputs.double().split((64, 32, 32), -1)]
    for at, weight in enumerate((query, key)):
        size = columns[at].square().mean(-1, keepdim=True).add(1e-6).sqrt()
        columns[at] = columns[at] / size * weight.value
    expected = split_heads(torch.cat(columns, -1), heads, table)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double())
