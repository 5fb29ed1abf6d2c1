"""Messages through real shared memory: each with its own values at any timing, and fallbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.peer_messages import LATE, MESSAGE_BYTES
from tests.harness.ranks import RankPool
from tests.harness.training import hiding

from megascale_kernels.overlap.peer_messages import SLOTS

PROGRAMS = "tests.harness.peer_messages"


def test_no_message_is_overwritten_before_it_was_received(pool: RankPool, tmp_path: Path) -> None:
    arguments = {"number": 40, "delay_s": 0.01}
    assert pool.run(f"{PROGRAMS}:exchange", 2, tmp_path, **arguments) == [[], []]


def test_a_send_returns_at_once_and_ends_when_a_slot_was_free(
    pool: RankPool, tmp_path: Path
) -> None:
    sends = pool.run(f"{PROGRAMS}:sends_ahead", 2, tmp_path)[0]
    assert sends["before"] == [True] * SLOTS + [False] * LATE
    assert sends["after"] == [True] * (SLOTS + LATE)


def test_a_message_larger_than_a_slot_is_refused(pool: RankPool, tmp_path: Path) -> None:
    error = f"a message has {MESSAGE_BYTES + 1} bytes, a slot of peer memory {MESSAGE_BYTES}"
    assert pool.run(f"{PROGRAMS}:too_much", 2, tmp_path) == [[error, error]] * 2


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_all_edges_inside_a_host_pass_through_peer_memory(
    pp: int, virtual_stages: int, pool: RankPool, tmp_path: Path
) -> None:
    sizes = {"pp": pp, "virtual_stages": virtual_stages, **hiding("pp", "peer_edges")}
    if virtual_stages > 1:
        sizes["stage_layers"] = [1, 1, 1, 1, *([0] * (pp * virtual_stages - 4))]
    found = pool.run(f"{PROGRAMS}:choice", pp, tmp_path, sizes=sizes, one_host=True)
    edges = 2 * (pp if virtual_stages > 1 else pp - 1)
    ways = [way for rank in found for way in rank["ways"].values()]
    assert ways == ["PeerMessages"] * 2 * edges
    assert all(rank["log"] == [] for rank in found)


def test_ranks_that_opened_fewer_memories_catch_up(pool: RankPool, tmp_path: Path) -> None:
    """See Note [Equal numbers of openings]: the stages within a line open one more each."""
    assert len(set(pool.run(f"{PROGRAMS}:openings", 4, tmp_path))) == 1


@pytest.mark.parametrize(
    ("overlap", "one_host", "cause"),
    [
        (hiding(), True, None),
        (hiding("pp", "peer_edges"), False, "its ranks are on different hosts"),
    ],
    ids=["not set", "two hosts"],
)
def test_the_communicator_is_the_fallback_and_the_log_gives_the_cause(
    overlap: dict[str, Any], one_host: bool, cause: str | None, pool: RankPool, tmp_path: Path
) -> None:
    sizes = {"pp": 2, **overlap}
    for rank in pool.run(f"{PROGRAMS}:choice", 2, tmp_path, sizes=sizes, one_host=one_host):
        assert set(rank["ways"].values()) == {None}
        assert rank["log"] == (
            []
            if cause is None
            else [
                "messages between pipeline stages 0 and 1 do not go through peer memory "
                f"(trainer.parallelism.overlap.peer_edges): {cause}"
            ]
        )


def test_a_message_waits_for_a_rank_that_is_late_at_the_meeting(
    pool: RankPool, tmp_path: Path
) -> None:
    """Its signal is not taken for that of the meeting, nor lost."""
    assert pool.run(f"{PROGRAMS}:late_at_the_meeting", 2, tmp_path, 60) == [[0.0] * 3, [1.0] * 3]
