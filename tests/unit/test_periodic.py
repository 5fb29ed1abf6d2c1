"""A rhythm keeps its moments, however long the work between them takes."""

from __future__ import annotations

import asyncio

import pytest
from tests.simulation.shell.loop import VirtualLoop

from megascale_common.service.tasks import Periodic


def moments(work_s: list[float], interval_s: float = 1.0) -> list[float]:
    """When each wait after a piece of work ends, in seconds from the first moment."""
    loop = VirtualLoop(seed=1)

    async def run() -> list[float]:
        began_s, rhythm, found = loop.time(), Periodic(interval_s), []
        for seconds in work_s:
            await asyncio.sleep(seconds)
            await rhythm.wait()
            found.append(loop.time() - began_s)
        return found

    return loop.run_until_complete(run())


def test_moments_do_not_drift() -> None:
    assert moments([0.3] * 50) == pytest.approx([float(n) for n in range(1, 51)])


def test_moments_that_pass_during_the_work_are_left_out() -> None:
    assert moments([0.5, 2.25, 0.0, 0.5]) == pytest.approx([1.0, 4.0, 5.0, 6.0])


def test_work_that_ends_at_a_moment_does_not_wait_for_another() -> None:
    assert moments([0.5, 2.0, 0.5]) == pytest.approx([1.0, 3.0, 4.0])
