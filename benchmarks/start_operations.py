"""What one rank does on the rendezvous store when a job starts, operation by operation. Pure.

The sequence is that of :mod:`megascale_trainer.process.group_plan` with torch's names of groups and
ProcessGroupNCCL's exchange of unique ids: the first of a group's ranks sets one and the others get
it; above 128 ranks there is one for each 128 of them and every rank gets all in one request
(``broadcastUniqueNCCLID``, ``allgatherUniqueNCCLIDs``). tests/unit/test_group_start.py compares it
with what torch's own calls do.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megascale_job.layout import RankLayout
from megascale_trainer.process.bootstrap import ALL_READY_KEY, RANK_TABLE_KEY, READY_RANKS_KEY
from megascale_trainer.process.group_plan import group_plan

UNIQUE_ID_BYTES = 128  # of ncclUniqueId
RANKS_PER_ROOT = 128  # TORCH_NCCL_RANKS_PER_ROOT
TABLE_BYTES = 32  # digits of the rank table's digest
ADDRESS_BYTES = 162  # of gloo's address of a rank
WORLD = "0"  # torch's name of it

Name = Literal["set", "get", "multi_get", "add", "wait"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of torch's store. ``size``: bytes of each value that is set or gotten."""

    name: Name
    keys: tuple[str, ...]
    size: int = 0


def operations(
    layout: RankLayout, rank: int, *, ring: bool = False, tied: bool = False, device: str = "cuda"
) -> Iterator[Operation]:
    """All operations of ``rank``, in order, but for the set that ends the barrier.

    Whoever adds the last one to ``READY_RANKS_KEY`` also sets ``ALL_READY_KEY``.
    """
    yield Operation("set" if rank == 0 else "get", (RANK_TABLE_KEY,), TABLE_BYTES)
    everyone = range(layout.world_size)
    yield from _unique_ids(f"{WORLD}//{device}/", rank, len(everyone))
    for created, planned in enumerate(group_plan(layout, rank, ring=ring, tied=tied), start=1):
        name = _hashed_name(planned.ranks, created)
        if planned.kind == "alone":
            yield from _alone(f"{WORLD}//{name}//cpu//0/0")
            continue
        index = planned.ranks.index(rank)
        yield from _unique_ids(f"{WORLD}//{name}//{device}/", index, len(planned.ranks))
    yield Operation("add", (READY_RANKS_KEY,))
    yield Operation("wait", (ALL_READY_KEY,))


def operation_count(
    layout: RankLayout, rank: int, *, ring: bool = False, tied: bool = False
) -> int:
    """How many operations a rank has, without their keys: for all ranks of a large job."""
    found = 3 + _exchanged(rank, layout.world_size)  # the table of ranks, and the barrier's two
    for planned in group_plan(layout, rank, ring=ring, tied=tied):
        ranks = planned.ranks
        alone = planned.kind == "alone"
        found += _ALONE if alone else _exchanged(ranks.index(rank), len(ranks))
    return found


@functools.lru_cache(maxsize=1 << 16)
def _exchanged(index: int, size: int) -> int:
    return sum(1 for _ in _unique_ids("", index, size))


def _unique_ids(prefix: str, index: int, size: int) -> Iterator[Operation]:
    if size <= RANKS_PER_ROOT:
        yield Operation("get" if index else "set", (f"{prefix}/0",), UNIQUE_ID_BYTES)
        return
    roots = _root_keys(prefix, size)
    if index % RANKS_PER_ROOT == 0:
        yield Operation("set", (roots[index // RANKS_PER_ROOT],), UNIQUE_ID_BYTES)
    yield Operation("multi_get", roots, UNIQUE_ID_BYTES)


@functools.lru_cache(maxsize=256)  # a group's ranks ask for it one after the other
def _root_keys(prefix: str, size: int) -> tuple[str, ...]:
    return tuple(f"{prefix}/UniqueNCCLID:{n}" for n in range(-(-size // RANKS_PER_ROOT)))


def _alone(key: str) -> Iterator[Operation]:
    """A group of one of gloo, which publishes the rank's address and waits for all of them."""
    yield Operation("set", (key,), ADDRESS_BYTES)
    yield Operation("wait", (key,))
    yield Operation("get", (key,), ADDRESS_BYTES)


_ALONE = sum(1 for _ in _alone(""))


@functools.lru_cache(maxsize=256)
def _hashed_name(ranks: tuple[int, ...], created: int) -> str:
    """torch's name of a group (``_hash_ranks_to_str``) of a rank that has ``created`` of them."""
    text = "_".join(map(str, (*ranks, created)))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
