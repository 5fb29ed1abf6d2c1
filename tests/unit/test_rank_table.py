"""Ranks that were given different placements of one attempt do not train together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from megascale_trainer.process.bootstrap import compare_rank_tables


def meet(digests: list[str]) -> list[BaseException | None]:
    """What each rank finds when all meet at one store."""
    store = PrefixStore("job/1", HashStore())

    with ThreadPoolExecutor(len(digests)) as pool:
        found = [
            pool.submit(compare_rank_tables, store, rank, digest)
            for rank, digest in enumerate(digests)
        ]
        return [future.exception(timeout=60) for future in found]


def test_ranks_of_one_placement_meet() -> None:
    assert meet(["a1", "a1", "a1"]) == [None, None, None]


def test_a_rank_of_another_placement_is_refused_by_name() -> None:
    found = meet(["a1", "a1", "b2"])
    assert found[:2] == [None, None]
    with pytest.raises(RuntimeError, match="rank 2 was given rank table b2, rank 0 a1"):
        raise found[2] or AssertionError("rank 2 was let in")


def test_without_a_digest_nothing_is_compared() -> None:
    assert meet(["", "", ""]) == [None, None, None]
