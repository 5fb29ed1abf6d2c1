"""The replicas that this node keeps for others.

There are two slots per rank: a replica that arrives overwrites the older one, and the newer one
stays whole meanwhile. Replicas live as long as this node's own slots of the same job, and count
against the same staging limit. All state changes happen on the event loop; threads only fill or
read the memory of a slot that is in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from megascale_checkpoint.concurrency import Pools, Signal, in_pool
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_checkpoint.replicas.protocol import SealedState, StateKey
from megascale_common.service import logs
from megascale_common.service.errors import NotFoundError, NotReadyError, SupersededError
from megascale_job.sizes.memory import REPLICA_SLOTS

log = logs.get("replicas")
RANK_WAIT_S = 5.0  # the nodes of an attempt register within seconds of each other
GIVE_WAY_S = 15.0  # for a transfer that was asked to end; above the wait for a silent peer


@dataclass(slots=True)
class ReplicaSlot:
    """One slot: the whole state in it, if any, and its number of readers.

    ``unread`` is set while there are none.
    """

    memory: SlotMemory
    state: SealedState | None = None
    readers: int = 0
    discarded: bool = False
    unread: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Filling:
    """A transfer into a slot; ``stop`` ends it, ``ended`` is set once no thread writes any more."""

    state: SealedState
    slot: ReplicaSlot
    stop: Callable[[], None]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Rank:
    slots: list[ReplicaSlot]
    slot_bytes: int
    filling: Filling | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class ReplicaStore:
    """Replicas by job and rank.

    Args:
        attempt_of: the attempt of a job whose ranks have slots on this node; 0 if none have.
        changed: fires whenever a replica is sealed or lost.

    A state that comes while the older replica is read waits up to ``reader_wait_s``. One that comes
    before a rank of its job has registered here, as at the start of an attempt, waits up to
    ``rank_wait_s``.
    """

    reader_wait_s, rank_wait_s = GIVE_WAY_S, RANK_WAIT_S

    def __init__(
        self,
        staging: StagingFolder,
        pools: Pools,
        attempt_of: Callable[[str], int],
        changed: Signal,
    ) -> None:
        self._staging = staging
        self._pools = pools
        self._attempt_of = attempt_of
        self._changed = changed
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}

    @property
    def used_bytes(self) -> int:
        """Staging memory of all replicas."""
        return sum(len(rank.slots) * rank.slot_bytes for rank in self._ranks.values())

    def sealed(self, job: str) -> list[StateKey]:
        """The whole replicas of a job, by rank, attempt and step."""
        found = [
            slot.state.key
            for (name, _), rank in self._ranks.items()
            for slot in rank.slots
            if name == job and slot.state is not None
        ]
        return sorted(found, key=lambda key: (key.rank, key.attempt, key.step))

    async def begin(
        self, state: SealedState, attempt: int, stop: Callable[[], None]
    ) -> Filling | None:
        """A slot to receive ``state`` into; None if it is here already. Ends an older transfer.

        ``attempt`` is the attempt in which the sender runs.

        Raises:
            NotReadyError: no rank of the job has slots here, or a transfer did not end in time.
            SupersededError: a later attempt, or a later state of the rank, is here.
            LimitError: there is no room.
        """
        key = state.key
        place = (key.job, key.rank)
        # One at a time per rank, because an old sender and a new one can offer states together.
        async with self._locks.setdefault(place, asyncio.Lock()):
            await self._check_attempt(key.job, attempt)
            rank = await self._rank(state)
            if rank.filling is not None:
                await self._end(rank.filling)
                # retire() does not take the lock, and may have freed the rank during the wait.
                if self._ranks.get(place) is not rank:
                    raise NotReadyError("the replicas of this rank have just been freed: try again")
            newest = max((_age(slot) for slot in rank.slots), default=(0, 0))
            if any(slot.state is not None and slot.state.key == key for slot in rank.slots):
                return None
            if (key.attempt, key.step) < newest:
                raise SupersededError(f"attempt {newest[0]}, step {newest[1]} is kept here")
            slot = min(rank.slots, key=_age)
            await self._until_unread(slot)
            if self._ranks.get(place) is not rank:
                raise NotReadyError("the replicas of this rank have just been freed: try again")
            slot.state = None  # from here on, only the newer replica is whole
            if not slot.memory.populated:  # its first use
                await in_pool(self._pools.memory, self._staging.populate, slot.memory)
            rank.filling = Filling(state, slot, stop)
            self._changed.notify()
            return rank.filling

    def sealed_now(self, filling: Filling) -> None:
        """Seal the replica: all bytes of the transfer are in the slot, and verified."""
        key = filling.state.key
        filling.slot.state = filling.state
        self._ended(filling)
        log.info("replica sealed", job=key.job, rank=key.rank, attempt=key.attempt, step=key.step)

    def given_up(self, filling: Filling) -> None:
        """End a transfer that did not bring a whole replica."""
        self._ended(filling)

    def lend(self, key: StateKey) -> ReplicaSlot:
        """The slot that holds exactly this state, protected from overwriting until ``returned``.

        Raises:
            NotFoundError: there is none.
        """
        rank = self._ranks.get((key.job, key.rank))
        for slot in rank.slots if rank is not None else ():
            if slot.state is not None and slot.state.key == key:
                slot.readers += 1
                slot.unread.clear()
                return slot
        raise NotFoundError(
            f"no replica of step {key.step} of attempt {key.attempt} of rank {key.rank} is here"
        )

    def discard(self, slot: ReplicaSlot) -> None:
        """Empty a lent slot whose bytes are no longer those that were sealed."""
        slot.state = None
        self._changed.notify()

    async def returned(self, slot: ReplicaSlot) -> None:
        """Give back a lent slot."""
        slot.readers -= 1
        if not slot.readers:
            slot.unread.set()
        if slot.discarded and not slot.readers:
            await in_pool(self._pools.memory, self._staging.free, [slot.memory])

    async def retire(self) -> None:
        """Free the replicas of jobs that no longer have slots here, and of ranks kept elsewhere.

        A replica is of an earlier attempt if another node now keeps that rank. It is needed until
        the present attempt has replicas of its own. Those of one step do not arrive on all nodes at
        the same time, so it stays until replicas of two steps are here.
        """
        for job, number in list(self._ranks):
            attempt = self._attempt_of(job)
            fresh = {key.step for key in self.sealed(job) if key.attempt == attempt}
            rank = self._ranks.get((job, number))
            if rank is None:
                continue
            stale = rank.filling is None and max(map(_age, rank.slots))[0] < attempt
            if not attempt or (stale and len(fresh) > 1):
                await self._free(job, number)

    async def close(self) -> None:
        """End all transfers and free everything."""
        for job, number in list(self._ranks):
            await self._free(job, number)

    async def _check_attempt(self, job: str, attempt: int) -> None:
        try:
            async with asyncio.timeout(self.rank_wait_s):
                while True:
                    changed = self._changed.next()
                    present = self._attempt_of(job)
                    if present:
                        break
                    await changed.wait()
        except TimeoutError as error:
            raise NotReadyError(f"no rank of job {job} has slots on this node") from error
        if attempt < present:
            raise SupersededError(f"attempt {present} of job {job} has registered here")

    async def _rank(self, state: SealedState) -> _Rank:
        """The rank's slots, of the size of the state; raises LimitError."""
        place = (state.key.job, state.key.rank)
        rank = self._ranks.get(place)
        if rank is not None and rank.slot_bytes >= state.slot_bytes:
            return rank
        if rank is not None:
            await self._free(*place)
        memories = await in_pool(
            self._pools.memory,
            self._staging.allocate,
            f"{state.key.job}/replicas",
            state.key.rank,
            state.slot_bytes,
            REPLICA_SLOTS,
            0,  # one after the other: the sender waits
        )
        self._ranks[place] = _Rank([ReplicaSlot(memory) for memory in memories], state.slot_bytes)
        return self._ranks[place]

    async def _until_unread(self, slot: ReplicaSlot) -> None:
        try:
            async with asyncio.timeout(self.reader_wait_s):
                while slot.readers:
                    await slot.unread.wait()
        except TimeoutError as error:
            raise NotReadyError("the older replica is being read: try again") from error

    async def _end(self, filling: Filling) -> None:
        filling.stop()
        try:
            async with asyncio.timeout(GIVE_WAY_S):
                await filling.ended.wait()
        except TimeoutError as error:
            raise NotReadyError("an older transfer of this rank has not ended yet") from error

    def _ended(self, filling: Filling) -> None:
        key = filling.state.key
        rank = self._ranks.get((key.job, key.rank))
        if rank is not None and rank.filling is filling:
            rank.filling = None
        filling.ended.set()
        self._changed.notify()

    async def _free(self, job: str, number: int) -> None:
        rank = self._ranks.get((job, number))
        if rank is None:
            return
        if rank.filling is not None:
            await self._end(rank.filling)
        if self._ranks.pop((job, number), None) is None:
            return  # another call has freed it during the wait
        for slot in rank.slots:
            slot.state = None
            slot.discarded = True
        # A slot that is still read is freed by its last reader.
        idle = [slot.memory for slot in rank.slots if not slot.readers]
        await in_pool(self._pools.memory, self._staging.free, idle)
        self._changed.notify()
        log.info("replicas freed", job=job, rank=number)


def _age(slot: ReplicaSlot) -> tuple[int, int]:
    """Sort key: a later attempt is newer whatever its step; an empty slot is the oldest."""
    if slot.state is None:
        return 0, 0
    return slot.state.key.attempt, slot.state.key.step
