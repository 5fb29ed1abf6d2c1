"""The driver's state in etcd: loaded by a new leader, changed only by fenced transactions.

:mod:`megascale_driver.journal.rows` has the keys, :mod:`megascale_driver.journal.fenced` the form
of a write.
"""

from __future__ import annotations

import json
import time

from megascale_common.etcd.election import Leadership
from megascale_common.etcd.operations import Etcd
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import codec, records
from megascale_driver.journal.fenced import MAX_BYTES, MAX_CHANGES, FencedWriter, intent, version_of
from megascale_driver.journal.pieces import Change, size_of, split
from megascale_driver.journal.reader import Loaded, Reader, read_meta
from megascale_driver.journal.rows import INDEX, Batch, Rows

LEADER_KEY = "driver/leader"
META = "meta"
LOG_SEQ = "log_seq"  # the last line of the cluster's log, in the marker
START_DEADLINE_S = 30.0  # for the writes before the first commit; the lease is a second limit
GARBAGE_PER_COMMIT = 20  # unnamed chunks that are removed with a decision
GARBAGE_BYTES = 1 << 10  # upper bound of the bytes that the removal of one takes in a request

__all__ = ["LEADER_KEY", "Loaded", "Store"]


class Store:
    """Reads and writes the cluster's keys during one leadership."""

    def __init__(self, client: Etcd, leadership: Leadership) -> None:
        self._client = client
        self._rows = Rows()
        self._deadline_s = START_DEADLINE_S
        self._lease = leadership.lease
        self._writer = FencedWriter(client, leadership, self._remaining_s)
        self._version = codec.BASIC_VERSION
        self._generation = 0
        self._chunks: set[str] = set()  # stored chunks

    @property
    def largest_request_bytes(self) -> int:
        """Upper bound of the largest request of this term, from the sizes of its parts."""
        return self._writer.largest_bytes

    async def load(self) -> Loaded:
        """All decisions of earlier leaders; writes ``meta`` at a cluster's first start.

        Raises:
            CodecError: ``meta`` cannot be read, or a later build has written it.
            NotLeaderError: the leadership was lost meanwhile.
        """
        writer = self._writer
        await writer.adopt_marker()
        writer.note = dict(writer.noted)
        last = await records.last_number(self._client, "", writer.noted.get(LOG_SEQ, 0))
        await self._index_jobs(last)
        # Before the intents: a build that cannot read their form stops here.
        await self._read_meta()
        await writer.recover()
        reader = Reader(self._client, self._rows, writer.revisions)
        # The intents that were just carried out may have added lines.
        last = await records.last_number(self._client, "", last)
        loaded = await reader.read(self._generation, last)
        writer.note[LOG_SEQ] = loaded.cluster.log_seq
        self._chunks = reader.chunks
        return loaded

    async def _index_jobs(self, last: int) -> None:
        """Complete the index of jobs, if an earlier build has led since it was last complete.

        Such a build does not know the index. Its term began with a line in the cluster's log, which
        is newer than the marker that this build writes with every transaction.
        """
        newest = await self._client.get(records.key("", last)) if last else None
        if self._writer.marked and (newest is None or newest.mod_revision <= self._writer.marked):
            return
        known = {item.key for item in (await self._client.get_prefix(INDEX)).items}
        names = await records.job_names(self._client)
        missing = [key for name in names if (key := f"{INDEX}{name}") not in known]
        for piece in split([Change(key, b"{}") for key in missing], MAX_CHANGES, MAX_BYTES):
            await self._writer.write(piece)

    async def commit(
        self, old: Cluster, new: Cluster, audit: tuple[Audit, ...], *, deadline_s: float
    ) -> bool:
        """Write the difference between the states as one decision: all of it or nothing.

        Returns whether there was anything to write, when it is known to be committed.

        Raises:
            NotLeaderError: it was refused; nothing of it was applied.
            EtcdError: no answer within the deadline. The outcome is unknown, so the leadership must
                end: the next leader reads it from etcd.
        """
        batch = self.between(old, new, audit)
        if not batch.changes:
            return False
        await self.write(batch, deadline_s)
        return True

    def between(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> Batch:
        """The difference between the states; call once per state, and write in that order."""
        self._writer.note[LOG_SEQ] = new.log_seq
        batch = self._rows.between(old, new, audit)
        # Computed here, where no loop is blocked, and not in write(): the rows of ten thousand
        # nodes take a tenth of a second.
        batch.pieces = intent(batch.changes)
        batch.version = max(batch.version, version_of(batch.changes, batch.pieces))
        return batch

    async def write(self, batch: Batch, deadline_s: float) -> None:
        """Write a batch of changes; the same errors as :meth:`commit`."""
        self._deadline_s = deadline_s
        # Chunks are named by content, so one that is stored already need not be written again.
        fresh = {key: value for key, value in batch.chunks.items() if key not in self._chunks}
        self._chunks.update(fresh)
        changes = [*batch.changes, *self._garbage(batch)]
        if batch.version > self._version:
            await self._write_meta(batch.version)
        before = [Change(key, value) for key, value in fresh.items()]
        await self._writer.write(changes, before, batch.pieces)

    def _garbage(self, batch: Batch) -> list[Change]:
        """Removals of some chunks that no row names after the batch; only for small batches."""
        changes = batch.changes
        gone = tuple(change.key for change in changes if change.prefix)
        self._chunks = {key for key in self._chunks if not gone or not key.startswith(gone)}
        left = (MAX_BYTES - sum(map(size_of, changes))) // GARBAGE_BYTES
        # Garbage must never turn a small decision into an intent.
        room = 0 if batch.pieces else min(GARBAGE_PER_COMMIT, MAX_CHANGES - len(changes), left)
        unnamed = sorted(self._chunks - self._rows.named())[: max(0, room)]
        self._chunks.difference_update(unnamed)
        return [Change(key) for key in unnamed]

    async def _read_meta(self) -> None:
        found = await self._client.get(META)
        if found is not None:
            self._writer.adopt([found])
            self._version, self._generation = read_meta(found.value)
            return
        # An empty etcd counts its revisions from 1 again. With the time as generation its epochs
        # are still greater than those of the etcd before; agents refuse orders of smaller ones
        # (Note [Fencing]).
        self._generation = int(time.time())
        await self._write_meta(codec.BASIC_VERSION)

    async def _write_meta(self, version: int) -> None:
        meta = {"schema_version": version, "cluster_generation": self._generation}
        await self._writer.write([Change(META, json.dumps(meta).encode())])
        self._version = version

    def _remaining_s(self) -> float:
        return min(self._deadline_s, self._lease.remaining_s())
