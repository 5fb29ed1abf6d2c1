"""A crash case of replicas: snapshots of one rank are copied to a peer, and fetched from there.

Sender, server, store and reader are the daemon's own, over real sockets; the connections between
them are cut or refused and their bits flipped, the peer's memory is damaged, the peer is lost, an
attempt follows another, and the sender of an earlier one goes on. The oracle: what is fetched is
what was sealed, and what a peer reports as whole, and nothing has damaged, can be fetched.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.crash.oracle import Oracle
from tests.crash.wire import CUT, FLIP_ON_THE_WAY, REFUSED, Wire, WireFault
from tests.harness.checkpoint_files import registration_of

from megascale_checkpoint.checksums import piece_checksums
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import SlotSeal, SlotTable
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas import streams
from megascale_checkpoint.replicas.connection import PeerError
from megascale_checkpoint.replicas.node_replicas import fetch
from megascale_checkpoint.replicas.protocol import StateKey
from megascale_checkpoint.replicas.sender import ReplicaSender
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import ReplicaStore
from megascale_common.service.errors import DamagedError, ServiceError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

TOKEN, JOB, VALUES, SLOTS = "token-of-the-tests", "job", 8_192, 4
RETRY_AFTER_S = (0.001, 0.001)
FLIP_REPLICA, LOSE_PEER, OLD_SENDER = "flip a replica", "lose the peer", "an old sender goes on"
REPLICA_KINDS = (CUT, FLIP_ON_THE_WAY, REFUSED, FLIP_REPLICA, LOSE_PEER, OLD_SENDER)
MOST_REFUSED = 12  # connections in a row; a copy dials one, and several more once it is answered
OPERATIONS = ("seal", "seal", "seal", "settle", "fetch", "attempt", "fault", "fault")
COUNT, STREAMS = 6, 3  # of pieces, with padding between them, and of the connections of a transfer
BOX = ("float32", (COUNT * VALUES,))
PIECES = tuple(
    ShardPiece(
        f"v{n}", "master", *BOX, (n * VALUES,), ((n + 1) * VALUES,), 0, VALUES,
        n * (4 * VALUES + 64), primary=True,
    )
    for n in range(COUNT)
)  # fmt: skip
LAYOUT = ShardLayout(PIECES, COUNT * (4 * VALUES + 64) + 4096)
streams.LEAST_BATCH_BYTES = 4 * VALUES  # each piece may go over another connection


@dataclass(slots=True)
class History:
    """What happened, for people; the places that faults have hit."""

    history: list[str] = field(default_factory=list)
    hits: set[tuple[str, str, str]] = field(default_factory=set)

    def note(self, text: str) -> None:
        """One line."""
        self.history.append(text)


@dataclass(slots=True)
class Memory:
    """A slot's memory."""

    view: memoryview


class Rank:
    """The sealed slots of one rank, as the sender sees them."""

    def __init__(self, registration: RegisteredRank) -> None:
        self.registration = registration
        self.table = SlotTable(SLOTS)
        self.memories = [Memory(memoryview(bytearray(LAYOUT.slot_bytes))) for _ in range(SLOTS)]


class SendingJob:
    """The job of :class:`Rank`."""

    name = JOB

    def __init__(self, rank: Rank) -> None:
        self.attempt, self.ranks = 1, {0: rank}


class Peer:
    """The node that keeps the replicas."""

    def __init__(self, folder: Path, number: int, attempts: dict[str, int]) -> None:
        self.staging = StagingFolder(folder / "staging", "test", "peer", f"i{number}")
        self.pools = Pools()
        self.store = ReplicaStore(
            self.staging, self.pools, lambda job: attempts.get(job, 0), Signal()
        )
        self.server = ReplicaServer(self.store, TOKEN)
        self.endpoint = self.server.start("127.0.0.1")

    async def close(self) -> None:
        """End it; its memory is lost."""
        await self.server.close()
        await self.store.close()
        self.pools.close()
        self.staging.remove()


class ReplicaCase:
    """One case; everything that it does follows from ``seed``, but not the order of its threads."""

    def __init__(self, seed: int, only: tuple[str, ...] = ()) -> None:
        self.rng = random.Random(seed)
        self.kinds = [kind for kind in REPLICA_KINDS if not only or kind in only]
        self.machine, self.oracle = History(), Oracle()
        self.images: dict[tuple[int, int], bytes] = {}
        self.damaged: set[tuple[int, int]] = set()  # replicas whose memory was flipped
        self.decided: set[tuple[int, int]] = set()  # what the attempt goes on from, or copies
        self.whole = (0, 0)  # the newest of them that was whole at both
        self.attempts, self.step, self.peers = {JOB: 1}, 0, 0

    async def run(self) -> None:
        """Some operations, then a last fetch."""
        self.folder = Path(tempfile.mkdtemp(prefix="replica-case-"))
        self.changed = Signal()
        self.peer = Peer(self.folder, 0, self.attempts)
        self.wire = Wire(self.peer.endpoint)
        self.rank = Rank(self._registration())
        self.job, self.sender = SendingJob(self.rank), ReplicaSender(TOKEN, self.changed, STREAMS)
        self.sender.retry_after_s = RETRY_AFTER_S
        try:
            for _ in range(self.rng.randint(6, 14)):
                await self._operate(self.rng.choice(OPERATIONS))
                self._check_held()
                if self.oracle.failed:
                    break
            self.wire.fault, self.wire.refused = None, 0
            await self._fetch()
            self.oracle.found = True
        finally:
            self.machine.hits |= {(f.kind, "", "replica") for f in self.wire.hits}
            await self.sender.close()
            self.wire.close()
            await self.peer.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _operate(self, what: str) -> None:
        if what == "seal":
            self._seal()
        elif what == "settle":
            await self._settle()
        elif what == "fetch":
            await self._fetch()
        elif what == "attempt":
            await self._settle()  # the snapshot that it restores has its replica, or none
            self.attempts[JOB] += 1
            self.job.attempt = self.attempts[JOB]
            self.rank.registration = self._registration()
            self.rank.table.supersede(self.job.attempt)
            self._go_on()
            self.machine.note(f"attempt {self.job.attempt} begins after step {self.step}")
        else:
            await self._fault(self.rng.choice(self.kinds))

    def _go_on(self) -> None:
        """The attempt restores a sealed step, which its peer gets once more, or starts anew."""
        sealed = self.rank.table.sealed()
        if not sealed or self.rng.random() < 0.2:
            self.rank.table.release_held()
            self.step = max(0, self.step - self.rng.randint(0, 2))
            self.whole, self.decided = (0, 0), set()
            return
        seal = self.rng.choice(sealed)
        slot = self.rank.table.find(seal.attempt, seal.step, seal.layout_digest)
        assert slot is not None
        self.rank.table.replicate(slot.index)
        self.step, self.whole, self.decided = seal.step, (0, 0), {(seal.attempt, seal.step)}

    def _check_held(self) -> None:
        """What is whole here and at the peer stays so on this side until a later one is.

        A restart without another node needs the same step of every rank that is left.
        """
        held = {(seal.attempt, seal.step) for seal in self.rank.table.sealed()}
        newest = max((held & self._whole() & self.decided) - self.damaged, default=(0, 0))
        if self.whole > newest and self.whole not in held:
            self.oracle.lost = self.oracle.lost or f"{self.whole} is whole at the peer alone"
        self.whole = max(self.whole, newest)

    def _registration(self) -> RegisteredRank:
        given = registration_of("", 0, 1, LAYOUT, attempt=self.attempts[JOB])
        return replace(given, replica_target=self.wire.endpoint)

    def _seal(self) -> None:
        self.step += 1
        index = self.rank.table.acquire(self.step)
        if index is None:
            self.machine.note(f"step {self.step} is skipped")
            return
        image = bytearray(LAYOUT.slot_bytes)
        for piece in LAYOUT.pieces:
            begin = piece.slot_offset_bytes
            image[begin : begin + piece.size_bytes] = self.rng.randbytes(piece.size_bytes)
        self.rank.memories[index].view[:] = image
        key, digest = (self.attempts[JOB], self.step), self.rank.registration.digest
        checksums = piece_checksums(LAYOUT, memoryview(image))
        # As the ranks vote: the next one is copied when the one before has ended.
        replicate = self.rank.table.replica_ended
        self.rank.table.begin_seal(index, self.step, persist=False, replicate=replicate)
        self.rank.table.finish_seal(index, SlotSeal(*key, digest, checksums, {"step": self.step}))
        self.images[key] = bytes(image)
        self.sender.consider([self.job])
        self.decided |= {key} if replicate else set()
        copied = ", and copied" if replicate else ""
        self.machine.note(f"step {key[1]} of attempt {key[0]} is sealed{copied}")

    async def _settle(self) -> None:
        """Wait until nothing is sent any more."""
        while True:
            changed = self.changed.next()
            self.sender.consider([self.job])
            if not any(each.task is not None for each in self.sender._transfers.values()):
                return
            await changed.wait()

    async def _fault(self, kind: str) -> None:
        self.machine.note(f"fault: {kind}")
        held = self.peer.store.sealed(JOB)
        if kind in (CUT, FLIP_ON_THE_WAY):
            # Within the request now and then, mostly within the bytes.
            at = self.rng.choice((self.rng.randrange(600), self.rng.randrange(2 * COUNT * VALUES)))
            self.wire.fault = WireFault(kind, self.rng.random() < 0.7, at)
        elif kind == REFUSED:
            self.wire.refused = self.rng.randint(1, MOST_REFUSED)
        elif kind == LOSE_PEER:
            await self.peer.close()
            self.peers += 1
            self.damaged.clear()
            self.peer = Peer(self.folder, self.peers, self.attempts)
            self.wire.target = self.peer.endpoint
            self.machine.hits.add((kind, "", "replica"))
        elif kind == FLIP_REPLICA and held:
            await self._settle()
            self._check_held()  # what is damaged below was whole at both
            slot = self.peer.store.lend(key := self.rng.choice(self.peer.store.sealed(JOB)))
            piece = self.rng.choice(LAYOUT.pieces)
            at = piece.slot_offset_bytes + self.rng.randrange(piece.size_bytes)
            slot.memory.view[at] ^= 1
            await self.peer.store.returned(slot)
            self.damaged.add((key.attempt, key.step))
            self.machine.hits.add((kind, "", "replica"))
        elif kind == OLD_SENDER:
            await self._old_sender()

    async def _old_sender(self) -> None:
        """An older snapshot arrives late: it must not take the place of a newer one."""
        await self._settle()
        held = {(key.attempt, key.step) for key in self.peer.store.sealed(JOB)}
        older = sorted(key for key in self.images if held and key < max(held))
        if not older:
            return
        rank = Rank(replace(self._registration(), replica_target=self.peer.endpoint))
        key = self.rng.choice(older)
        image = self.images[key]
        rank.memories[0].view[:] = image
        checksums = piece_checksums(LAYOUT, memoryview(image))
        seal = SlotSeal(*key, rank.registration.digest, checksums, {"step": key[1]})
        rank.table.acquire(key[1])
        rank.table.begin_seal(0, key[1], persist=False, replicate=True)
        rank.table.finish_seal(0, seal)
        job, sender = SendingJob(rank), ReplicaSender(TOKEN, changed := Signal(), STREAMS)
        sender.consider([job])
        while any(each.task is not None for each in sender._transfers.values()):
            await changed.wait()
        await sender.close()
        self.machine.note(f"an old sender has sent step {key[1]} of attempt {key[0]}")
        self.machine.hits.add((OLD_SENDER, "", "replica"))
        now = {(each.attempt, each.step) for each in self.peer.store.sealed(JOB)}
        if max(held) not in now:
            self.oracle.lost = self.oracle.lost or f"the replica of {max(held)} was overwritten"

    async def _fetch(self) -> None:
        """A spare fetches the newest whole replica, while newer ones arrive now and then."""
        if self.rng.random() < 0.5:
            await self._settle()
        held = self.peer.store.sealed(JOB)
        if not held:
            return
        key = max(held, key=lambda each: (each.attempt, each.step))
        into = bytearray(b"\xff" * LAYOUT.slot_bytes)
        faulty = self.wire.fault is not None or self.wire.refused > 0
        beside = not faulty and self.rng.random() < 0.5
        reading = asyncio.create_task(
            asyncio.to_thread(
                fetch, self.wire.endpoint, TOKEN, key, memoryview(into), Cancellation(), STREAMS
            )
        )
        if beside:
            for _ in range(2):
                self._seal()
                await self._settle()
        try:
            await reading
        except (ServiceError, PeerError) as error:
            self._not_fetched(key, error, faulty)
            return
        self.machine.note(f"step {key.step} of attempt {key.attempt} is fetched")
        if bytes(into) != self.images[key.attempt, key.step]:
            self.oracle.silent = f"{key.attempt, key.step} was fetched with other bytes than sealed"

    def _not_fetched(self, key: StateKey, error: Exception, faulty: bool) -> None:
        name = key.attempt, key.step
        self.machine.note(f"step {name[1]} of attempt {name[0]} is not fetched: {error}")
        gone = "no replica of step" in str(error)  # two newer ones have arrived before the request
        found = isinstance(error, DamagedError) or "is not what was sealed" in str(error)
        if not faulty and not (gone and name not in self._whole()) and name not in self.damaged:
            self.oracle.lost = (
                self.oracle.lost or f"{name} was whole and cannot be fetched: {error}"
            )
        if name in self.damaged and found and name in self._whole():
            self.oracle.lost = self.oracle.lost or f"{name} is damaged and offered again"
        if not faulty:
            self.damaged.discard(name)

    def _whole(self) -> set[tuple[int, int]]:
        return {(key.attempt, key.step) for key in self.peer.store.sealed(JOB)}
