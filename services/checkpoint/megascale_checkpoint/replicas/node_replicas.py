"""All of a node's replicas: those that it keeps for others, and those of its own snapshots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale.v1 import link_pb2
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas.connection import (
    Activity,
    Connection,
    PeerError,
    RefusedError,
    refusal,
)
from megascale_checkpoint.replicas.protocol import SealedState, StateKey, read
from megascale_checkpoint.replicas.sender import ReplicaSender, SealedJob
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import ReplicaStore
from megascale_checkpoint.replicas.streams import STREAMS, Shares, Streams
from megascale_common.node.addresses import split
from megascale_common.service import tasks
from megascale_common.service.errors import DamagedError, NotFoundError
from megascale_common.service.start import write_address

# Bring a state back from the memory of a peer, over several streams. Blocking, for threads.


TRIES = 3  # each goes on with what the one before has left


def fetch(
    endpoint: str,
    token: str,
    key: StateKey,
    image: memoryview,
    cancelled: Cancellation,
    streams: int = STREAMS,
) -> SealedState:
    """Fill ``image``, a slot of the state's layout, and verify it; bytes between pieces are 0.

    Raises:
        NotFoundError: the peer does not keep this state, or refuses.
        DamagedError: what arrives is not what was sealed.
        PeerError: the peer cannot be reached, is silent or too slow.
        SupersededError: cancelled.
    """
    fetching = _Fetch(endpoint, token, key, image, cancelled)
    for left in reversed(range(TRIES)):
        try:
            return fetching.run(streams)
        except RefusedError as error:
            raise NotFoundError(str(error)) from error
        except PeerError:
            if not left or fetching.state is None:
                raise
    raise AssertionError("the last try returns or raises")


class _Fetch:
    def __init__(
        self,
        endpoint: str,
        token: str,
        key: StateKey,
        image: memoryview,
        cancelled: Cancellation,
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self._key = key
        self._image = image
        self._cancelled = cancelled
        self.state: SealedState | None = None
        self._shares: Shares | None = None
        self._activity = Activity()

    def run(self, streams: int) -> SealedState:
        """One try; raises as :func:`fetch`."""
        with self._dial() as connection:
            self._join(connection)
            state = self.state
            assert state is not None
            if self._shares is None:
                self._shares = Shares(state, streams)
            how = (self._activity, self._cancelled, self._dial, self._join, self._move)
            Streams(self._shares, *how).run(connection)
            return state

    def _dial(self) -> Connection:
        return Connection.dial(self._endpoint, self._token, self._cancelled)

    def _join(self, connection: Connection) -> None:
        first = self.state is None
        connection.send({"verb": "fetch", "key": self._key, "first": first})
        reply = connection.receive()
        if problem := refusal(reply, "state"):
            raise RefusedError(f"the peer at {self._endpoint}: {problem}")
        if first:
            self._begin(read(reply.get("state"), SealedState))

    def _begin(self, state: SealedState) -> None:
        if state.key != self._key or state.slot_bytes > len(self._image):
            raise DamagedError(self._endpoint, "the peer sends another state than it was asked for")
        _clear_between(state, self._image)
        self.state = state
        self._activity = Activity(state.size_bytes)

    def _move(self, connection: Connection, numbers: Sequence[int]) -> None:
        assert self.state is not None
        connection.send({"verb": "pieces", "numbers": list(numbers)})
        if problem := refusal(connection.receive(), "bytes"):
            raise RefusedError(f"the peer at {self._endpoint}: {problem}")
        where = f"the replica at {self._endpoint}"
        connection.receive_pieces(self.state, numbers, self._image, where)


def _clear_between(state: SealedState, image: memoryview) -> None:
    """Set the bytes between pieces to 0: the trainer relies on that for the padding."""
    values, end = np.frombuffer(image, np.uint8), 0
    for piece in sorted(state.pieces, key=lambda piece: piece.offset):
        values[end : piece.offset] = 0
        end = max(end, piece.offset + piece.size_bytes)
    values[end:] = 0


class NodeJobs(Protocol):
    """The jobs of the node (:class:`megascale_checkpoint.serve.jobs.Jobs`)."""

    changed: Signal

    def all(self) -> Sequence[SealedJob]:
        """Every job."""


class NodeReplicas:
    """Started once; ``endpoint`` is where other nodes reach it.

    A state that it copies or fetches goes over ``streams`` connections.
    """

    def __init__(
        self,
        jobs: NodeJobs,
        staging: StagingFolder,
        pools: Pools,
        token: str,
        streams: int = STREAMS,
    ) -> None:
        self._jobs = jobs
        self._pools = pools
        self._token = token
        self._streams = streams
        self.store = ReplicaStore(staging, pools, self._attempt_of, jobs.changed)
        self.sender = ReplicaSender(token, jobs.changed, streams)
        self._server = ReplicaServer(self.store, token)
        self._following: asyncio.Task[None] | None = None
        self.endpoint = ""

    def start(self, host: str, address_file: Path) -> None:
        """Listen at the address of the daemon before, else at any port; write the address down.

        Within an attempt other nodes keep the address.

        Raises:
            OptionError: the file cannot be written.
            OSError: no port is free.
        """
        with contextlib.suppress(OSError, ValueError):
            before, port = split(address_file.read_text().strip())
            if before == host:
                self.endpoint = self._server.start(host, port)
        self.endpoint = self.endpoint or self._server.start(host)
        write_address("--address-file", address_file, self.endpoint)
        self._following = tasks.repeated(self._follow, "replicas")

    async def close(self) -> None:
        """End all transfers and free the memory."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.sender.close()
        await self._server.close()
        await self.store.close()

    async def fetch(
        self, given: RegisteredRank, key: StateKey, image: memoryview, cancelled: Cancellation
    ) -> SealedState:
        """Fill a slot from the replica that the registration names; see :func:`fetch.fetch`."""
        how = (given.replica_source, self._token, key, image, cancelled, self._streams)
        return await in_pool(self._pools.storage, fetch, *how)

    async def retire(self) -> None:
        """See :meth:`ReplicaStore.retire`."""
        await self.store.retire()

    def report(self, message: link_pb2.CheckpointProgress) -> None:
        """Add the replicas of a job to its progress."""
        for key in self.store.sealed(message.job):
            message.replicas.add(
                rank=key.rank,
                attempt=key.attempt,
                step=key.step,
                layout_digest=key.layout_digest,
            )
        totals = self.sender.totals.get(message.job)
        if totals is None:
            return
        message.replica_failures = totals.failures
        if totals.failure is not None:
            key = totals.failure.key
            message.replica_failure.CopyFrom(
                link_pb2.CheckpointFailure(
                    attempt=key.attempt, step=key.step, rank=key.rank, error=totals.failure.error
                )
            )

    def _attempt_of(self, job: str) -> int:
        found = next((each for each in self._jobs.all() if each.name == job), None)
        return found.attempt if found is not None and found.ranks else 0

    async def _follow(self) -> None:
        while True:
            changed = self._jobs.changed.next()
            self.sender.consider(self._jobs.all())
            await self.store.retire()
            await changed.wait()
