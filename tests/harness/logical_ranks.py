"""Group start of single logical ranks of a job of any size, in one process, with a counting store.

The real ``create_groups`` and torch's own calls run. In the place of NCCL stands a backend that
does on the store what ``ProcessGroupNCCL`` does (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
``broadcastUniqueNCCLID`` and ``allgatherUniqueNCCLIDs``, 2.11 to 2.13) and then moves nothing:
the first of a group's ranks sets a unique id and the others get it; above 128 ranks there is one
id for each 128 of them, and every rank gets all in one request.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from megascale_job.layout import RankLayout
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups

UNIQUE_ID = bytes(128)  # ncclUniqueId has 128 bytes
RANKS_PER_ROOT = 128  # TORCH_NCCL_RANKS_PER_ROOT
BACKEND = "logical_nccl"


class CountingStore(dist.Store):
    """Counts operations by name and key. Nothing waits: what is absent has been set by others."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, str]] = []
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Count and keep."""
        self._count("set", key)
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """Count; a unique id where nothing was set."""
        self._count("get", key)
        return self._values.get(key, UNIQUE_ID)

    def add(self, key: str, amount: int) -> int:
        """Count and add."""
        self._count("add", key)
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Count each key."""
        for key in keys:
            self._count("wait", key)

    def check(self, keys: list[str]) -> bool:
        """Count each key."""
        for key in keys:
            self._count("check", key)
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count one operation."""
        self._count("multi_get", keys[0])
        return [self._values.get(key, UNIQUE_ID) for key in keys]

    def has_extended_api(self) -> bool:
        """For PrefixStore's multi_get."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits."""

    def _count(self, name: str, key: str) -> None:
        self.operations.append((name, key))


@dataclass(slots=True)
class Start:
    """What one rank did: groups that torch was asked for, in order, and store operations."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    operations: list[tuple[str, str]] = field(default_factory=list)

    def by_name(self) -> Counter[str]:
        """Number of operations by name."""
        return Counter(name for name, _ in self.operations)


def start_rank(layout: RankLayout, rank: int, **options: Any) -> Start:
    """Create the groups of ``rank``; ``options`` are those of ``create_groups``."""
    store, start = CountingStore(), Start()
    with _recorded(start):
        try:
            create_groups(layout, rank, Rendezvous(store, torch.device("cpu"), 5.0), **options)
        finally:
            destroy_groups()
    start.operations = store.operations
    return start


@contextlib.contextmanager
def _recorded(start: Start) -> Iterator[None]:
    """Have torch use the backend of this module, and record the groups that it is asked for."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    initialise, new_group = dist.init_process_group, dist.new_group

    def recorded(ranks: list[int], *args: Any, **options: Any) -> Any:
        start.groups.append(tuple(ranks))
        return new_group(ranks, *args, **options)

    dist.init_process_group = lambda backend, **options: initialise(BACKEND, **options)
    dist.new_group = recorded
    try:
        yield
    finally:
        dist.init_process_group, dist.new_group = initialise, new_group


def _create(options: Any, backend_options: Any) -> FakeProcessGroup:
    """The exchange of unique ids, and a group whose operations do nothing."""
    rank, size, store = options.group_rank, options.group_size, options.store
    if size <= RANKS_PER_ROOT:
        if rank == 0:
            store.set("0", UNIQUE_ID)
        else:
            store.get("0")
    else:
        roots = -(-size // RANKS_PER_ROOT)
        if rank % RANKS_PER_ROOT == 0:
            store.set(f"UniqueNCCLID:{rank // RANKS_PER_ROOT}", UNIQUE_ID)
        store.multi_get([f"UniqueNCCLID:{root}" for root in range(roots)])
    return FakeProcessGroup._create_internal(rank, size)
