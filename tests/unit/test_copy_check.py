"""Samples of a copy cover everything in time, and find what differs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_trainer.save.host_copy import MOST_WINDOWS, WINDOW_BYTES, CopyCheck, sampled

SIZE = 8 * WINDOW_BYTES


@given(st.integers(1, 40 * WINDOW_BYTES), st.floats(0.001, 1.0), st.integers(1, 10**6))
def test_samples_lie_inside_and_do_not_overlap(size: int, share: float, step: int) -> None:
    ranges = sampled(size, share, step)
    assert ranges and all(0 <= start < stop <= size for start, stop in ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert sum(stop - start for start, stop in ranges) <= max(2 * share * size, WINDOW_BYTES)


@given(st.integers(1, 10**12), st.floats(0.0001, 0.9))
def test_a_large_state_takes_no_more_launches(size: int, share: float) -> None:
    ranges = sampled(size, share, 7)
    assert 1 <= len(ranges) <= MOST_WINDOWS
    found = sum(stop - start for start, stop in ranges)
    assert found >= 0.9 * share * size - 2 * WINDOW_BYTES


def test_the_samples_of_some_steps_cover_everything() -> None:
    seen = torch.zeros(SIZE, dtype=torch.bool)
    for step in range(1, 400):
        for start, stop in sampled(SIZE, 0.125, step):
            seen[start:stop] = True
    assert bool(seen.all())
    assert sampled(SIZE, 0.0, 1) == [] and sampled(SIZE, 1.0, 1) == [(0, SIZE)]


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_one_flipped_bit_in_a_sample_is_found(at: int) -> None:
    image = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    slot = image.clone()
    assert CopyCheck(image, slot, 1.0, 1).problem() == ""
    slot[at] ^= 1
    assert "not what was on the device" in CopyCheck(image, slot, 1.0, 1).problem()
    assert CopyCheck(image, slot, 0.0, 1).problem() == ""
