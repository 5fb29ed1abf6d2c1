"""Waits for progress do fail: a standstill is reported within the limit, and does not cascade."""

from __future__ import annotations

import time

import pytest
from tests.harness.waiting import Standstill, until


def test_a_wait_goes_on_while_something_moves_and_ends_when_nothing_does() -> None:
    begun_s = time.monotonic()
    looks = 0

    def moves() -> int:
        """Moves at the first looks, which are a quarter of the limit apart at least."""
        nonlocal looks
        looks += 1
        return min(looks, 4 * 3)

    with pytest.raises(
        Standstill, match=r"the moon: no progress for 0\.4 s; still at \d+\nno cheese"
    ):
        until(lambda: False, "the moon", moves, limit_s=0.4, story=lambda: "no cheese")
    assert time.monotonic() - begun_s > 4 * 0.4 - 0.1
    assert until(lambda: looks or None, "what is there already") == looks
