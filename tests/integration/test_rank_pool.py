"""Ranks that stay between runs: the same processes, and a failed one leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.harness.ranks import RankFailed, RankPool, rank_pool

PROGRAMS = "tests.integration.test_rank_pool"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(resident=True) as ready:
        yield ready


def meet(rank: int, world_size: int, folder: Path) -> tuple[int, float]:
    """Program of one rank: its process, and the sum of all ranks; the group is left over."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size)
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    return os.getpid(), total.item()


def talk(rank: int, world_size: int, folder: Path) -> int:
    """Program of one rank: it prints a line and returns its number."""
    print(f"rank {rank} of {world_size} has something to say", flush=True)
    return rank


def trip(rank: int, world_size: int, folder: Path, *, how: str) -> None:
    """Program of one rank: the last rank raises or dies, the others wait for it in vain."""
    if rank < world_size - 1:
        time.sleep(60.0)
    if how == "dies":
        os._exit(3)
    raise ValueError("rank trips")


@pytest.mark.slow
def test_ranks_of_a_world_size_stay_and_meet_anew(pool: RankPool, tmp_path: Path) -> None:
    runs = [
        pool.run(f"{PROGRAMS}:meet", size, tmp_path / str(n)) for n, size in enumerate((2, 3, 2))
    ]
    assert [[total for _, total in run] for run in runs] == [[3.0] * 2, [6.0] * 3, [3.0] * 2]
    processes = [{process for process, _ in run} for run in runs]
    assert processes[0] == processes[2]
    assert not processes[0] & processes[1]


@pytest.mark.parametrize(
    ("how", "account"),
    [pytest.param("raises", "rank trips", marks=pytest.mark.slow), ("dies", "exit status 3")],
)
def test_a_failure_takes_its_world_with_it(
    how: str, account: str, pool: RankPool, tmp_path: Path
) -> None:
    before = pool.run(f"{PROGRAMS}:meet", 2, tmp_path / "before")
    with pytest.raises(RankFailed, match=account) as failure:
        pool.run(f"{PROGRAMS}:trip", 2, tmp_path / "trip", how=how)
    assert "rank 0: killed: it stood still" in str(failure.value)
    after = pool.run(f"{PROGRAMS}:meet", 2, tmp_path / "after")
    assert not {process for process, _ in before} & {process for process, _ in after}
    for process, _ in before:
        assert not Path(f"/proc/{process}").exists()


def test_ranks_that_stand_still_are_killed(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0: killed: it stood still"):
        pool.run(f"{PROGRAMS}:trip", 2, tmp_path / "late", limit_s=0.5, how="raises")


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_answer_to_the_next(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise TimeoutError("the test's own time is up")

    with monkeypatch.context() as patched, pytest.raises(TimeoutError):
        patched.setattr("tests.harness.ranks.json.loads", interrupt)
        pool.run(f"{PROGRAMS}:meet", 2, tmp_path / "interrupted")
    assert [total for _, total in pool.run(f"{PROGRAMS}:meet", 3, tmp_path / "next")] == [6.0] * 3
    pool._process.kill()
    with pytest.raises((RankFailed, BrokenPipeError)):
        pool.run(f"{PROGRAMS}:meet", 2, tmp_path / "dead")
    assert [total for _, total in pool.run(f"{PROGRAMS}:meet", 2, tmp_path / "again")] == [3.0] * 2


def test_what_ranks_print_is_not_the_answer_of_the_pool(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(f"{PROGRAMS}:talk", 2, tmp_path) == [0, 1]
