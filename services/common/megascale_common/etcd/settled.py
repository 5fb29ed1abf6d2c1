"""Transactions whose outcome becomes known, whatever happens to the reply.

Note [Settle by resubmission]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the reply to a write is lost, the writer does not know whether the write was applied. A plain
read cannot tell: the transaction may still be on its way, and be applied after the read. So the
writer sends the identical transaction again until it gets an answer.

That is safe because the transaction compares the mod revision of a marker key and then puts that
key. Once it has been applied, its compares no longer hold, so it is applied at most once. If the
compares fail, the failure branch reads the marker in the same atomic step, and the transaction id
in the marker's value shows whose write it was: ours, so that it was applied by an earlier sending,
or another writer's, so that it was rejected. One case cannot be decided: our write may have been
applied and then overwritten. It cannot occur with a marker that is written only once, such as a log
entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megascale_common.etcd.connection import retry_backoff
from megascale_common.etcd.errors import (
    EtcdError,
    EtcdUnavailable,
    InvalidEtcdRequest,
    UnknownOutcome,
)
from megascale_common.etcd.operations import (
    Compare,
    Etcd,
    Get,
    KeyValue,
    ModRevisionEquals,
    Operation,
    Put,
    TxnResult,
)

MIN_TXN_ID_LENGTH = 16  # so that the id cannot be in another marker's value by chance


@dataclass(frozen=True, slots=True)
class Applied:
    """The transaction was applied, once, at ``revision``."""

    revision: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The transaction was not applied, as of ``revision``.

    It never will be if a failed compare cannot hold again later, which is true for every revision
    except 0. ``current`` has every compared key as it was then; an absent key has no entry.
    """

    revision: int
    current: dict[str, KeyValue]


@dataclass(frozen=True, slots=True)
class SettledTxn:
    """One fenced write: all of ``success`` if every compare holds, else nothing.

    See Note [Settle by resubmission]. ``success`` puts ``marker_key`` with a value that contains
    ``txn_id`` (a UUID, never used again), and ``compare`` has a ``ModRevisionEquals`` for it (0:
    must be absent). A key that is written only once, such as a log entry, is best, because no later
    write of another writer can overwrite the evidence. Raises InvalidEtcdRequest if one of these
    conditions is not met.
    """

    compare: tuple[Compare, ...]
    success: tuple[Operation, ...]
    marker_key: str
    txn_id: str

    def __post_init__(self) -> None:
        if len(self.txn_id) < MIN_TXN_ID_LENGTH:
            raise InvalidEtcdRequest(
                f"txn_id: {self.txn_id!r} is shorter than {MIN_TXN_ID_LENGTH} characters: "
                "use a UUID"
            )
        puts = [op for op in self.success if isinstance(op, Put) and op.key == self.marker_key]
        if len(puts) != 1 or self.txn_id.encode() not in puts[0].value:
            raise InvalidEtcdRequest(
                f"marker_key: success must put {self.marker_key!r} with the txn id in its value"
            )
        if self.marker_expected_revision() is None:
            raise InvalidEtcdRequest(
                f"compare: a ModRevisionEquals of the marker {self.marker_key!r} is needed"
            )

    def marker_expected_revision(self) -> int | None:
        """The mod revision that the marker must have for the write to be applied."""
        for item in self.compare:
            if isinstance(item, ModRevisionEquals) and item.key == self.marker_key:
                return item.revision
        return None

    def reads(self) -> tuple[Get, ...]:
        """The failure branch: reads of every compared key, including the marker."""
        return tuple(Get(key) for key in dict.fromkeys(item.key for item in self.compare))

    def outcome(self, result: TxnResult, earlier_unknown: bool) -> Applied | Rejected:
        """The outcome of the write, from one answer.

        ``earlier_unknown``: an earlier sending had no answer. Raises UnknownOutcome in the one case
        that cannot be decided: that sending may have been applied, and another writer has changed
        the marker since then.
        """
        if result.succeeded:
            return Applied(result.revision)
        marker = result.found.get(self.marker_key)
        if marker is not None and self.txn_id.encode() in marker.value:
            return Applied(marker.mod_revision)
        expected = self.marker_expected_revision()
        unchanged = (marker.mod_revision if marker else 0) == expected
        # The marker was absent and has been put only once since, so by the other writer, not by us.
        created_by_other = expected == 0 and marker is not None and marker.version == 1
        if earlier_unknown and not unchanged and not created_by_other:
            raise UnknownOutcome(
                f"txn {self.txn_id}: sent without an answer, and {self.marker_key} was "
                "overwritten since"
            )
        return Rejected(result.revision, dict(result.found))


async def txn_settled(
    client: Etcd,
    *,
    compare: Sequence[Compare],
    success: Sequence[Operation],
    marker_key: str,
    txn_id: str,
    deadline_s: float = 30.0,
) -> Applied | Rejected:
    """Apply a fenced write exactly once, or detect that it was rejected, across lost replies.

    ``SettledTxn`` has the conditions on the arguments. The identical transaction is sent again,
    with back-off, until ``deadline_s`` has passed. Raises UnknownOutcome if the outcome is unknown
    even then, EtcdUnavailable if it was never sent, InvalidEtcdRequest and the other refusals of
    ``errors``.
    """
    write = SettledTxn(tuple(compare), tuple(success), marker_key, txn_id)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    backoff = retry_backoff()
    unknown = False
    while True:
        failure: EtcdError
        try:
            result = await client.txn(
                compare=write.compare, success=write.success, failure=write.reads()
            )
        except EtcdUnavailable as error:
            failure = error
        except UnknownOutcome as error:
            failure, unknown = error, True
        else:
            return write.outcome(result, unknown)
        if loop.time() >= deadline:
            kind = UnknownOutcome if unknown else EtcdUnavailable
            raise kind(f"txn {txn_id}: not settled within {deadline_s:g} s: {failure}") from failure
        await backoff.sleep()
