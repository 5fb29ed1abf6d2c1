"""The driver's state in etcd: loaded by a new leader, changed only by fenced transactions.

Keys under the cluster's prefix: ``meta``, ``driver/leader``, ``log/{seq}``, ``breaker``,
``nodes/{n}``, ``requests/{id}``, ``jobs/{j}/head``, ``jobs/{j}/specs/{rev}``,
``jobs/{j}/attempts/{n}``, ``jobs/{j}/log/{seq}``.

Every transaction compares two things. The create revision of the leader key fences a former leader:
its writes fail as soon as the key is gone or is another's. The mod revision of each key that is
written lets the transaction be applied once only. So when a reply is lost and the outcome is
unknown, the identical transaction is sent again: either it is applied now, or it fails and finds
its own id in what the first one wrote. A read could not decide this, because the lost transaction
may still be on its way and be applied after the read.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from megascale_common.etcd.election import Leadership
from megascale_common.etcd.operations import Compare, Delete, ModRevisionEquals, Operation, Put
from megascale_common.etcd.protocol import Etcd
from megascale_common.etcd.settled import Rejected, txn_settled
from megascale_common.job import config as job_config
from megascale_common.service.errors import CodecError, NotLeaderError
from megascale_driver.core.events import Audit
from megascale_driver.core.overlay import changed_keys
from megascale_driver.core.state import (
    AttemptRecord,
    Breaker,
    Cluster,
    Job,
    Node,
    Request,
)
from megascale_driver.core.storing import differs
from megascale_driver.journal import codec

LEADER_KEY = "driver/leader"
# etcd takes 128 operations in a transaction; one compare is for the leader key.
MAX_KEYS_PER_TXN = 100
MAX_BYTES_PER_TXN = 1 << 20  # etcd takes 1.5 MiB in a request


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a new leader reads from etcd."""

    cluster: Cluster
    audit: tuple[Audit, ...]
    generation: int


class Store:
    """Reads and writes the cluster's keys during one leadership."""

    def __init__(self, client: Etcd, leadership: Leadership) -> None:
        self._client = client
        self._leadership = leadership
        self._revisions: dict[str, int] = {}
        self._cluster_log_seq = 0

    async def load(self) -> Loaded:
        """All that earlier leaders have committed; writes ``meta`` at a cluster's first start.

        Raises:
            CodecError: a stored value cannot be read by this build.
            NotLeaderError: the leadership was lost meanwhile.
        """
        listing = await self._client.get_prefix("")
        values = {item.key: item.value for item in listing.items if item.key != LEADER_KEY}
        self._revisions = {
            item.key: item.mod_revision for item in listing.items if item.key != LEADER_KEY
        }
        generation = await self._meta(values.get("meta"))
        jobs = {name: _load_job(name, values) for name in _job_names(values)}
        # A line is written once and never changed, so the revision of its key gives its place among
        # the lines of all logs.
        lines = [
            (self._revisions[key], codec.load(Audit, value))
            for key, value in values.items()
            if _is_log(key)
        ]
        audit = tuple(
            line for _, line in sorted(lines, key=lambda item: (item[0], item[1].log, item[1].seq))
        )
        own = [line.seq for line in audit if not line.log]
        cluster = Cluster(
            nodes={
                key[6:]: codec.load(Node, value)
                for key, value in values.items()
                if key.startswith("nodes/")
            },
            jobs=jobs,
            requests={
                key[9:]: codec.load(Request, value)
                for key, value in values.items()
                if key.startswith("requests/")
            },
            breaker=codec.load(Breaker, values["breaker"]) if "breaker" in values else Breaker(),
            log_seq=max(own, default=0),
        )
        return Loaded(cluster, audit, generation)

    async def commit(
        self, old: Cluster, new: Cluster, audit: tuple[Audit, ...], *, deadline_s: float
    ) -> bool:
        """Write what differs between the states; returns whether there was anything to write.

        It returns only when all of it is known to be committed.

        Raises:
            NotLeaderError: a transaction was refused; nothing of it was applied.
            EtcdError: no answer within the deadline. The outcome is unknown, so the leadership must
                end: the next leader reads it from etcd.
        """
        # A batch beyond the limits of one transaction becomes several. The log lines come first: if
        # the driver fails in between, a line may be there without its decision, never a decision
        # without its line.
        changes = list(_changes(old, new, audit))
        for chunk in chunks(changes):
            await self._write(chunk, deadline_s)
        return bool(changes)

    async def _meta(self, value: bytes | None) -> int:
        if value is not None:
            found = json.loads(value)
            version = int(found["schema_version"])
            if version > codec.SCHEMA_VERSION:
                raise CodecError(
                    f"meta: etcd holds schema version {version}, this driver reads versions "
                    f"up to {codec.SCHEMA_VERSION}: start the newer build"
                )
            return int(found["cluster_generation"])
        # An empty etcd counts its revisions from 1 again. With the time as generation its epochs
        # are still greater than those of the etcd before; agents refuse orders of lesser ones.
        generation = int(time.time())
        meta = {"schema_version": codec.SCHEMA_VERSION, "cluster_generation": generation}
        await self._write([("meta", json.dumps(meta).encode())], deadline_s=10.0)
        return generation

    async def _write(self, changes: list[tuple[str, bytes | None]], deadline_s: float) -> None:
        txn_id = uuid.uuid4().hex
        compare: list[Compare] = [self._leadership.guard()]
        compare += [ModRevisionEquals(key, self._revisions.get(key, 0)) for key, _ in changes]
        marker = next((key for key, value in changes if value is not None), "")
        if not marker:
            # A transaction that only deletes leaves no trace of its id, so it could not be settled:
            # the id is put under a key for that purpose.
            marker, compare = "housekeeping", [*compare, self._expect("housekeeping")]
            changes = [*changes, (marker, b"{}")]
        success: list[Operation] = [
            Put(key, _stamp(value, txn_id)) if value is not None else Delete(key)
            for key, value in changes
        ]
        result = await txn_settled(
            self._client,
            compare=compare,
            success=success,
            marker_key=marker,
            txn_id=txn_id,
            deadline_s=deadline_s,
        )
        if isinstance(result, Rejected):
            raise NotLeaderError(
                f"the write of {', '.join(key for key, _ in changes[:4])} was refused"
            )
        for key, value in changes:
            self._revisions[key] = result.revision if value is not None else 0

    def _expect(self, key: str) -> ModRevisionEquals:
        return ModRevisionEquals(key, self._revisions.get(key, 0))


def chunks(changes: list[tuple[str, bytes | None]]) -> Iterator[list[tuple[str, bytes | None]]]:
    """The changes in order, cut into transactions within the limits; a larger value is alone."""
    chunk: list[tuple[str, bytes | None]] = []
    size_bytes = 0
    for key, value in changes:
        more_bytes = 2 * len(key) + len(value or b"")  # the key is in its compare as well
        if chunk and (
            len(chunk) == MAX_KEYS_PER_TXN or size_bytes + more_bytes > MAX_BYTES_PER_TXN
        ):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append((key, value))
        size_bytes += more_bytes
    if chunk:
        yield chunk


def _stamp(value: bytes, txn_id: str) -> bytes:
    return json.dumps(
        {**json.loads(value), "txn": txn_id}, separators=(",", ":"), sort_keys=True
    ).encode()


def _changes(
    old: Cluster, new: Cluster, audit: tuple[Audit, ...]
) -> Iterator[tuple[str, bytes | None]]:
    """(key, new value or None to delete) of all that differs, log lines first."""
    for line in audit:
        yield (
            (f"jobs/{line.log}/log/{line.seq:020d}" if line.log else f"log/{line.seq:020d}"),
            codec.dump(line),
        )
    for name in changed_keys(old.jobs, new.jobs):
        before, job = old.jobs.get(name), new.jobs.get(name)
        if job is None:
            yield f"jobs/{name}/head", None
            continue
        if before is None or before.config is not job.config:
            yield f"jobs/{name}/specs/{job.spec_revision}", job_config.to_json(job.config).encode()
        for record in job.attempts[len(before.attempts) if before else 0 :]:
            yield f"jobs/{name}/attempts/{record.number:06d}", codec.dump(record)
        if differs(before, job):
            yield f"jobs/{name}/head", codec.dump(job)
    for name in changed_keys(old.nodes, new.nodes):
        node = new.nodes.get(name)
        if node is None:
            yield f"nodes/{name}", None
        elif differs(old.nodes.get(name), node):
            yield f"nodes/{name}", codec.dump(node)
    if differs(old.breaker, new.breaker):
        yield "breaker", codec.dump(new.breaker)
    for key in changed_keys(old.requests, new.requests):
        request = new.requests.get(key)
        yield f"requests/{key}", None if request is None else codec.dump(request)


def _job_names(values: dict[str, bytes]) -> list[str]:
    return [
        key.split("/")[1] for key in values if key.startswith("jobs/") and key.endswith("/head")
    ]


def _load_job(name: str, values: dict[str, bytes]) -> Job:
    head = values[f"jobs/{name}/head"]
    revision = int(json.loads(head).get("spec_revision", 1))
    spec = json.loads(values[f"jobs/{name}/specs/{revision}"])
    spec.pop("txn", None)
    prefix = f"jobs/{name}/attempts/"
    records = [
        codec.load(AttemptRecord, value)
        for key, value in sorted(values.items())
        if key.startswith(prefix)
    ]
    return codec.load(Job, head, config=job_config.from_accepted(spec), attempts=tuple(records))


def _is_log(key: str) -> bool:
    return key.startswith("log/") or (key.startswith("jobs/") and "/log/" in key)
