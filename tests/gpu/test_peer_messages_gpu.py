"""Messages through peer memory on CUDA: each with its own values at any timing.

Over NVLink and copy engines, one process per device. Pipelines over them, bit for bit as over the
communicator: tests/gpu/test_trainer_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.harness.peer_messages import LATE
from tests.harness.ranks import RankPool

from megascale_kernels.overlap.peer_messages import SLOTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]
PROGRAMS = "tests.harness.peer_messages"


@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_no_message_is_overwritten_before_it_was_received(
    delay_s: float, pool: RankPool, tmp_path: Path
) -> None:
    arguments = {"number": 200, "delay_s": delay_s}
    assert pool.run(f"{PROGRAMS}:exchange", 2, tmp_path, 120, **arguments) == [[], []]


def test_a_send_returns_at_once_and_ends_when_a_slot_was_free(
    pool: RankPool, tmp_path: Path
) -> None:
    sends = pool.run(f"{PROGRAMS}:sends_ahead", 2, tmp_path, 120)[0]
    assert sends["before"] == [True] * SLOTS + [False] * LATE
    assert sends["after"] == [True] * (SLOTS + LATE)


def test_ranks_that_have_opened_fewer_memories_catch_up(pool: RankPool, tmp_path: Path) -> None:
    """As a stage between two others has; torch numbers openings by process."""
    assert pool.run(f"{PROGRAMS}:one_is_ahead", 2, tmp_path, 60) == [[1.0] * 3, [0.0] * 3]
