"""One rank's snapshot slots: their state machine, the checksums of a write, and their pages.

:class:`SlotTable` is pure bookkeeping. :class:`Landing` computes the checksums of a slot while the
trainer still writes it, and :class:`SlotPages` allocates the memory of slots ahead of their use.

    free ──acquire──▶ writing ──begin_seal──▶ sealing ──finish_seal──▶ sealed ──acquire──▶ writing
      ▲                  │ release, lost connection                      │ discard
      └──────────────────┴───────────────────────────────────────────────┘
    free ──take_for_restore──▶ restoring ──release──▶ free
    restoring ──finish_fetch──▶ sealed
    unpopulated ──populated──▶ free (its memory has its pages)
    sealed by attempt n ──adopt──▶ queued for storage by attempt n + 1, which restored it

Note [Slots and seal order]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A sealed slot stays available for restores from memory until a newer one replaces it. Three rules
make that safe.
1. Sealed slots are persisted in the order of their steps, and a slot that waits for storage is not
   handed out. If each rank skipped steps on its own, no step might ever be complete on all ranks.
2. A slot that a thread or worker reads is not written; ``busy`` counts its readers.
3. The newest sealed slot is never handed out for writing. A restart needs it, so when all others
   are taken the new snapshot is skipped instead.
"Newest" compares the attempt before the step, because a restart goes back to an earlier step.

Note [Held replicas]
~~~~~~~~~~~~~~~~~~~~
After the loss of a node, its rank restores from a copy at a peer, and all other ranks must still
hold the same step. Copies take longer than steps and do not end at the same time everywhere. So the
newest two of the steps that are copied are held: the one in progress, which may be incomplete
somewhere, and the one before, which is whole everywhere. When the ranks decide to copy a further
step, the one in progress is whole everywhere by then, and only then is the older one released.
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
from megascale_job.sizes.memory import HELD_FOR_REPLICAS, LEAST_SLOTS


class SlotPhase(enum.Enum):
    """The use of a slot."""

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
        """Sort key: a later attempt is newer whatever its step; see Note [Slots and seal order]."""
        return self.attempt, self.step


@dataclass(slots=True)
class Slot:
    """One slot.

    Attributes:
        persist: will be persisted once it is sealed.
        pending: waits to be persisted.
        adopter: attempt that persists the state in place of the one that sealed it; 0: none.
        busy: number of readers (persistence, a restoring worker).
        replicate: will be copied to the peer once it is sealed; reset when the copy has ended.
        held: kept for a restart without one of the nodes; see Note [Held replicas].
        copied: set while a copy to a peer reads the slot; returns True if the copy must finish.
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
        """True if the slot is being read, waits to be read, or is being filled from storage."""
        return self.pending or self.busy > 0 or self.phase is SlotPhase.RESTORING


class SlotTable:
    """The slots of one rank."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(index) for index in range(count)]

    def unpopulated(self, index: int) -> None:
        """Withhold a free slot whose memory is new and has no pages yet."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.FREE
        slot.phase = SlotPhase.UNPOPULATED

    def populated(self, index: int) -> None:
        """Free a slot whose memory has its pages now."""
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
        # The step alone is not enough: two attempts can seal the same step with different values.
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

        None if all are needed: the snapshot is skipped, and training continues.
        """
        slot = self._reusable(spare_newest=True)
        if slot is None:
            return None
        self._reuse(slot, SlotPhase.WRITING, step)
        return slot.index

    def take_for_restore(self) -> int:
        """Reserve a slot to fill from storage; as a last resort even the newest sealed one.

        That one can be overwritten, because storage is read only if memory does not hold the step
        that the whole job restores.

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
        """True if no state waits for storage or is being written to it."""
        return not any(slot.persist or slot.pending for slot in self.slots)

    @property
    def replica_ended(self) -> bool:
        """True if no state is being copied to the peer or will be."""
        return not any(slot.replicate for slot in self.slots)

    def to_replicate(self) -> Slot | None:
        """The newest sealed slot that waits for its copy to the peer."""
        waiting = [s for s in self.slots if s.replicate and s.phase is SlotPhase.SEALED and s.seal]
        return max(waiting, key=_age, default=None)

    def replicate(self, index: int) -> None:
        """Copy this sealed state to the peer, and no other: the attempt continues from it."""
        self.release_held()
        self._hold(self.at(index))

    def release_held(self) -> None:
        """Release all held slots: the attempt continues from no state in memory."""
        for slot in self.slots:
            slot.replicate = slot.held = False

    def begin_seal(self, index: int, step: int, *, persist: bool, replicate: bool = False) -> None:
        """Begin to seal: the writer has finished, and checksums are computed next.

        Args:
            persist: queue the slot for storage once it is sealed.
            replicate: all ranks copy this step to their peers, and copies of earlier steps have
                ended.

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
        # Both take effect in finish_seal: before the checksums are known, nothing may read the
        # slot.
        slot.persist = persist
        slot.replicate = replicate

    def finish_seal(self, index: int, seal: SlotSeal) -> None:
        """Seal the slot, whose checksums are known, and queue it for storage if requested."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.SEALING
        slot.phase = SlotPhase.SEALED
        slot.seal = seal
        slot.pending = slot.persist
        slot.persist = False
        # Held from now on and not from the end of the copy, because copies of the ranks do not end
        # at the same time.
        if slot.replicate:
            self._hold(slot)

    def finish_fetch(self, index: int, seal: SlotSeal) -> None:
        """Seal a slot that was filled from a peer's replica."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.RESTORING
        slot.phase = SlotPhase.SEALED
        slot.step = seal.step
        slot.seal = seal

    def sealing(self, step: int) -> bool:
        """True while the checksums of ``step`` are being computed."""
        return any(s.phase is SlotPhase.SEALING and s.step == step for s in self.slots)

    def adopt(self, index: int, attempt: int) -> None:
        """Persist a sealed state of an earlier attempt as a step of ``attempt``, which restored it.

        The seal keeps the earlier attempt's number: until every rank has restored, the next attempt
        may have to find it under that number.
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
        # SEALING only if the checksums could not be computed: the content is lost then.
        if slot.phase in (SlotPhase.WRITING, SlotPhase.RESTORING, SlotPhase.SEALING):
            self._reuse(slot, SlotPhase.FREE, 0)
        elif slot.busy:
            slot.busy -= 1
        else:
            raise RequestError(f"slot {index} is {slot.phase.value}: there is nothing to release")

    def lend(self, index: int) -> None:
        """Protect the sealed slot from reuse while a reader has it, until :meth:`release`."""
        slot = self.at(index)
        assert slot.phase is SlotPhase.SEALED
        slot.busy += 1

    def discard(self, index: int) -> None:
        """Free a sealed slot whose content is damaged."""
        self._reuse(self.at(index), SlotPhase.FREE, 0)

    def next_pending(self) -> Slot | None:
        """The oldest slot that waits to be persisted; see Note [Slots and seal order]."""
        waiting = [slot for slot in self.slots if slot.pending and slot.seal]
        return min(waiting, key=_age, default=None)

    def supersede(self, attempt: int) -> None:
        """Stop persisting states of earlier attempts: they can no longer be committed."""
        # They stay sealed, because the new attempt may restore from them.
        for slot in self.slots:
            if slot.seal and max(slot.seal.attempt, slot.adopter) < attempt:
                slot.pending = False
            if slot.phase is SlotPhase.SEALING:
                slot.persist = False
            # Held slots stay held: the new attempt may restore one, and then releases the others.
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
        """Mark ``slot`` for its copy, and hold it and the one before; see Note [Held replicas].

        Fewer are held if otherwise less than LEAST_SLOTS slots would remain for writing.
        """
        # One copy at a time: once the ranks have voted for a newer step, an older one is no use.
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
        # The last two conditions: a copy that must finish keeps its slot, and a held slot is given
        # up only to a restore from storage.
        idle = [
            s
            for s in self.slots
            if s.phase is SlotPhase.SEALED and not s.pending and not s.busy and s.seal
            if s.copied is None or not s.copied()
            if not s.held or not spare_newest
        ]
        if spare_newest:
            idle = [slot for slot in idle if slot.seal is not sealed[-1]]
        # A slot that a copy reads is the last choice, because the copy would fail.
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


SEALING_THREADS = 4  # per state; each computes checksums at some 20 GB/s
# Interval at which the number of landed bytes is read: before the copy has begun, which may be a
# step later, and while it runs.
WAITING_S, COPYING_S = 0.02, 0.002

Part = tuple[int, int, int]  # index of a piece, and the bytes [start, stop) of the slot


class WrittenSlot(Protocol):
    """The memory of a slot that a trainer writes; ``landed_bytes`` counts from its start."""

    @property
    def view(self) -> memoryview:
        """Its bytes."""

    landed_bytes: int


class Landing:
    """Computes the checksums of one slot's pieces while their bytes land; runs on the event loop.

    The trainer's copy stores in the slot's last page how many bytes have landed. Threads follow
    that number, so the seal waits only for the bytes that landed last. Nothing depends on the
    number being true: bytes that change after their checksum are found damaged when the slot is
    persisted, replicated or restored.
    """

    def __init__(self, layout: ShardLayout, memory: WrittenSlot, pool: ThreadPoolExecutor) -> None:
        memory.landed_bytes = 0  # the page still has the count of the slot's previous use
        self._layout = layout
        self._memory = memory
        self._pool = pool
        self._image = memory.view
        self._hashers = [xxhash.xxh3_128() for _ in layout.pieces]
        self._done = 0
        self._ending = asyncio.Event()
        self.following = asyncio.create_task(self._follow(), name="checksums of what lands")

    def end(self) -> None:
        """Stop following; :attr:`following` ends when its threads have finished their parts."""
        self._ending.set()

    async def checksums(self) -> tuple[str, ...]:
        """The checksum of each piece, in the layout's order, once all bytes have landed."""
        # The follower ends first, because both would feed the same hashers.
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
        """Hash the bytes up to ``landed``."""
        # One part per piece and call, so the bytes of a piece reach its hasher in order although
        # several threads share the parts.
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


POPULATED_FIRST_BYTES = 1 << 30  # of a rank, before its registration is answered; at least a slot


def slots_of(given: RegisteredRank, staging: StagingFolder) -> list[SlotMemory]:
    """The slots of a rank that registers, the first of them populated.

    Raises:
        LimitError: there is no room.
    """
    size_bytes = given.layout.slot_bytes
    count = given.slots or staging.affordable_slots(
        size_bytes, given.wanted_slots, given.local_ranks, given.replica_bytes
    )
    return staging.allocate(given.job, given.rank, size_bytes, count, POPULATED_FIRST_BYTES)


class PagesListener(Protocol):
    """The job, as far as allocation reports to it."""

    changed: Signal

    def note_failure(self, rank: int, attempt: int, step: int, error: str) -> None:
        """Report that there is no memory for a slot."""


class OwnSlots(Protocol):
    """The slots of one rank."""

    registration: RegisteredRank
    memories: list[SlotMemory]
    table: SlotTable


class SlotPages:
    """Allocates the pages of one rank's slots in the background, while the job starts or trains.

    A slot is handed out only once it has all its pages. No step waits for that: the slot that a
    restore needs is populated at registration, and a snapshot that finds no slot is skipped. All
    state changes happen on the event loop.
    """

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
        """Allocate the pages of these free slots in the background, one slot after the other."""
        waiting = list(indices)
        for index in waiting:
            self._slots.table.unpopulated(index)
        if waiting:
            task = tasks.single(self._populate(waiting), "pages of slots")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def populate_renewed(self, indices: list[int]) -> None:
        """As :meth:`populate`, but wait if the slots are small enough to take no visible time."""
        self.populate(indices)
        sizes = (self._slots.memories[index].size_bytes for index in indices)
        if self._running and sum(sizes) <= POPULATED_FIRST_BYTES:
            await asyncio.wait(set(self._running))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ask the threads to stop; the caller awaits the returned tasks."""
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
                # The rank continues with one slot less, as if memory had been short at the start.
                self._listener.note_failure(given.rank, given.attempt, 0, str(error))
                continue
            if self._cancelled:
                return
            self._slots.table.populated(index)
            self._listener.changed.notify()
