"""The read of a new leader from etcd: O(jobs + nodes), whatever the history is.

Only the newest lines of each log are read. An unreadable row stops nothing else: its node is
quarantined; its job is left as it is in etcd, and its name is reserved until an operator deals with
it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megascale_common.etcd.operations import Etcd, KeyValue
from megascale_common.service import logs
from megascale_common.service.errors import CodecError, ServiceError
from megascale_driver.core.values import bounds
from megascale_driver.core.values.cluster import (
    Breaker,
    Cluster,
    Disposition,
    Node,
    Request,
    Tenant,
)
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import AttemptRecord, Job
from megascale_driver.journal import codec, records
from megascale_driver.journal.pieces import PARTS, joined, named
from megascale_driver.journal.rows import INDEX, Rows, attempt_key
from megascale_job import loading
from megascale_job.names import is_dns_label

CLUSTER_LINES = 5_000  # newest lines of the cluster's log that a new leader holds in memory
ACTIVE_JOB_LINES = 500  # lines of a job that has not ended
ENDED_JOB_LINES = 100
JOBS_AT_ONCE = 16  # jobs read concurrently
ROWS_AT_ONCE = 64  # rows read before other tasks get a turn: 4 ms
LARGE_JOB_BYTES = 256 << 10  # a larger job takes more than 10 ms to read
MAX_PROBLEM = 500  # characters of the reason why a row is unreadable
UNREADABLE = "unreadable-row"  # policy of a quarantine because of such a row

T = TypeVar("T")
_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state that a new leader has read."""

    cluster: Cluster
    audit: tuple[Audit, ...]
    generation: int


class Reader:
    """Reads the state once; notes every key in ``rows`` and ``revisions``."""

    def __init__(self, client: Etcd, rows: Rows, revisions: dict[str, int]) -> None:
        self._client = client
        self._rows = rows
        self._revisions = revisions
        self._unreadable: dict[str, str] = {}
        self._lines: list[tuple[int, Audit]] = []
        self._large = asyncio.Lock()
        self.chunks: set[str] = set()  # all stored chunks, whether a row names them or not

    async def read(self, generation: int, last_record: int) -> Loaded:
        """Read everything except ``meta``, which the caller has read.

        ``last_record``: the number of the newest record of the cluster's log.
        """
        chunks = await self._table("parts/")
        self.chunks.update(f"parts/{name}" for name in chunks)
        nodes = await self._nodes(await self._table("nodes/"))
        requests = await self._rows_of("requests/", Request)
        tenants = await self._rows_of("tenants/", Tenant)
        breaker = await self._breaker({f"parts/{name}": value for name, value in chunks.items()})
        jobs = await self._jobs(await self._table(INDEX))
        await self._log_from("", last_record - CLUSTER_LINES, last_record + records.BLOCK_LINES)
        lines = sorted(self._lines, key=lambda item: (item[0], item[1].log, item[1].seq))
        last = max((line.seq for _, line in lines if not line.log), default=0)
        unreadable = dict(sorted(self._unreadable.items()))
        cluster = Cluster(
            nodes, jobs, requests, breaker, log_seq=last, unreadable=unreadable, tenants=tenants
        )
        audit = tuple(line for _, line in lines)
        return Loaded(cluster, audit, generation)

    async def _nodes(self, rows: Mapping[str, bytes]) -> dict[str, Node]:
        """Read the nodes a few at a time: ten thousand at once would block the loop."""
        nodes: dict[str, Node] = {}
        for at, (name, value) in enumerate(rows.items(), 1):
            if (node := self._node(name, value)) is not None:
                nodes[name] = node
            if at % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return nodes

    async def _table(self, prefix: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        async for item in records.items(self._client, prefix, records.end_of(prefix)):
            self._revisions[item.key] = item.mod_revision
            found[item.key[len(prefix) :]] = item.value
        return found

    async def _rows_of(self, prefix: str, kind: type[T]) -> dict[str, T]:
        rows = (await self._table(prefix)).items()
        read = {name: self._row(f"{prefix}{name}", kind, value) for name, value in rows}
        return {name: value for name, value in read.items() if value is not None}

    async def _jobs(self, names: Iterable[str]) -> dict[str, Job]:
        room = asyncio.Semaphore(JOBS_AT_ONCE)

        async def read(name: str) -> Job | None:
            async with room:
                return await self._read_job(name)

        jobs = await asyncio.gather(*map(read, names))
        return {job.name: job for job in jobs if job is not None}

    async def _read_job(self, name: str) -> Job | None:
        """Read a job and the newest lines of its log, and no range that contains its whole log."""
        folder = f"jobs/{name}/"
        rows: dict[str, bytes] = {}
        # Two ranges, around the log: its lines can be thousands, and only the newest are wanted.
        for start, end in ((folder, f"{folder}log/"), (f"{folder}log0", f"jobs/{name}0")):
            async for item in records.items(self._client, start, end):
                rest = item.key.removeprefix(folder)
                self._revisions[item.key] = item.mod_revision
                rows[rest] = item.value
                if "/placement/" in rest or rest.startswith("parts/"):
                    self.chunks.add(item.key)
        if sum(map(len, rows.values())) < LARGE_JOB_BYTES:
            job = self._job(name, rows)
        else:
            # In a thread, which yields to the loop every few milliseconds; one at a time.
            async with self._large:
                job = await asyncio.to_thread(self._job, name, rows)
        if job is not None:
            lines = ENDED_JOB_LINES if job.terminal else ACTIVE_JOB_LINES
            await self._log_from(name, job.log_seq - lines, job.log_seq)
        return job

    def _job(self, name: str, rows: Mapping[str, bytes]) -> Job | None:
        where = f"jobs/{name}"
        try:
            if not is_dns_label(name):
                raise CodecError("its name is not a DNS-1123 label")
            if (head := rows.get("head")) is None:
                raise CodecError("there is no head")
            values = codec.parse(head, "head")
            chunks = {f"{where}/{rest}": value for rest, value in rows.items()}
            revision = values.get("spec_revision", 1)
            if (stored := rows.get(f"specs/{revision}")) is None:
                raise CodecError(f"there is no specification of revision {revision}")
            spec = codec.parse(stored, f"specs/{revision}")
            spec.pop("txn", None)
            job = codec.build(
                Job, joined(values, chunks), config=loading.from_accepted(spec), attempts=()
            )
            job = replace(job, attempts=self._attempts(job, rows, chunks))
            if (problem := bounds.stored(job)) or job.name != name:
                raise CodecError(problem or f"the head is that of {job.name!r}")
        except (CodecError, ServiceError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._refuse(where, error)
            return None
        self._rows.adopt(f"{where}/head", Job, values)
        return job

    def _attempts(
        self, job: Job, rows: Mapping[str, bytes], chunks: Mapping[str, bytes]
    ) -> tuple[AttemptRecord, ...]:
        """The records of a job's attempts; large placements only of the newest one."""
        found = []
        for rest in sorted(rows):
            if not rest.startswith("attempts/") or rest.count("/") > 1:
                continue
            values = codec.parse(rows[rest], rest)
            key = f"jobs/{job.name}/{rest}"
            self._rows.adopt(key, AttemptRecord, values)
            if named(values) and key == attempt_key(job.name, job.attempt):
                # The head names the same chunks.
                small = {name: value for name, value in values.items() if name != PARTS}
                record = codec.build(AttemptRecord, {**small, "slots": []})
                found.append(replace(record, slots=job.slots))
            elif not named(values):
                found.append(codec.build(AttemptRecord, values))
            else:
                found.append(codec.build(AttemptRecord, joined(values, chunks)))
        return tuple(found)

    async def _log_from(self, log: str, behind: int, last: int) -> None:
        """Read the lines of a log from ``behind`` + 1 to ``last``."""
        # A block has the key of its first line, which can be before ``behind``.
        first = max(0, behind + 1 - records.BLOCK_LINES)
        start, end = records.key(log, first), records.key(log, last + 1)
        self._take([item async for item in records.items(self._client, start, end)], behind)

    def _take(self, items: Iterable[KeyValue], behind: int) -> None:
        for item in items:
            self._revisions[item.key] = item.mod_revision
            try:
                found = records.lines_of(item.value, item.key)
            except CodecError as error:
                _log.error("a record of the log cannot be read", key=item.key, error=str(error))
                continue
            self._lines += [(item.mod_revision, line) for line in found if line.seq > behind]

    def _node(self, name: str, value: bytes) -> Node | None:
        node = self._row(f"nodes/{name}", Node, value)
        if node is not None:
            return node
        # It may have been cordoned or quarantined, which is unknown now, so it gets no work.
        reason = "its stored row cannot be read; uncordon it once it is known to be fit for work"
        return Node(
            name,
            disposition=Disposition.QUARANTINED,
            disposition_reason=reason,
            disposition_policy=UNREADABLE,
        )

    async def _breaker(self, chunks: Mapping[str, bytes]) -> Breaker:
        item = await self._client.get("breaker")
        if item is None:
            return Breaker()
        self._revisions[item.key] = item.mod_revision
        return self._row("breaker", Breaker, item.value, chunks) or Breaker()

    def _row(
        self, key: str, kind: type[T], value: bytes, chunks: Mapping[str, bytes] | None = None
    ) -> T | None:
        try:
            values = codec.parse(value, key)
            built = codec.build(kind, joined(values, chunks or {}))
        except (CodecError, ValueError, TypeError, AttributeError, KeyError) as error:
            self._refuse(key, error)
            return None
        self._rows.adopt(key, kind, values)
        return built

    def _refuse(self, key: str, error: Exception) -> None:
        text = str(error) or type(error).__name__
        _log.error("a row in etcd cannot be read", key=key, error=text)
        self._unreadable[key] = text[:MAX_PROBLEM]


def read_meta(value: bytes) -> tuple[int, int]:
    """(schema version, cluster generation) from the value of ``meta``.

    Raises:
        CodecError: unreadable, or of a later build.
    """
    try:
        found: dict[str, Any] = json.loads(value)
        version, generation = int(found["schema_version"]), int(found["cluster_generation"])
    except (ValueError, TypeError, KeyError) as error:
        raise CodecError(f"meta: {error!r}: restore it from a backup") from error
    if version > codec.SCHEMA_VERSION:
        raise CodecError(
            f"meta: etcd holds schema version {version}, this driver reads versions "
            f"up to {codec.SCHEMA_VERSION}: start the newer build"
        )
    return version, generation
