"""Fenced writes of any size, each of which happens as a whole or not at all.

Note [Fencing]
~~~~~~~~~~~~~~
Two drivers can both believe that they lead: a lease can expire while its holder is paused, and a
request can be delivered after its sender was replaced. Time alone cannot exclude that. So every
transaction of a leader compares the create revision of the leader key with the one of its own
election. Once the key is gone or is another driver's, all its writes fail, however late they
arrive. A new leader reads the state only when the key is its own, so nothing can be added to what
it has read. The same revision is in the epoch of every order to a node, and agents refuse orders of
an older epoch. The attempts of a job are fenced in the same way by its commit log (Note [Attempts]
in :mod:`megascale_driver.core.jobs.jobs`).

Note [Settle by resubmission]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the reply to a transaction is lost, its outcome is unknown. A read cannot decide it, because
the lost transaction may still be on its way and be applied after the read. So the identical
transaction is sent again until there is an answer. It also compares the mod revision of a key that
it writes, so it is applied at most once. Either it is applied now, or its comparison fails, and the
id of the transaction in that key shows whether the lost one was applied
(:mod:`megascale_common.etcd.settled`).

Note [Fenced write]
~~~~~~~~~~~~~~~~~~~
etcd takes 128 operations and 1.5 MiB in a transaction, and a decision about ten thousand nodes has
more. Beyond half of these limits a decision becomes an *intent*: its changes are stored in pieces
under ``intents/{id}/``, which mean nothing by themselves. One small transaction then puts
``intents/{id}``: with it the decision is made. After that the pieces are carried out one by one,
each in the transaction that removes it, so each is carried out once. If a leader ends in between,
the next one carries out the rest before it reads anything else, and removes pieces without an
intent.

Rows that change only in a few fields (ten thousand nodes of a mass event) are one piece that names
them (:mod:`megascale_driver.journal.pieces`). It is carried out in batches, and from the beginning
by the next leader: applied again, a patch changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megascale_common.etcd.election import Leadership
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.operations import (
    Compare,
    Delete,
    DeleteRange,
    Etcd,
    KeyValue,
    ModRevisionEquals,
    Operation,
    Put,
)
from megascale_common.etcd.settled import Rejected, txn_settled
from megascale_common.service import logs
from megascale_common.service.errors import NotLeaderError
from megascale_driver.journal import codec, pieces
from megascale_driver.journal.pieces import Change, Piece, size_of, split

INTENTS = "intents/"
# Half of what etcd takes: --max-txn-ops 128, --max-request-bytes 1.5 MiB.
MAX_CHANGES = 60
MAX_BYTES = 700 << 10
MARKER = "journal"
_PIECE_BYTES = MAX_BYTES // 2  # inside another text a piece grows by its quotation marks

_log = logs.get(__name__)


class FencedWriter:
    """Writes of one leadership, one after another.

    ``marker``: the key that a transaction without a suitable key of its own is recognised by;
    concurrent writers have different ones.
    """

    def __init__(
        self,
        client: Etcd,
        leadership: Leadership,
        remaining_s: Callable[[], float],
        marker: str = MARKER,
    ) -> None:
        self.revisions: dict[str, int] = {}
        self.note: dict[str, int] = {}  # stored in the marker with each transaction
        self.noted: dict[str, int] = {}  # as found there
        self.marked = 0  # the marker's revision, as found; 0 without one
        self.largest_bytes = 0  # of all requests so far, as this module counts them
        self._client = client
        self._leadership = leadership
        self._marker = marker
        self._remaining_s = remaining_s

    def adopt(self, items: Iterable[KeyValue]) -> None:
        """Remember the revisions of keys as stored."""
        self.revisions.update((item.key, item.mod_revision) for item in items)

    async def adopt_marker(self) -> None:
        """Read the marker's revision, before the first write of a leadership."""
        found = await self._client.get(self._marker)
        self.marked = found.mod_revision if found is not None else 0
        self.revisions[self._marker] = self.marked
        if found is not None:
            values = codec.parse(found.value, self._marker)
            self.noted = {name: v for name, v in values.items() if type(v) is int}

    async def write(
        self, changes: Sequence[Change], before: Sequence[Change] = (), staged: Sequence[Piece] = ()
    ) -> None:
        """Make all changes in one transaction, or in an intent if there are too many.

        ``before``: values that no stored value names yet; they are stored first, in any number of
        transactions. ``staged``: the :func:`intent` of the changes, if it was made already.

        Raises:
            NotLeaderError: a transaction was refused; nothing of ``changes`` was applied.
            EtcdError: no answer within the lease. The outcome is unknown, so the leadership must
                end: the next leader reads it from etcd.
        """
        # If the leader ends in between, these are garbage that no row names.
        for piece in split(list(before), MAX_CHANGES, MAX_BYTES):
            await self._send(piece)
        staged = staged or intent(changes)
        if not staged:
            await self._send(changes)
            return
        name = f"{INTENTS}{uuid.uuid4().hex}"
        keys = [f"{name}/{number:06d}" for number in range(len(staged))]
        for key, part in zip(keys, staged, strict=True):
            await self._send([Change(key, part.value)])
        # The moment of the decision: before this write nothing has happened, after it everything
        # will.
        await self._send([Change(name, codec.text({"pieces": len(staged)}))])
        rows = {change.key: change for change in changes if change.patch}
        patched = {key: part.rows for key, part in zip(keys, staged, strict=True) if part.rows}
        await self._carry_out(name, keys, patched, rows)

    async def recover(self) -> None:
        """Carry out the intents of the leader before, and remove pieces without a decision."""
        listing = await self._client.get_prefix(INTENTS)
        self.adopt(listing.items)
        keys = [item.key for item in listing.items]
        # An intent has no second slash; pieces without their intent were never decided.
        decided = [key for key in keys if key.count("/") == 1]
        for name in decided:
            await self._carry_out(name, [key for key in keys if key.startswith(f"{name}/")])
        orphans = [
            Change(key)
            for key in keys
            if key not in decided and not any(key.startswith(f"{name}/") for name in decided)
        ]
        for piece in split(orphans, MAX_CHANGES, MAX_BYTES):
            await self._send(piece)
        if keys:
            _log.info("intents found", carried_out=len(decided), dropped=len(orphans))

    async def _carry_out(
        self,
        name: str,
        keys: list[str],
        patched: Mapping[str, Sequence[str]] | None = None,
        rows: Mapping[str, Change] | None = None,
    ) -> None:
        """Carry out a decision; ``patched``, ``rows``: known if this leader decided it."""
        for key in keys:
            found = await self._client.get(key)
            if found is None:
                raise NotLeaderError(f"{key}: a piece of a decision is gone")
            self.revisions[key] = found.mod_revision
            if pieces.is_patches(found.value):
                known = (patched or {}).get(key)
                # Ten thousand patches are not read back by the leader that has written them.
                patches = (
                    pieces.patches_of(found.value, key)
                    if known is None
                    else [(row, {}) for row in known]
                )
                for first in range(0, len(patches), MAX_CHANGES):
                    some = patches[first : first + MAX_CHANGES]
                    await self._send(await self._patched(some, rows or {}))
                await self._send([], guards=[key])
                continue
            # The piece is removed with its changes, so it is carried out once. The keys of the
            # changes are not compared: the leader that wrote the piece may have changed them.
            await self._send(_unpacked(found.value), guards=[key])
        await self._send([Change(name)])

    async def _patched(
        self, patches: Sequence[tuple[str, dict[str, Any]]], rows: Mapping[str, Change]
    ) -> list[Change]:
        """The whole rows: those given, else the stored ones with the patches applied.

        A patch that is applied again changes nothing.
        """
        found = [rows[key] for key, _ in patches if key in rows]
        for key, patch in patches:
            if key not in rows and (item := await self._client.get(key)) is not None:
                self.adopt([item])
                values = {**codec.parse(item.value, key), **patch}
                found.append(Change(key, codec.text(values)))
        return found

    async def _send(self, changes: Sequence[Change], guards: Sequence[str] = ()) -> None:
        """Send one transaction; ``guards``: only these keys are compared, and removed."""
        if not changes and not guards:
            return
        txn_id = uuid.uuid4().hex
        compared = guards or [c.key for c in changes if not c.prefix and not c.end]
        # The guard is the fence. The marker orders the writes of this leadership, and has the id by
        # which a lost reply is settled.
        compare: list[Compare] = [self._leadership.guard(), self._expect(self._marker)]
        compare += [self._expect(key) for key in compared]
        success = [_operation(change) for change in changes]
        success += [Delete(key) for key in guards]
        success.append(Put(self._marker, json.dumps({"txn": txn_id, **self.note}).encode()))
        sent_bytes = sum(map(size_of, changes)) + size_of(Change(self._marker, b"x" * 48))
        self.largest_bytes = max(self.largest_bytes, sent_bytes)
        result = await txn_settled(
            self._client,
            compare=compare,
            success=success,
            marker_key=self._marker,
            txn_id=txn_id,
            deadline_s=max(self._remaining_s(), 0.1),
        )
        if isinstance(result, Rejected):
            await self._refused(result)
            raise NotLeaderError(
                f"the write of {', '.join(change.key for change in changes[:4])} was refused"
            )
        self._written([*changes, *map(Change, guards)], result.revision)

    async def _refused(self, result: Rejected) -> None:
        """If this driver still leads, another writer changed keys: have everything read again."""
        guard = self._leadership.guard()
        # With another holder the fence has done its work: nothing is wrong with the keys.
        holder = result.current.get(guard.key)
        if holder is None or holder.create_revision != guard.revision:
            return
        _log.error("keys in etcd were changed by another than the leader; the term begins again")
        with contextlib.suppress(EtcdError):
            # Without its marker the next term looks for jobs that the index does not name.
            await self._client.txn(compare=[guard], success=[Delete(self._marker)])

    def _written(self, changes: Iterable[Change], revision: int) -> None:
        self.revisions[self._marker] = revision
        for change in changes:
            if change.value is not None:
                self.revisions[change.key] = revision
            else:
                self.revisions.pop(change.key, None)
            if change.prefix:
                for key in [key for key in self.revisions if key.startswith(change.key)]:
                    del self.revisions[key]

    def _expect(self, key: str) -> ModRevisionEquals:
        return ModRevisionEquals(key, self.revisions.get(key, 0))


def intent(changes: Sequence[Change]) -> list[Piece]:
    """The pieces of changes that are too many for one transaction; none if they fit."""
    if fits(changes):
        return []
    patches = [change for change in changes if change.patch]
    others = [change for change in changes if not change.patch]
    staged = [Piece(_packed(piece)) for piece in split(others, MAX_CHANGES, _PIECE_BYTES)]
    return staged + pieces.patches(patches, _PIECE_BYTES)


def fits(changes: Sequence[Change]) -> bool:
    """True if the changes fit one transaction."""
    return len(changes) <= MAX_CHANGES and sum(map(size_of, changes)) <= MAX_BYTES


def version_of(changes: Sequence[Change], staged: Sequence[Piece]) -> int:
    """The schema version that the next leader needs to carry the changes out."""
    if not staged:
        return codec.BASIC_VERSION
    patched = any(change.patch for change in changes)
    return codec.SCHEMA_VERSION if patched else codec.PARTS_VERSION


def _operation(change: Change) -> Operation:
    if change.value is not None:
        return Put(change.key, change.value)
    if change.end:
        return DeleteRange(change.key, change.end)
    return Delete(change.key, prefix=change.prefix)


def _packed(piece: list[Change]) -> bytes:
    return codec.text(
        [
            [
                change.key,
                None if change.value is None else change.value.decode(),
                change.prefix,
                change.end,
            ]
            for change in piece
        ]
    )


def _unpacked(value: bytes) -> list[Change]:
    found: list[Any] = json.loads(value)
    return [
        Change(key, None if text is None else text.encode(), prefix, end)
        for key, text, prefix, end in found
    ]
