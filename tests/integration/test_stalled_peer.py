"""A rank that waits for a stalled tensor-parallel peer is reported as a victim, not as a cause."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tests.harness.stalled_peer import end_of_a_stall


@pytest.mark.parametrize("axis", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
async def test_a_rank_that_waits_for_a_stalled_peer_is_a_victim(
    axis: Literal["tp", "pp"], tmp_path: Path
) -> None:
    failed, log = await end_of_a_stall(tmp_path, "cpu", axis)
    assert "trainer.parallelism.overlap" not in log
    victim, stalled = failed.workers
    assert (victim.exit_status, victim.error_kind) == (1, "COLLECTIVE"), victim.error
    assert stalled.error_kind == "STOPPED", "alive until the agent stopped it"
