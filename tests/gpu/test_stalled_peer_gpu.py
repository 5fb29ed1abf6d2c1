"""A stalled rank and peer memory: a barrier's timeout ends the CUDA context of ranks that wait."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.harness.stalled_peer import end_of_a_stall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


@pytest.mark.parametrize("axis", ["tp", "pp"])
async def test_a_rank_that_waits_for_a_stalled_peer_is_a_victim(
    axis: Literal["tp", "pp"], tmp_path: Path
) -> None:
    """However it ends: whose error shows the lost context, and in which thread, is up to chance."""
    failed, log = await end_of_a_stall(tmp_path, "cuda", axis)
    assert "trainer.parallelism.overlap" not in log
    victim, stalled = failed.workers
    assert victim.error_kind == "COLLECTIVE", f"{victim.error}\n{log}"
    assert victim.exit_status in (1, -6, -9), f"{victim.error}\n{log}"
    assert stalled.error_kind == "STOPPED", "alive until the agent stopped it"
