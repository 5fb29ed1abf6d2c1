"""One rank's restores: a state is brought into a slot, from sealed memory or from storage.

Threads only read or fill the memory of a slot, and the slot counts as in use until its thread has
ended. :mod:`megascale_checkpoint.save.rank_snapshots` owns the slots.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from megascale_checkpoint.checksums import balanced, verify_image
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import OwnSlots, Slot, SlotPhase, SlotSeal
from megascale_checkpoint.replicas.protocol import SealedState, StateKey
from megascale_checkpoint.restore.stored_checkpoint import StoredCheckpoint, fill
from megascale_common.service import logs
from megascale_common.service.errors import (
    DamagedError,
    NotReadyError,
    RequestError,
    ServiceError,
)
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.read_plan import Read, Runs

T = TypeVar("T")
log = logs.get("restore")
SLOT_WAIT_S = 30.0  # what persists for the attempt before has been asked to stop
PEER = "peer"  # as a source of restores in metrics; to its rank the state is memory then
READERS = 4  # threads that fill one window


class RestoreListener(Protocol):
    """What a rank's restores report to their job."""

    changed: Signal

    def note_restored(self, source: str, duration_s: float, size_bytes: int) -> None:
        """A state was restored into a slot, or windows of one were read through it."""

    def note_damaged(self, rank: int, attempt: int, step: int, problem: str) -> None:
        """A sealed slot is not what was sealed, and has been discarded."""


class ReplicaReader(Protocol):
    """Reads the replica of a state from the node that keeps it."""

    async def fetch(
        self, given: RegisteredRank, key: StateKey, image: memoryview, cancelled: Cancellation
    ) -> SealedState:
        """Fill ``image``, and verify it; raises ServiceError where that is not possible."""


class RankSlots(OwnSlots, Protocol):
    """The slots that a rank's restores read and fill."""

    def release(self, index: int) -> None:
        """See :meth:`SlotTable.release`."""

    async def sealed(self) -> None:
        """Wait until no checksums are being computed any more."""

    def adopt(self, index: int) -> None:
        """The attempt goes on from this state, which is in memory alone: persist it as its own."""

    def replicate(self, index: int) -> None:
        """The attempt goes on from this state: have it copied to the peer."""


@dataclass(frozen=True, slots=True)
class Restoration:
    """A restored state: the worker reads ``slot``, then releases it."""

    slot: int
    source: RestoreSource
    small_state: dict[str, Any]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class MemoryProblem:
    """Why memory does not hold a state; ``damage`` where a slot did, and is damaged."""

    text: str
    damage: DamagedError | None = None


@dataclass(frozen=True, slots=True)
class FoundInMemory:
    """A state that threads still compare with its seal; ``verdict`` is None where it is whole.

    ``arriving``: it comes from a peer, and is lent to the caller once the verdict is there; then
    ``arrived`` has it.
    """

    restoration: Restoration
    verdict: asyncio.Task[MemoryProblem | None]
    cancelled: Cancellation
    arriving: bool = False
    arrived: list[SealedState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoredReads:
    """An open checkpoint, and the slot that its windows are read into."""

    slot: int
    stored: StoredCheckpoint
    cancelled: Cancellation
    began_s: float


class RankRestores:
    """The restores of one (job, rank)."""

    def __init__(self, slots: RankSlots, listener: RestoreListener, pools: Pools) -> None:
        self._slots = slots
        self._listener = listener
        self._pools = pools
        self._running: dict[asyncio.Task[Any], Cancellation] = {}
        self.replicas: ReplicaReader | None = None

    @property
    def in_progress(self) -> bool:
        """Whether a thread may still fill or read a slot."""
        return bool(self._running)

    def cancel(self) -> Iterable[asyncio.Task[Any]]:
        """Ask all to stop; the caller awaits the tasks that are returned."""
        for cancelled in self._running.values():
            cancelled.cancel()
        return list(self._running)

    def release(self, slot: int) -> None:
        """Give back a slot that was lent, in the place of a caller that is gone."""
        self._slots.release(slot)

    async def restore(self, plan: RestorePlan) -> Restoration:
        """Restore a state: from the own sealed slot if it holds exactly that state, else storage.

        This is the restore of a rank alone. Ranks that restore together ask for their memory
        (:meth:`look_in_memory`) and read what none has with :meth:`open_stored`.

        Raises:
            DamagedError: a file, or where nothing is stored the slot, is not what was written.
            RequestError: nothing is stored, and no slot holds the state; or the uri is not
                supported.
            OSError: the storage does not answer.
        """
        began_s, cancelled = time.monotonic(), Cancellation()
        found = await self._shielded(self._restore(plan, cancelled), cancelled, _slot_of)
        self._listener.note_restored(found.source, time.monotonic() - began_s, found.bytes_read)
        return found

    async def find_in_memory(self, plan: RestorePlan) -> FoundInMemory | MemoryProblem:
        """As :meth:`look_in_memory`, without waiting for the checksums: they have begun."""
        began_s, cancelled = time.monotonic(), Cancellation()
        work = self._find_and_verify(plan, cancelled)
        found = await self._shielded(work, cancelled, _slot_found)
        if isinstance(found, FoundInMemory) and not found.arriving:
            found.verdict.add_done_callback(lambda ended: self._note_verified(ended, began_s))
        return found

    def _note_verified(self, ended: asyncio.Task[MemoryProblem | None], began_s: float) -> None:
        if not ended.cancelled() and ended.exception() is None and ended.result() is None:
            self._listener.note_restored(RestoreSource.MEMORY, time.monotonic() - began_s, 0)

    async def look_in_memory(self, plan: RestorePlan) -> Restoration | MemoryProblem:
        """The own sealed slot that holds the state of ``plan``, verified; or why there is none.

        A damaged slot is discarded and reported.
        """
        began_s = time.monotonic()
        cancelled = Cancellation()
        found = await self._shielded(self._from_memory(plan, cancelled), cancelled, _slot_of)
        if isinstance(found, Restoration):
            self._listener.note_restored(found.source, time.monotonic() - began_s, 0)
        return found

    async def open_stored(self, plan: RestorePlan) -> StoredReads:
        """Open the checkpoint of ``plan``, and reserve a slot for windows of it.

        Raises:
            DamagedError: the manifest is not the one that was committed.
            RequestError: there is none on this node, the uri is not supported, or no slot is free.
            OSError: the storage does not answer.
        """
        began_s, cancelled = time.monotonic(), Cancellation()
        opening = in_pool(self._pools.storage, StoredCheckpoint.open, plan, cancelled)
        stored = await self._shielded(opening, cancelled, lambda _: None)
        self._slots.table.release_held()
        slot = await self._take_slot()
        return StoredReads(slot, stored, cancelled, began_s)

    async def index(self, reads: StoredReads, file: int, first: int, most: int) -> tuple[Runs, int]:
        """Part of the index of a file, and the next piece to ask for (-1: none is left).

        It has at most ``most`` units, or those of one piece.

        Raises: as :meth:`StoredCheckpoint.index`.
        """

        def read() -> tuple[Runs, int]:
            count = reads.stored.fitting(file, first, most)
            following, all_pieces = first + count, reads.stored.piece_count(file)
            runs = reads.stored.index(file, first, count)
            return runs, following if following < all_pieces else -1

        work = in_pool(self._pools.storage, read)
        return await self._shielded(work, reads.cancelled, lambda _: reads.slot)

    async def read(self, reads: StoredReads, at: int, wanted: Sequence[Read]) -> int:
        """Fill the slot from byte ``at`` on; returns how many bytes were read.

        Raises: as :meth:`StoredCheckpoint.read`.
        """
        image = self._slots.memories[reads.slot].view

        def fill(part: Sequence[Read]) -> None:
            for read in part:
                begin = at + read.at
                reads.stored.read(read, image[begin : begin + read.stop - read.start])

        async def fill_all() -> int:
            parts = _shares(wanted)
            work = [in_pool(self._pools.storage, fill, part) for part in parts]
            # All threads end before an error is raised: none may write into the slot afterwards.
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            return sum(read.stop - read.start for read in wanted)

        return await self._shielded(fill_all(), reads.cancelled, lambda _: reads.slot)

    def end_reads(self, reads: StoredReads) -> None:
        """The windows are done with; the caller releases the slot."""
        self._listener.note_restored(
            RestoreSource.STORAGE, time.monotonic() - reads.began_s, reads.stored.bytes_read
        )

    async def _shielded(
        self,
        work: Awaitable[T],
        cancelled: Cancellation,
        slot_of: Callable[[asyncio.Task[T]], int | None],
    ) -> T:
        """Await ``work``; when the caller is cancelled, its slot is released once it has ended."""

        # A task of its own: cancelling it would leave the thread running, and release a slot that
        # the thread still fills. The caller's cancellation only asks the thread to stop.
        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._running[task] = cancelled
        task.add_done_callback(self._running.pop)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.cancel()
            task.add_done_callback(lambda ended: self._give_back(ended, slot_of))
            raise

    def _give_back(
        self, task: asyncio.Task[T], slot_of: Callable[[asyncio.Task[T]], int | None]
    ) -> None:
        """Release the slot of a restore whose caller is gone."""
        if not task.cancelled():
            task.exception()  # marks it as retrieved, or asyncio would log a warning
        slot = slot_of(task)
        if slot is not None:
            self._slots.release(slot)

    async def _restore(self, plan: RestorePlan, cancelled: Cancellation) -> Restoration:
        found = await self._from_memory(plan, cancelled)
        if isinstance(found, Restoration):
            return found
        if plan.manifest_uri:
            return await self._restore_from_storage(plan, cancelled)
        if found.damage is not None:
            raise found.damage
        raise RequestError(found.text)

    async def _from_memory(
        self, plan: RestorePlan, cancelled: Cancellation
    ) -> Restoration | MemoryProblem:
        found = await self._find_and_verify(plan, cancelled)
        if isinstance(found, MemoryProblem):
            return found
        problem = await found.verdict
        if problem is None and found.arrived:
            return replace(found.restoration, small_state=found.arrived[0].small_state)
        return found.restoration if problem is None else problem

    async def _find_and_verify(
        self, plan: RestorePlan, cancelled: Cancellation
    ) -> FoundInMemory | MemoryProblem:
        await self._slots.sealed()
        given, slot = self._slots.registration, self._find(plan)
        if slot is None and self.replicas is not None and given.replica_source:
            return await self._begin_fetch(self.replicas, plan, cancelled)
        if slot is None or slot.seal is None:
            return _not_sealed(plan)
        # Lent twice: the worker may be gone before the threads have ended.
        for _ in range(2):
            self._slots.table.lend(slot.index)
        verdict = self._started(self._verify(slot, slot.seal, plan), Cancellation())
        held = Restoration(slot.index, RestoreSource.MEMORY, slot.seal.small_state, 0)
        return FoundInMemory(held, verdict, cancelled)

    def _started(
        self, work: Coroutine[Any, Any, MemoryProblem | None], cancelled: Cancellation
    ) -> asyncio.Task[MemoryProblem | None]:
        task = asyncio.create_task(work)
        self._running[task] = cancelled
        task.add_done_callback(self._running.pop)
        return task

    async def _verify(self, slot: Slot, seal: SlotSeal, plan: RestorePlan) -> MemoryProblem | None:
        """Compare a lent slot with its seal; a damaged one is discarded, and reported."""
        given, memory = self._slots.registration, self._slots.memories[slot.index]
        what = (given.layout, memory.view, seal.checksums, str(memory.path))
        sizes = [piece.size_bytes for piece in given.layout.pieces]
        work = [
            in_pool(self._pools.memory, verify_image, *what, share)
            for share in balanced(sizes, self._pools.threads)
        ]
        try:
            # All threads end before an error is raised: none may read the slot afterwards.
            for problem in await asyncio.gather(*work, return_exceptions=True):
                if problem is not None:
                    raise problem
        except DamagedError as error:
            if slot.seal is seal:
                self._slots.table.discard(slot.index)
            self._listener.note_damaged(given.rank, plan.written_by_attempt, plan.step, str(error))
            return MemoryProblem(str(error), error)
        finally:
            if slot.seal is seal:  # else it was discarded, and nobody has it any more
                slot.busy -= 1
        if slot.seal is seal:
            self._goes_on_from(slot.index, plan)
        return None

    def _goes_on_from(self, index: int, plan: RestorePlan) -> None:
        if not plan.manifest_uri:
            self._slots.adopt(index)
        self._slots.replicate(index)

    async def _begin_fetch(
        self, replicas: ReplicaReader, plan: RestorePlan, cancelled: Cancellation
    ) -> FoundInMemory | MemoryProblem:
        """Begin to bring the replica of a lost node's rank into a slot."""
        try:
            index = await self._take_slot()
        except ServiceError as error:
            return _not_sealed(plan, f", and its replica cannot be read: {error}")
        arrived: list[SealedState] = []
        fetching = self._fetch(replicas, plan, index, cancelled, arrived)
        expected = Restoration(index, RestoreSource.MEMORY, {}, 0)
        return FoundInMemory(expected, self._started(fetching, cancelled), cancelled, True, arrived)

    async def _fetch(
        self,
        replicas: ReplicaReader,
        plan: RestorePlan,
        index: int,
        cancelled: Cancellation,
        arrived: list[SealedState],
    ) -> MemoryProblem | None:
        """Fill a slot from the replica, and seal and lend it: what has arrived is verified."""
        given, began_s = self._slots.registration, time.monotonic()
        key = StateKey(given.job, given.rank, plan.written_by_attempt, plan.step, given.digest)
        image = self._slots.memories[index].view
        try:
            state = await replicas.fetch(given, key, image, cancelled)
        except (ServiceError, OSError) as error:
            self._slots.release(index)
            return _not_sealed(plan, f", and its replica cannot be read: {error}")
        except BaseException:
            self._slots.release(index)
            raise
        checksums = tuple(piece.checksum for piece in state.pieces)
        seal = SlotSeal(key.attempt, key.step, key.layout_digest, checksums, state.small_state)
        self._slots.table.finish_fetch(index, seal)
        self._slots.table.lend(index)
        arrived.append(state)
        spent_s = time.monotonic() - began_s
        self._listener.note_restored(PEER, spent_s, state.size_bytes)
        log.info(
            "replica fetched",
            job=given.job,
            rank=given.rank,
            step=plan.step,
            size_bytes=state.size_bytes,
            spent_s=round(spent_s, 3),
        )
        self._goes_on_from(index, plan)
        return None

    def _find(self, plan: RestorePlan) -> Slot | None:
        """The slot with the planned state, as its attempt sealed it or a later one adopted it."""
        table, digest = self._slots.table, self._slots.registration.digest
        found = table.find(plan.written_by_attempt, plan.step, digest)
        if found is not None:
            return found
        for slot in table.slots:
            seal = slot.seal if slot.phase is SlotPhase.SEALED and slot.adopter else None
            wanted = (plan.written_by_attempt, plan.step, digest)
            if seal and (slot.adopter, seal.step, seal.layout_digest) == wanted:
                return slot
        return None

    async def _take_slot(self) -> int:
        """A slot to read into; waits while all are still read for the attempt before.

        Raises:
            NotReadyError: none became free in time.
        """
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                while True:
                    try:
                        index = self._slots.table.take_for_restore()
                    except RequestError as error:
                        problem = str(error)
                        await self._listener.changed.wait()
                        continue
                    self._listener.changed.notify()
                    return index
        except TimeoutError as error:
            raise NotReadyError(f"{problem} (waited for {SLOT_WAIT_S:g} s)") from error

    async def _restore_from_storage(
        self, plan: RestorePlan, cancelled: Cancellation
    ) -> Restoration:
        self._slots.table.release_held()
        index = await self._take_slot()
        memory, given = self._slots.memories[index], self._slots.registration
        try:
            filled = await in_pool(
                self._pools.storage,
                functools.partial(fill, alone=given.world_size == 1),
                plan,
                given.rank,
                given.layout,
                memory.view,
                cancelled,
            )
        except BaseException:
            self._slots.table.release(index)
            raise
        return Restoration(index, RestoreSource.STORAGE, filled.small_state, filled.bytes_read)


def _slot_of(
    task: asyncio.Task[Restoration | MemoryProblem] | asyncio.Task[Restoration],
) -> int | None:
    if task.cancelled() or task.exception() is not None:
        return None
    found = task.result()
    return found.slot if isinstance(found, Restoration) else None


def _slot_found(task: asyncio.Task[FoundInMemory | MemoryProblem]) -> int | None:
    if task.cancelled() or task.exception() is not None:
        return None
    found = task.result()
    if not isinstance(found, FoundInMemory) or found.arriving:
        return None
    return found.restoration.slot


def _not_sealed(plan: RestorePlan, no_replica: str = "") -> MemoryProblem:
    return MemoryProblem(
        f"step {plan.step} of attempt {plan.written_by_attempt} is not sealed here in this "
        f"layout{no_replica}"
    )


def _shares(reads: Sequence[Read]) -> list[Sequence[Read]]:
    """About equal runs of ``reads``, one per thread."""
    size = -(-len(reads) // READERS) or 1
    return [reads[begin : begin + size] for begin in range(0, len(reads), size)]
