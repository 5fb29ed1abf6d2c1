"""One rank's restores: a state is brought into a slot, from sealed memory or from storage.

Threads only read or fill the memory of a slot, and the slot counts as in use until its thread has
ended. :mod:`megascale_checkpoint.rank_snapshots` owns the slots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from megascale_checkpoint import restore
from megascale_checkpoint.checksums import verify_image
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal, in_pool
from megascale_checkpoint.registration import RegisteredRank
from megascale_checkpoint.slots import Slot, SlotSeal, SlotTable
from megascale_checkpoint.staging import SlotMemory
from megascale_common.job.restore import RestorePlan, RestoreSource
from megascale_common.service import logs
from megascale_common.service.errors import DamagedError, RequestError

log = logs.get("restore")


class RestoreListener(Protocol):
    """What a rank's restores report to their job."""

    changed: Signal

    def note_restored(self, source: str, duration_s: float, size_bytes: int) -> None:
        """A state was restored into a slot."""


class RankSlots(Protocol):
    """The slots that a rank's restores read and fill."""

    registration: RegisteredRank
    memories: list[SlotMemory]
    table: SlotTable

    def release(self, index: int) -> None:
        """See :meth:`SlotTable.release`."""

    async def sealed(self) -> None:
        """Wait until no checksums are being computed any more."""


@dataclass(frozen=True, slots=True)
class Restoration:
    """A restored state: the worker reads ``slot``, then releases it."""

    slot: int
    source: RestoreSource
    small_state: dict[str, Any]
    bytes_read: int


class RankRestores:
    """The restores of one (job, rank)."""

    def __init__(self, slots: RankSlots, listener: RestoreListener, pools: Pools) -> None:
        self._slots, self._listener, self._pools = slots, listener, pools
        self._running: dict[asyncio.Task[Restoration], Cancellation] = {}

    @property
    def in_progress(self) -> bool:
        """Whether a thread may still fill or read a slot."""
        return bool(self._running)

    def cancel(self) -> Iterable[asyncio.Task[Restoration]]:
        """Ask all to stop; the caller awaits the tasks that are returned."""
        for cancelled in self._running.values():
            cancelled.cancel()
        return list(self._running)

    async def restore(self, plan: RestorePlan) -> Restoration:
        """Restore a state: from the own sealed slot if it holds exactly that state, else storage.

        When the caller is cancelled, the slot is released once the thread that uses it has ended.

        Raises:
            DamagedError: a file, or with source memory the slot, is not what was written.
            RequestError: the source is memory, but no slot holds the state; or the uri is not
                supported.
            OSError: the storage does not answer.
        """
        # A task of its own: cancelling it would leave the thread running, and release a slot that
        # the thread still fills. The caller's cancellation only asks the thread to stop.
        began_s, cancelled = time.monotonic(), Cancellation()
        task = asyncio.create_task(self._restore(plan, cancelled))
        self._running[task] = cancelled
        task.add_done_callback(self._running.pop)
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.cancel()
            task.add_done_callback(self._give_back)
            raise
        self._listener.note_restored(found.source, time.monotonic() - began_s, found.bytes_read)
        return found

    def _give_back(self, task: asyncio.Task[Restoration]) -> None:
        """Release the slot of a restore whose caller is gone."""
        if not task.cancelled() and task.exception() is None:
            self._slots.release(task.result().slot)

    async def _restore(self, plan: RestorePlan, cancelled: Cancellation) -> Restoration:
        slot = self._slots.table.find(
            plan.written_by_attempt, plan.step, self._slots.registration.digest
        )
        if slot is not None and slot.seal is not None:
            try:
                return await self._restore_from_memory(slot, slot.seal)
            except DamagedError as error:
                self._slots.table.discard(slot.index)
                self._listener.changed.notify()
                if plan.source is RestoreSource.MEMORY:
                    raise
                log.warning("sealed slot is damaged; reading storage instead", error=str(error))
        if plan.source is RestoreSource.MEMORY:
            raise RequestError(
                f"step {plan.step} of attempt {plan.written_by_attempt} is not sealed here in this "
                "layout"
            )
        return await self._restore_from_storage(plan.step, plan.manifest_uri, cancelled)

    async def _restore_from_memory(self, slot: Slot, seal: SlotSeal) -> Restoration:
        self._slots.table.lend(slot.index)
        memory = self._slots.memories[slot.index]
        layout = self._slots.registration.layout
        try:
            await in_pool(
                self._pools.memory,
                verify_image,
                layout,
                memory.view,
                seal.checksums,
                str(memory.path),
            )
        except BaseException:
            self._slots.table.release(slot.index)
            raise
        return Restoration(slot.index, RestoreSource.MEMORY, seal.small_state, 0)

    async def _restore_from_storage(
        self, step: int, manifest_uri: str, cancelled: Cancellation
    ) -> Restoration:
        index = self._slots.table.take_for_restore()
        memory, given = self._slots.memories[index], self._slots.registration
        self._listener.changed.notify()
        try:
            filled = await in_pool(
                self._pools.storage,
                restore.fill,
                manifest_uri,
                step,
                given.rank,
                given.layout,
                memory.view,
                cancelled,
            )
        except BaseException:
            self._slots.table.release(index)
            raise
        return Restoration(index, RestoreSource.STORAGE, filled.small_state, filled.bytes_read)
