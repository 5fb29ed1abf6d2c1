"""The keys that change between two states of the cluster, and their new values.

Keys under the cluster's prefix: ``meta``, ``driver/leader``, ``log/{seq}``, ``breaker``,
``nodes/{n}``, ``tenants/{t}``, ``requests/{id}``, ``jobs/{j}/head``, ``jobs/{j}/specs/{rev}``,
``jobs/{j}/attempts/{n}``, ``jobs/{j}/log/{seq}``, ``index/{j}`` (the names of all jobs, so that
they are found without scanning their logs). Large fields of a head or an attempt are chunks under
``jobs/{j}/attempts/{n}/placement/`` and ``jobs/{j}/parts/``, those of the breaker under ``parts/``
(:mod:`megascale_driver.journal.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.overlay import changed_keys
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec, records
from megascale_driver.journal.pieces import PARTS, Change, PartEncoder, Piece
from megascale_job import loading

INDEX = "index/"
JOBS = "jobs/"
TXN_ID = "txn"  # earlier builds wrote the id of the transaction into every value


@dataclass(slots=True)
class Batch:
    """The changes of one decision, and the chunks that they name, by key.

    ``pieces``: the changes once more, if there are too many for one transaction. ``version``: the
    schema version that reads them.
    """

    changes: list[Change] = field(default_factory=list)
    chunks: dict[str, bytes] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    version: int = codec.BASIC_VERSION


class Rows:
    """Turns states into rows; remembers what it needs to know of the stored rows."""

    def __init__(self) -> None:
        self._parts = PartEncoder()
        # Fields of a stored row that this build does not know: a later build wrote them, and finds
        # them again when it leads.
        self._foreign: dict[str, dict[str, Any]] = {}
        # The chunks that each row names.
        self._named: dict[str, frozenset[str]] = {}

    def adopt(self, key: str, kind: type[Any], values: Mapping[str, Any]) -> None:
        """Remember a row that was read."""
        known = {*codec.keys(kind), PARTS, TXN_ID}
        if foreign := {name: value for name, value in values.items() if name not in known}:
            self._foreign[key] = foreign
        if PARTS in values:
            found = values[PARTS].values()
            self._named[key] = frozenset(part for parts in found for part in parts)

    def named(self) -> frozenset[str]:
        """All chunks that rows name."""
        return frozenset().union(*self._named.values())

    def between(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> Batch:
        """Everything that differs between the states, log lines first."""
        batch = Batch()
        for key, value, version in records.records(audit):
            batch.changes.append(Change(key, value))
            batch.version = max(batch.version, version)
        for name in changed_keys(old.jobs, new.jobs):
            if (job := new.jobs.get(name)) is not None:
                self._job(batch, old.jobs.get(name), job)
            else:
                self._remove_job(batch, name)
        for key in old.unreadable.keys() - new.unreadable.keys():
            if key.startswith(JOBS):
                self._remove_job(batch, key.removeprefix(JOBS))
        for name in changed_keys(old.nodes, new.nodes):
            if (node := new.nodes.get(name)) is None:
                batch.changes.append(Change(f"nodes/{name}"))
                self._forget(f"nodes/{name}")
            elif differs(old.nodes.get(name), node):
                self._put(batch, f"nodes/{name}", node, lambda _: "parts/", old.nodes.get(name))
        self._small(batch, "tenants/", old.tenants, new.tenants)
        if differs(old.breaker, new.breaker):
            self._put(batch, "breaker", new.breaker, lambda _: "parts/")
        for name in changed_keys(old.requests, new.requests):
            request = new.requests.get(name)
            value_or_none = None if request is None else codec.dump(request)
            batch.changes.append(Change(f"requests/{name}", value_or_none))
        return batch

    def _small(
        self, batch: Batch, folder: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> None:
        """Add the changes of rows without parts, one per name."""
        for name in changed_keys(old, new):
            if (value := new.get(name)) is None:
                batch.changes.append(Change(f"{folder}{name}"))
                self._forget(f"{folder}{name}")
            else:
                self._put(batch, f"{folder}{name}", value, lambda _: "parts/")

    def _remove_job(self, batch: Batch, name: str) -> None:
        """Remove everything of a job, including what this decision would have added."""
        folder = f"jobs/{name}/"
        # One transaction cannot put a key and delete its prefix.
        batch.changes = [change for change in batch.changes if not change.key.startswith(folder)]
        batch.changes += [Change(folder, prefix=True), Change(f"{INDEX}{name}")]
        self._forget(folder)

    def _job(self, batch: Batch, before: Job | None, job: Job) -> None:
        name = job.name
        if before is None:
            batch.changes.append(Change(f"{INDEX}{name}", b"{}"))
        if before is None or before.config is not job.config:
            spec = loading.to_json(job.config).encode()
            batch.changes.append(Change(f"jobs/{name}/specs/{job.spec_revision}", spec))
        known = {record.number for record in before.attempts} if before is not None else set()
        for record in job.attempts:
            if record.number not in known:
                self._put(
                    batch,
                    attempt_key(name, record.number),
                    record,
                    chunk_folder(name, record.number),
                )
        if differs(before, job):
            self._put(batch, f"jobs/{name}/head", job, chunk_folder(name, job.attempt))

    def _put(
        self,
        batch: Batch,
        key: str,
        value: Any,
        folder_of: Callable[[str], str],
        before: Any = None,
    ) -> None:
        """Put a row; ``before``: its stored value, if it has no parts, for the patch."""
        encoded = self._parts.encode(key, folder_of, value)
        # Own fields win over foreign ones of the same name.
        row = {**self._foreign.get(key, {}), **encoded.values}
        patch = b""
        if before is not None and not encoded.keys and key not in self._named:
            stored = codec.plain(before)
            changed = {name: item for name, item in row.items() if item != stored.get(name)}
            patch = codec.text({name: changed[name] for name in changed if name in encoded.values})
        batch.changes.append(Change(key, codec.text(row), patch=patch))
        batch.chunks.update(encoded.chunks)
        if encoded.keys:
            batch.version = max(batch.version, encoded.version)
            self._named[key] = encoded.keys
        else:
            self._named.pop(key, None)

    def _forget(self, prefix: str) -> None:
        for rows in (self._foreign, self._named):
            for key in [key for key in rows if key.startswith(prefix)]:
                del rows[key]
        self._parts.forget(prefix)


def attempt_key(job: str, number: int) -> str:
    """The key of an attempt's record."""
    return f"jobs/{job}/attempts/{number:06d}"


def chunk_folder(job: str, attempt: int) -> Callable[[str], str]:
    """Folder of the chunks of a job's fields: the attempt's for slots, the job's for all others."""
    return lambda path: (
        f"{attempt_key(job, attempt)}/placement/"
        if path.rpartition(".")[2] == "slots"
        else f"jobs/{job}/parts/"
    )
