"""How many store operations a start takes, counted for jobs of up to 12,288 ranks.

Single ranks run the real ``create_groups`` and torch's own calls on a store that counts
(tests/harness/logical_ranks.py). They do what `benchmarks/store_clients.py` says, operation by
operation, and that is counted for all ranks.
"""

from __future__ import annotations

import io
import resource
import sys
from collections import Counter

import pytest
import torch.distributed as dist
from benchmarks import store_clients
from benchmarks.store_clients import operation_count, operations
from tests.harness.logical_ranks import start_rank
from torch.distributed import TCPStore

from megascale_job.layout import RankLayout
from megascale_trainer.process.bootstrap import RANK_TABLE_KEY, READY_RANKS_KEY, await_all_ranks
from megascale_trainer.process.group_plan import group_plan
from megascale_trainer.process.system import OWN_DESCRIPTORS, make_room

# The paper's layouts: tensor parallelism of 8, pipelines of 8 with interleaving.
PAPER = {2_048: RankLayout(tp=8, dp=32, pp=8), 12_288: RankLayout(tp=8, dp=192, pp=8)}
SMALL = [
    RankLayout(tp=2, dp=2, pp=1),
    RankLayout(tp=1, dp=3, pp=2),
    RankLayout(tp=2, dp=1, pp=3),
    RankLayout(tp=2, dp=3, pp=5),
]
MOST_GROUPS = 9  # of a rank beside the world: tp, dp, two in each of three rounds, tied
MOST_OPERATIONS = 21  # of a rank, the look-up of the rank table included

# Ranks: operations of all ranks, and the most of one rank. The first grows in proportion; above 128
# ranks a group has a unique id for each 128 of them, which one rank sets beside what it gets.
TABLE = {2_048: (37_904, 20), 12_288: (227_552, 21)}


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look-up of the host's name, as with a GPU."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def _sample(layout: RankLayout) -> list[int]:
    """Ranks of the first, an inner and the last stage: first and last ones, and one between."""
    stage = layout.world_size // layout.pp
    stages, within = {0, layout.pp // 2, layout.pp - 1}, {0, stage // 2 + 1, stage - 1}
    return sorted({pp * stage + at for pp in stages for at in within if at < stage})


@pytest.mark.parametrize("ring", [False, True], ids=["line", "ring"])
@pytest.mark.parametrize("layout", [*SMALL, *PAPER.values()], ids=lambda each: each.world_size)
def test_a_rank_creates_its_own_groups_and_meets_the_others_once(
    layout: RankLayout, ring: bool
) -> None:
    """Whatever the size of the job: no group of others, no barrier but the one at the end."""
    for rank in _sample(layout):
        start = start_rank(layout, rank, ring=ring, tied=True)
        plan = group_plan(layout, rank, ring=ring, tied=True)
        assert start.groups == [planned.ranks for planned in plan]
        assert all(rank in ranks for ranks in start.groups)
        assert len(start.groups) <= MOST_GROUPS and len(start.operations) < MOST_OPERATIONS
        assert [name for name, _ in start.operations].count("add") == 1
        assert start.operations[-2] == ("add", READY_RANKS_KEY)
        expected = [
            (each.name, each.keys[0])
            for each in operations(layout, rank, ring=ring, tied=True, device="cpu")
            if each.keys != (RANK_TABLE_KEY,)  # which the worker compares before
        ]
        assert start.operations == expected


def test_the_operations_of_all_ranks_grow_with_their_number_and_no_faster() -> None:
    for ranks, (total, most) in TABLE.items():
        layout = PAPER[ranks]

        def count(rank: int, layout: RankLayout = layout) -> int:
            return operation_count(layout, rank, ring=True, tied=True)

        for rank in _sample(layout):
            assert count(rank) == len(list(operations(layout, rank, ring=True, tied=True)))
        # Of a tensor-parallel group the first sets what the others get, who so do the same.
        others = layout.tp - 1
        by_group = [(count(rank), count(rank + 1)) for rank in range(0, ranks, layout.tp)]
        assert sum(first + others * other for first, other in by_group) == total
        assert max(map(max, by_group)) == most <= MOST_OPERATIONS
    layout = PAPER[2_048]
    every = [operation_count(layout, rank, ring=True, tied=True) for rank in range(2_048)]
    assert (sum(every), max(every)) == TABLE[2_048]
    small, large = (total / ranks for ranks, (total, _) in TABLE.items())
    assert large / small < 1.01


@pytest.mark.parametrize("layout", [*SMALL, PAPER[2_048]], ids=lambda each: each.world_size)
def test_all_members_create_a_group_as_the_same_one_in_their_sequence(layout: RankLayout) -> None:
    """torch names a group by its ranks and the number of groups that a rank has."""
    created: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
    for rank in range(layout.world_size):
        plan = group_plan(layout, rank, ring=True, tied=True)
        created.update((place, each.name, each.ranks) for place, each in enumerate(plan))
    assert all(count == len(ranks) for (_, _, ranks), count in created.items())


def test_emulated_ranks_do_their_operations_on_torchs_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The protocol of the benchmark's clients is that of TCPStore, and all pass the barrier."""
    ranks = 192  # more than one unique id for the world
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    options = {
        "layout": {"tp": 8, "dp": ranks // 64, "pp": 8}, "address": ("127.0.0.1", store.port),
        "prefix": "bench/1", "ring": True, "tied": False, "limit_s": 60.0,
    }  # fmt: skip
    found = store_clients.run(options, list(range(ranks)))
    assert set(found["ended_s"]) == {"connected", "world", "groups", "all ranks"}
    kept = dist.PrefixStore("bench/1", store)
    assert kept.get(READY_RANKS_KEY) == b"192"
    layout = RankLayout(**options["layout"])  # type: ignore[arg-type]
    for operation in operations(layout, 9, ring=True):
        if operation.size:
            assert all(len(kept.get(key)) == operation.size for key in operation.keys)


def test_a_barrier_for_each_group_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count sees what torch does on the store: this variable of its own adds barriers."""
    ordinary = len(start_rank(SMALL[-1], 0).operations)
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    monkeypatch.setattr(dist.distributed_c10d, "_store_based_barrier", _barrier)
    with_barriers = start_rank(SMALL[-1], 0)
    groups = 1 + len(with_barriers.groups)
    assert len(with_barriers.operations) == ordinary + groups


def _barrier(rank: int, store: dist.Store, name: str, *_: object) -> None:
    """Of torch's, the first operation: the others would wait for ranks that do not run."""
    store.add(f"{dist.distributed_c10d.STORE_BASED_BARRIER_PREFIX}:{name}", 1)


def test_a_rank_that_has_no_groups_is_missed_with_a_number() -> None:
    store = dist.HashStore()
    store.add(READY_RANKS_KEY, 1)
    with pytest.raises(RuntimeError, match=r"timed out: 2 of 3 ranks have their groups after 0\.1"):
        await_all_ranks(store, 3, timeout_s=0.1)
    await_all_ranks(store, 3, timeout_s=0.1)


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 1 << 20), 12_288 + OWN_DESCRIPTORS),
        ((1 << 16, 1 << 20), None),
        ((1024, resource.RLIM_INFINITY), 12_288 + OWN_DESCRIPTORS),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_process_of_the_store_makes_room_for_all_ranks(
    limits: tuple[int, int], wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: raised.append(to))
    make_room(12_288)
    assert raised == ([] if wanted is None else [(wanted, limits[1])])


def test_a_node_whose_limit_is_too_low_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(OSError, match=r"needs 13312 file descriptors.* 4096: raise Limit"):
        make_room(12_288)
