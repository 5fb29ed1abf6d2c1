"""The state machine of one rank's snapshot slots: pure bookkeeping, no memory and no I/O.

    free ──acquire──▶ writing ──begin_seal──▶ sealing ──finish_seal──▶ sealed ──acquire──▶ writing
      ▲                  │ release, lost connection                      │ discard
      └──────────────────┴───────────────────────────────────────────────┘
    free ──take_for_restore──▶ restoring ──release──▶ free
    restoring ──finish_fetch──▶ sealed
    unpopulated ──populated──▶ free (its memory gets its pages)
    sealed by attempt n ──adopt──▶ queued for storage by attempt n + 1, which restored it

A sealed slot is kept for restores from memory until a newer one replaces it. Three rules make that
safe: sealed slots are persisted in the order of their steps, and none is written again before that;
a slot that is being read is not written; the newest sealed slot is never handed out for writing.

Of the steps that all ranks copy to their peers, the newest two are held: the one that is being
copied, and the one before, which is whole everywhere. After the loss of a node all other ranks
restart from one of them. When the ranks decide to copy the next, the first is whole everywhere, and
the second is released.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from megascale_checkpoint.checksums import CHUNK_BYTES, balanced
from megascale_checkpoint.concurrency import Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_common.service import tasks
from megascale_common.service.errors import LimitError, RequestError
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.memory import HELD_FOR_REPLICAS, LEAST_SLOTS, REPLICA_SLOTS


class SlotPhase(enum.Enum):
    """What a slot is used for."""

    UNPOPULATED = "unpopulated"
    FREE = "free"
    WRITING = "writing"
    SEALING = "sealing"
    SEALED = "sealed"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True)
class SlotSeal:
    """Seal record: the slot holds the whole state of the rank after ``step``.

    Attributes:
        checksums: xxh3-128 of each piece, in the layout's order.
        small_state: data position, random state and counters, as plain JSON values.
    """

    attempt: int
    step: int
    layout_digest: str
    checksums: tuple[str, ...]
    small_state: dict[str, Any]

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: a later attempt is newer whatever its step, because a restart goes back."""
        return self.attempt, self.step


@dataclass(slots=True)
class Slot:
    """One slot.

    Attributes:
        persist: is to be persisted once it is sealed.
        pending: waits to be persisted.
        adopter: the attempt that persists the state in place of the one that sealed it; 0: none.
        busy: number of readers (persistence, a restoring worker).
        replicate: is to be copied to the peer once it is sealed, until that copy has ended.
        held: kept for a restart without one of the nodes.
        copied: a copy to a peer reads the slot; returns whether it must be let to its end.
    """

    index: int
    phase: SlotPhase = SlotPhase.FREE
    step: int = 0
    seal: SlotSeal | None = None
    persist: bool = False
    pending: bool = False
    adopter: int = 0
    busy: int = 0
    replicate: bool = False
    held: bool = False
    copied: Callable[[], bool] | None = None

    @property
    def in_use(self) -> bool:
        """Whether the slot is being read, waits to be read, or is being filled from storage."""
        return self.pending or self.busy > 0 or self.phase is SlotPhase.RESTORING


class SlotTable:
    """The slots of one rank."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]

    def unpopulated(self, index: int) -> None:
        """The memory of a free slot is new, and has no pages yet: it is not handed out."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.FREE
        slot.phase = SlotPhase.UNPOPULATED

    def populated(self, index: int) -> None:
        """It has them now."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.UNPOPULATED
        slot.phase = SlotPhase.FREE

    def sealed(self) -> list[SlotSeal]:
        """The seals of all sealed slots, oldest first."""
        return sorted(
            (s.seal for s in self.slots if s.phase is SlotPhase.SEALED and s.seal),
            key=lambda seal: seal.age,
        )

    def find(self, attempt: int, step: int, layout_digest: str) -> Slot | None:
        """The sealed slot that holds exactly this state, if there is one."""
        # The step alone is not enough: two attempts may have sealed it with different values.
        wanted = (attempt, step, layout_digest)
        for slot in self.slots:
            seal = slot.seal
            if (
                slot.phase is SlotPhase.SEALED
                and seal
                and (seal.attempt, seal.step, seal.layout_digest) == wanted
            ):
                return slot
        return None

    def acquire(self, step: int) -> int | None:
        """Reserve a slot for writing: a free one, else the oldest sealed one that is not needed.

        None when all are needed: the snapshot is skipped, and training goes on.
        """
        slot = self._reusable(spare_newest=True)
        if slot is None:
            return None
        self._reuse(slot, SlotPhase.WRITING, step)
        return slot.index

    def take_for_restore(self) -> int:
        """Reserve a slot to fill from storage; as a last resort even the newest sealed one.

        That one may be overwritten, because storage is read only where memory does not hold the
        step that the whole job restores.

        Raises:
            RequestError: every slot is being written or read.
        """
        slot = self._reusable(spare_newest=True) or self._reusable(spare_newest=False)
        if slot is None:
            raise RequestError(
                "no slot is free to restore into: release what is being written first"
            )
        self._reuse(slot, SlotPhase.RESTORING, 0)
        return slot.index

    @property
    def store_ready(self) -> bool:
        """Whether no state waits for storage or is being written to it."""
        return not any(slot.persist or slot.pending for slot in self.slots)

    @property
    def replica_ended(self) -> bool:
        """Whether no state is being copied to the peer, or is going to be."""
        return not any(slot.replicate for slot in self.slots)

    def to_replicate(self) -> Slot | None:
        """The newest sealed slot that is to be copied to the peer."""
        waiting = [s for s in self.slots if s.replicate and s.phase is SlotPhase.SEALED and s.seal]
        return max(waiting, key=_age, default=None)

    def replicate(self, index: int) -> None:
        """The attempt goes on from this sealed state: it is copied to the peer, and no other."""
        self.release_held()
        self._hold(self.at(index))

    def release_held(self) -> None:
        """The attempt goes on from no state of memory: what is held is of no use any more."""
        for slot in self.slots:
            slot.replicate = slot.held = False

    def begin_seal(self, index: int, step: int, *, persist: bool, replicate: bool = False) -> None:
        """The writer has finished; its checksums are computed next, then ``persist`` queues it.

        ``replicate``: all ranks copy this step to their peers, and those before it have ended.

        Raises:
            RequestError: the slot is not being written, or is written for another step.
        """
        slot = self.at(index)
        if slot.phase is not SlotPhase.WRITING or slot.step != step:
            raise RequestError(
                f"slot {index} is {slot.phase.value} (step {slot.step}): "
                f"acquire it for step {step} first"
            )
        slot.phase = SlotPhase.SEALING
        slot.persist = persist
        slot.replicate = replicate

    def finish_seal(self, index: int, seal: SlotSeal) -> None:
        """The checksums are known: seal the slot, and queue it for storage where that is wanted."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.SEALING
        slot.phase = SlotPhase.SEALED
        slot.seal = seal
        slot.pending = slot.persist
        slot.persist = False
        if slot.replicate:
            self._hold(slot)

    def finish_fetch(self, index: int, seal: SlotSeal) -> None:
        """A slot that was taken for a restore holds a state of a peer: it counts as sealed here."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.RESTORING
        slot.phase = SlotPhase.SEALED
        slot.step = seal.step
        slot.seal = seal

    def sealing(self, step: int) -> bool:
        """Whether the checksums of ``step`` are being computed."""
        return any(s.phase is SlotPhase.SEALING and s.step == step for s in self.slots)

    def adopt(self, index: int, attempt: int) -> None:
        """Persist a sealed state of an earlier attempt as ``attempt``'s, which goes on from it.

        The seal stays what it is: until every rank has restored, the next attempt may need it.
        """
        slot = self.at(index)
        assert slot.phase is SlotPhase.SEALED
        slot.adopter = attempt
        slot.pending = True

    def release(self, index: int) -> None:
        """Give back a slot that was acquired or restored into, or end the reading of a sealed one.

        Raises:
            RequestError: the slot is neither being written nor being read.
        """
        slot = self.at(index)
        # SEALING only where the checksums could not be computed: the content is lost then.
        if slot.phase in (SlotPhase.WRITING, SlotPhase.RESTORING, SlotPhase.SEALING):
            self._reuse(slot, SlotPhase.FREE, 0)
        elif slot.busy:
            slot.busy -= 1
        else:
            raise RequestError(f"slot {index} is {slot.phase.value}: there is nothing to release")

    def lend(self, index: int) -> None:
        """Protect the sealed slot from reuse while a reader has it; ends with :meth:`release`."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.SEALED
        slot.busy += 1

    def discard(self, index: int) -> None:
        """Free a sealed slot whose content is damaged."""
        self._reuse(self.at(index), SlotPhase.FREE, 0)

    def next_pending(self) -> Slot | None:
        """The oldest slot that waits to be persisted.

        Every rank persists every sealed step, in order: if each rank skipped steps on its own, no
        step might ever be complete on all ranks.
        """
        waiting = [slot for slot in self.slots if slot.pending and slot.seal]
        return min(waiting, key=_age, default=None)

    def supersede(self, attempt: int) -> None:
        """Do not persist states of earlier attempts: they can no longer be committed."""
        # They stay sealed: the new attempt may restore from them.
        for slot in self.slots:
            if slot.seal and max(slot.seal.attempt, slot.adopter) < attempt:
                slot.pending = False
            if slot.phase is SlotPhase.SEALING:
                slot.persist = False
            # What is held stays so: the new attempt may restore it, and says which it goes on from.
            slot.replicate = False

    def at(self, index: int) -> Slot:
        """The slot with this number.

        Raises:
            RequestError: there is none.
        """
        if not 0 <= index < len(self.slots):
            raise RequestError(f"slot {index} does not exist: there are {len(self.slots)}")
        return self.slots[index]

    def _hold(self, slot: Slot) -> None:
        """Have ``slot`` copied, and hold it with the one before, where two are left to write."""
        for each in self.slots:
            each.replicate = each is slot
        slot.held = True
        held = sorted((each for each in self.slots if each.held), key=_age)
        most = min(HELD_FOR_REPLICAS, max(0, len(self.slots) - LEAST_SLOTS))
        for each in held[: len(held) - most]:
            each.held = False

    def _reusable(self, *, spare_newest: bool) -> Slot | None:
        free = next((slot for slot in self.slots if slot.phase is SlotPhase.FREE), None)
        if free is not None:
            return free
        sealed = self.sealed()
        idle = [
            s
            for s in self.slots
            if s.phase is SlotPhase.SEALED and not s.pending and not s.busy and s.seal
            if s.copied is None or not s.copied()
            if not s.held or not spare_newest
        ]
        # A restart restores the newest seal, so it is kept even when all other slots are taken, and
        # the snapshot is skipped instead.
        if spare_newest:
            idle = [slot for slot in idle if slot.seal is not sealed[-1]]
        # One that a copy reads is the last choice, because the copy would end.
        return min(
            idle, key=lambda slot: (slot.held, slot.copied is not None, _age(slot)), default=None
        )

    @staticmethod
    def _reuse(slot: Slot, phase: SlotPhase, step: int) -> None:
        slot.phase = phase
        slot.step = step
        slot.seal = None
        slot.persist = False
        slot.pending = False
        slot.adopter = 0
        slot.busy = 0
        slot.replicate = False
        slot.held = False
        slot.copied = None


def _age(slot: Slot) -> tuple[int, int]:
    return slot.seal.age if slot.seal else (0, 0)


# Checksums of a slot that is being written, computed while its bytes land.
#
# The trainer's copy notes in the slot's last page how many bytes have landed, counted from the
# slot's start. Threads follow that number, so that a seal waits for what landed last alone. Nothing
# depends on the number being true: bytes that change after their checksum are found damaged when
# the slot is persisted, replicated or restored.

SEALING_THREADS = 4  # for one state: checksums run at some 20 GB/s in each
# Between two looks at the number of bytes: before the copy has begun, which may be a step later,
# and while it runs.
WAITING_S, COPYING_S = 0.02, 0.002

Part = tuple[int, int, int]  # index of a piece, and the bytes [start, stop) of the slot


class WrittenSlot(Protocol):
    """The memory of a slot that a trainer writes."""

    @property
    def view(self) -> memoryview:
        """Its bytes."""

    landed_bytes: int


class Landing:
    """The checksums of one slot's pieces, from its acquisition on; runs on the event loop."""

    def __init__(self, layout: ShardLayout, memory: WrittenSlot, pool: ThreadPoolExecutor) -> None:
        memory.landed_bytes = 0
        self._layout = layout
        self._memory = memory
        self._pool = pool
        self._image = memory.view
        self._hashers = [xxhash.xxh3_128() for _ in layout.pieces]
        self._done = 0
        self._ending = asyncio.Event()
        self.following = asyncio.create_task(self._follow(), name="checksums of what lands")

    def end(self) -> None:
        """No checksum is wanted any more; :attr:`following` ends with what its threads now do."""
        self._ending.set()

    async def checksums(self) -> tuple[str, ...]:
        """The checksum of each piece, in the layout's order, once all bytes have landed."""
        self.end()
        await self.following
        await self._advance(self._layout.slot_bytes)
        return tuple(hasher.hexdigest() for hasher in self._hashers)

    async def _follow(self) -> None:
        while not self._ending.is_set():
            landed = min(self._memory.landed_bytes, self._layout.slot_bytes)
            if landed > self._done:
                await self._advance(landed)
                continue
            pause_s = COPYING_S if 0 < self._done < self._layout.slot_bytes else WAITING_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._ending.wait()
            except TimeoutError:
                pass

    async def _advance(self, landed: int) -> None:
        """Add the bytes up to ``landed``; the parts of one piece follow each other in order."""
        parts = [
            (index, max(self._done, first), min(landed, last))
            for index, (first, last) in enumerate(self._bounds())
            if last > self._done and first < landed
        ]
        shares = balanced([stop - start for _, start, stop in parts], SEALING_THREADS)
        await asyncio.gather(
            *(in_pool(self._pool, self._add, [parts[each] for each in share]) for share in shares)
        )
        self._done = landed

    def _bounds(self) -> Sequence[tuple[int, int]]:
        return [
            (piece.slot_offset_bytes, piece.slot_offset_bytes + piece.size_bytes)
            for piece in self._layout.pieces
        ]

    def _add(self, parts: list[Part]) -> None:
        for index, begin, end in parts:
            for start in range(begin, end, CHUNK_BYTES):
                self._hashers[index].update(self._image[start : min(end, start + CHUNK_BYTES)])


# A rank's slots get their pages while the job starts, and a renewed one while it goes on.
#
# A slot is handed out only once it has them all. Nobody waits: before the first step the slot that
# a restore needs is enough, and later a snapshot that finds no slot is skipped.

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
        self._slots = slots
        self._listener = listener
        self._staging = staging
        self._pools = pools
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
