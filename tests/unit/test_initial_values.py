"""Initial values: any part equals the same part of the whole, and they are normal."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_trainer.model.initial_values import _key, _philox, normal, normal_on


@given(start=st.integers(0, 5000), length=st.integers(0, 300), seed=st.integers(0, 2**40))
def test_a_part_is_cut_from_the_whole(start: int, length: int, seed: int) -> None:
    whole = normal("layers.0.q.weight", seed, 0, start + length).astype(np.float32)
    part = normal("layers.0.q.weight", seed, start, start + length).astype(np.float32)
    np.testing.assert_array_equal(part, whole[start:])


def test_values_are_standard_normal_and_differ_by_name_and_seed() -> None:
    values = normal("a", 1, 0, 200_000)
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1.0) < 0.01
    quantiles = np.quantile(values, [0.025, 0.16, 0.5, 0.84, 0.975])
    np.testing.assert_allclose(quantiles, [-1.96, -0.9945, 0.0, 0.9945, 1.96], atol=0.02)
    for other in (normal("b", 1, 0, 200_000), normal("a", 2, 0, 200_000)):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


@given(first=st.integers(0, 2**50), length=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_a_device_draws_the_same_bits_as_the_host(first: int, length: int, seed: int) -> None:
    theirs = np.random.Philox(key=_key("a", seed), counter=first).random_raw(4 * length)
    ours = _philox(torch.device("cpu"), _key("a", seed), range(first, first + length))
    np.testing.assert_array_equal(ours.numpy().view("<u8"), theirs)


@given(start=st.integers(0, 2**45), length=st.integers(0, 300), seed=st.integers(0, 2**40))
def test_a_device_draws_the_same_values_but_for_the_last_place(
    start: int, length: int, seed: int
) -> None:
    theirs = normal("a", seed, start, start + length)
    ours = normal_on(torch.device("cpu"), "a", seed, start, start + length)
    assert ours.shape == (length,)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-6, atol=2e-6)
