"""A rank's slots get their pages while the job starts, and a renewed one while it goes on.

A slot is handed out only once it has them all. Nobody waits: before the first step the slot that a
restore needs is enough, and later a snapshot that finds no slot is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from megascale_checkpoint.concurrency import Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import SlotTable
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_common.service import tasks
from megascale_common.service.errors import LimitError
from megascale_job.sizes.staging import REPLICA_SLOTS

# Of a rank's slots: what has its pages when it registers, and one slot at the least.
POPULATED_FIRST_BYTES = 1 << 30


def slots_of(given: RegisteredRank, staging: StagingFolder) -> list[SlotMemory]:
    """The slots of a rank that registers, the first of them populated.

    Raises:
        LimitError: there is no room.
    """
    size_bytes = given.layout.slot_bytes
    beside = REPLICA_SLOTS if given.replica_target else 0
    count = given.slots or staging.affordable_slots(
        size_bytes, given.wanted_slots, given.local_ranks, beside
    )
    return staging.allocate(given.job, given.rank, size_bytes, count, POPULATED_FIRST_BYTES)


class PagesListener(Protocol):
    """What is reported to the job."""

    changed: Signal

    def note_failure(self, rank: int, attempt: int, step: int, error: str) -> None:
        """A slot has no room."""


class OwnSlots(Protocol):
    """The slots of one rank."""

    registration: RegisteredRank
    memories: list[SlotMemory]
    table: SlotTable


class SlotPages:
    """Populates slots of one rank; all state changes happen on the event loop."""

    def __init__(
        self, slots: OwnSlots, listener: PagesListener, staging: StagingFolder, pools: Pools
    ) -> None:
        self._slots, self._listener, self._staging, self._pools = slots, listener, staging, pools
        self._running: set[asyncio.Task[None]] = set()
        self._cancelled = False

    def populate(self, indices: Iterable[int]) -> None:
        """Have these free slots get their pages, one after the other."""
        waiting = list(indices)
        for index in waiting:
            self._slots.table.unpopulated(index)
        if waiting:
            task = tasks.single(self._populate(waiting), "pages of slots")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def renewed(self, indices: list[int]) -> None:
        """As :meth:`populate`; waits where that takes no time that anybody would see."""
        self.populate(indices)
        sizes = (self._slots.memories[index].size_bytes for index in indices)
        if self._running and sum(sizes) <= POPULATED_FIRST_BYTES:
            await asyncio.wait(set(self._running))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ask the threads to stop; the caller awaits the tasks that are returned."""
        self._cancelled = True
        return list(self._running)

    async def _populate(self, indices: list[int]) -> None:
        given = self._slots.registration
        for index in indices:
            memory = self._slots.memories[index]
            try:
                await in_pool(
                    self._pools.populating, self._staging.populate, memory, lambda: self._cancelled
                )
            except LimitError as error:
                # It is one slot less, as where memory was short from the start.
                self._listener.note_failure(given.rank, given.attempt, 0, str(error))
                continue
            if self._cancelled:
                return
            self._slots.table.populated(index)
            self._listener.changed.notify()
