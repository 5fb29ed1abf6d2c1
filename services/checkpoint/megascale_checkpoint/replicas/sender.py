"""Copies what all ranks have decided to copy to the peer that the registration names.

After every change it looks for slots that are marked so (:mod:`megascale_checkpoint.memory.slots`):
the steps that the ranks vote for, and in a new attempt, whose peers may be others, the one that it
goes on from. A copy in progress is let to its end, however many snapshots follow meanwhile. One
that fails is tried again, because the others of that step are of no use without it; but not where
the one before it failed, too: all ranks wait.

The slot is held meanwhile. Only of two slots none can be: the first copy that is in the way of a
snapshot gives its slot up, which is a failure that the job shows; the next keeps its own while
bytes go out, and the snapshot is skipped. What is read of a slot that is written (before the thread
has seen the end) does not have the checksums that the receiver compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from megascale_checkpoint.concurrency import (
    BURST_S,
    Cancellation,
    Signal,
    TokenBucket,
    in_pool,
)
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import OwnSlots, Slot, SlotSeal
from megascale_checkpoint.replicas.connection import (
    CHUNK_BYTES,
    Activity,
    Connection,
    PeerError,
    RefusedError,
    refusal,
)
from megascale_checkpoint.replicas.protocol import PieceBytes, SealedState, StateKey
from megascale_checkpoint.replicas.streams import STREAMS, Shares, Streams
from megascale_common.service import logs, tasks
from megascale_common.service.errors import ServiceError

log = logs.get("replicas")
SENDERS = 16  # threads: the ranks of a node
MAX_ERROR_CHARS = 500
MOST_PATIENCE_S = 120.0  # for a peer that makes room
STILL_S = 1.0  # a copy of which nothing has gone out for so long keeps no slot
RETRY_AFTER_S = (0.5, 2.0, 5.0)  # pauses before a copy that failed is tried again; the last stays
RETRY_FOR_S = 90.0  # a node that is silent is dead after 60 s, and the attempt has ended


class SealedJob(Protocol):
    """One job's ranks on this node (:class:`megascale_checkpoint.serve.jobs.JobCheckpoints`)."""

    name: str
    attempt: int

    @property
    def ranks(self) -> Mapping[int, OwnSlots]:
        """By global rank."""


@dataclass(slots=True)
class Failure:
    """A snapshot without a replica, and why."""

    key: StateKey
    error: str


@dataclass(slots=True)
class SentTotals:
    """What was sent of one job. ``failure``: the newest since the newest success of its rank."""

    count: int = 0
    sum_s: float = 0.0
    size_bytes: int = 0
    failures: int = 0
    failure: Failure | None = None


@dataclass(slots=True)
class _Transfer:
    seal: SlotSeal
    attempt: int
    slot: Slot
    keeps: bool = False
    moved_s: float = 0.0
    cancelled: Cancellation = field(default_factory=Cancellation)
    connection: Connection | None = None
    streams: Streams | None = None
    task: asyncio.Task[None] | None = None
    stopped: bool = False
    overtaken: bool = False
    failed: bool = False
    superseded: bool = False  # the peer has a later state, and will never take this one
    ends: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is stopped

    def must_end(self) -> bool:
        """Whether the slot is kept for it: the copy before had to give its own up."""
        return self.keeps and not self.stopped and time.monotonic() - self.moved_s < STILL_S

    def may_repeat(self) -> bool:
        """Whether it failed, and might not do so once more."""
        return self.failed and not self.stopped and not self.superseded

    def stop(self) -> None:
        self.stopped = True
        self.ends.set()
        self.cancelled.cancel()
        if self.streams is not None:
            self.streams.shut()
        if self.connection is not None:
            self.connection.shut()


class ReplicaSender:
    """Sends for all jobs of the node; they share one token bucket.

    A state goes over ``streams`` connections.
    """

    retry_after_s = RETRY_AFTER_S

    def __init__(self, token: str, changed: Signal, streams: int = STREAMS) -> None:
        self._token = token
        self._changed = changed
        self._streams = streams
        self._threads = ThreadPoolExecutor(SENDERS, "replica-sender")
        self._bucket = TokenBucket(0.0)
        self._bucket_lock = threading.Lock()
        self._transfers: dict[tuple[str, int], _Transfer] = {}
        self.totals: dict[str, SentTotals] = {}

    def consider(self, jobs: Iterable[SealedJob]) -> None:
        """Start and stop transfers, so that what the ranks have decided on gets its replica."""
        present = {}
        for job in jobs:
            for rank, snapshots in job.ranks.items():
                if snapshots.registration.replica_target:
                    present[job.name, rank] = snapshots
        for place in list(self._transfers):
            if place not in present:
                self._transfers[place].stop()
                if self._transfers[place].task is None:
                    del self._transfers[place]
        for name in [name for name in self.totals if all(name != job for job, _ in present)]:
            del self.totals[name]
        for place, snapshots in present.items():
            self._consider_rank(place, snapshots)

    async def close(self) -> None:
        """End all transfers."""
        for transfer in self._transfers.values():
            transfer.stop()
        tasks = [t.task for t in self._transfers.values() if t.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _consider_rank(self, place: tuple[str, int], snapshots: OwnSlots) -> None:
        given, last = snapshots.registration, self._transfers.get(place)
        if last is not None and last.task is not None:
            last.overtaken = last.overtaken or last.slot.seal is not last.seal
            if last.overtaken or last.attempt < given.attempt:
                last.stop()  # its end is a change, and then the newer one is started
            return
        slot = snapshots.table.to_replicate()
        if slot is None or slot.seal is None:
            return
        transfer = _Transfer(slot.seal, given.attempt, slot, last is not None and last.overtaken)
        self._transfers[place] = transfer
        slot.copied = transfer.must_end
        # A view of its own: while it is there, the memory stays mapped.
        image = memoryview(snapshots.memories[slot.index].view)
        transfer.task = tasks.single(self._send_all(snapshots, image, transfer), "replica")

    async def _send_all(self, snapshots: OwnSlots, image: memoryview, transfer: _Transfer) -> None:
        """One state, tried again after each pause until it is whole at the peer."""
        given, slot = snapshots.registration, transfer.slot
        until_s = time.monotonic() + RETRY_FOR_S
        pauses_s = itertools.chain(self.retry_after_s, itertools.repeat(self.retry_after_s[-1]))
        try:
            await self._send(given, image, transfer)
            while transfer.may_repeat() and time.monotonic() < until_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(next(pauses_s)):
                        await transfer.ends.wait()
                if transfer.may_repeat():
                    await self._send(given, image, transfer)
        finally:
            transfer.task = None
            if slot.seal is transfer.seal:  # else it is in use for another step by now
                slot.copied = None
                # Where the next attempt goes on from this state, its copy is still to come.
                superseded = snapshots.registration.attempt > transfer.attempt
                slot.replicate = slot.replicate and superseded
            self._changed.notify()

    async def _send(self, given: RegisteredRank, image: memoryview, transfer: _Transfer) -> None:
        state = _state(given, transfer.seal, len(image))
        transfer.failed = False
        totals = self.totals.setdefault(given.job, SentTotals())
        began_s = time.monotonic()
        try:
            await in_pool(self._threads, self._send_now, given, state, image, transfer)
            totals.count = totals.count + 1
            totals.sum_s = totals.sum_s + time.monotonic() - began_s
            totals.size_bytes += state.size_bytes
            if totals.failure is not None and totals.failure.key.rank == given.rank:
                totals.failure = None
        except (ServiceError, PeerError) as error:
            self._failed(totals, state.key, transfer, error)
        except Exception as error:
            log.exception("defect while sending a replica", job=given.job, step=state.key.step)
            self._failed(totals, state.key, transfer, error)
        self._changed.notify()

    def _send_now(
        self, given: RegisteredRank, state: SealedState, image: memoryview, transfer: _Transfer
    ) -> None:
        """In a thread."""
        cancelled, peer = transfer.cancelled, f"the peer at {given.replica_target}"
        cancelled.check()
        with Connection.dial(given.replica_target, self._token, cancelled) as connection:
            transfer.connection = connection
            cancelled.check()
            request = {"verb": "store", "attempt": given.attempt, "state": state}
            reply = _answer(connection, request, peer, "go", "kept")
            if reply["verb"] == "kept":
                return
            rate = given.replica_bytes_per_s

            def dial() -> Connection:
                return Connection.dial(given.replica_target, self._token, cancelled)

            def join(stream: Connection) -> None:
                _answer(stream, {"verb": "join", "transfer": reply["transfer"]}, peer, "go")

            def throttle(size_bytes: int) -> float:
                return self._sent(transfer, size_bytes, rate)

            def move(stream: Connection, numbers: Sequence[int]) -> None:
                stream.send({"verb": "pieces", "numbers": list(numbers)})
                stream.send_pieces(state, numbers, image, throttle, _chunk_bytes(rate))
                if problem := refusal(stream.receive(), "have"):
                    raise RefusedError(f"{peer} refuses: {problem}")

            shares, activity = Shares(state, self._streams), Activity(state.size_bytes)
            transfer.streams = Streams(shares, activity, cancelled, dial, join, move)
            if transfer.stopped:
                transfer.streams.shut()
            transfer.streams.run(connection)
            _answer(connection, {"verb": "end"}, peer, "kept")

    def _sent(self, transfer: _Transfer, size_bytes: int, bytes_per_s: int) -> float:
        """Some bytes go out next; returns how long they wait for their turn."""
        transfer.moved_s = time.monotonic()
        with self._bucket_lock:
            self._bucket.bytes_per_s = bytes_per_s
            return self._bucket.take(size_bytes, time.monotonic())

    def _failed(
        self, totals: SentTotals, key: StateKey, transfer: _Transfer, error: Exception
    ) -> None:
        transfer.failed = True
        transfer.superseded = isinstance(error, RefusedError) and error.superseded
        if transfer.stopped and not transfer.overtaken:
            return  # the attempt, or the daemon, ends
        text = str(error)
        if transfer.overtaken:
            text = (
                f"a later snapshot needed the slot of step {key.step} before its copy had ended: "
                "give more of checkpoint.max_replicate_mib_per_s, more steps between snapshots, or "
                "more checkpoint.slots"
            )
        # The state may be of an earlier attempt.
        reported = structs.replace(key, attempt=transfer.attempt)
        if totals.failure is None or totals.failure.key != reported:  # a retry is no further one
            totals.failures += 1
        totals.failure = Failure(reported, text[:MAX_ERROR_CHARS])
        log.warning("no replica", job=key.job, rank=key.rank, step=key.step, error=text)


def _answer(
    connection: Connection, request: Mapping[str, Any], peer: str, *verbs: str
) -> dict[str, Any]:
    """The peer's answer, once it has stopped to ask for patience; raises RefusedError."""
    connection.send(request)
    until_s = time.monotonic() + MOST_PATIENCE_S
    while (reply := connection.receive()).get("verb") == "wait" and time.monotonic() < until_s:
        pass
    if problem := refusal(reply, *verbs):
        superseded = reply.get("superseded") is True
        raise RefusedError(f"{peer} refuses: {problem}", superseded=superseded)
    return reply


def _chunk_bytes(bytes_per_s: int) -> int:
    """How much goes out at once: small at a low rate, or a peer would wait long for the next."""
    if not bytes_per_s:
        return CHUNK_BYTES
    return max(1, min(CHUNK_BYTES, int(bytes_per_s * BURST_S)))


def _state(given: RegisteredRank, seal: SlotSeal, slot_bytes: int) -> SealedState:
    pieces = tuple(
        PieceBytes(piece.slot_offset_bytes, piece.size_bytes, checksum)
        for piece, checksum in zip(given.layout.pieces, seal.checksums, strict=True)
    )
    key = StateKey(given.job, given.rank, seal.attempt, seal.step, seal.layout_digest)
    return SealedState(key, slot_bytes, pieces, seal.small_state)
