"""All of a node's replicas: those that it keeps for others, and those of its own snapshots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megascale.v1 import link_pb2
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.replicas.fetch import fetch
from megascale_checkpoint.replicas.protocol import SealedState, StateKey
from megascale_checkpoint.replicas.sender import ReplicaSender, SealedJob
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import ReplicaStore
from megascale_checkpoint.replicas.streams import STREAMS
from megascale_common.node.addresses import split
from megascale_common.service import tasks
from megascale_common.service.start import write_address


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
        self._jobs, self._pools, self._token, self._streams = jobs, pools, token, streams
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
