"""Answers a worker's restore requests: its memory, a checkpoint's index, windows of its bytes.

The messages are those of :mod:`megascale_common.node.messages`;
:mod:`megascale_checkpoint.serve.local_server` receives them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.restore.rank_restore import (
    FoundInMemory,
    MemoryProblem,
    RankRestores,
    Restoration,
    StoredReads,
)
from megascale_common.node.messages import (
    INDEX_UNITS,
    MOST_READS,
    DaemonAnswer,
    DidRead,
    ErrorKind,
    LookInMemory,
    MemoryState,
    OpenStored,
    ReadIndex,
    ReadStored,
    Refused,
    Restore,
    Restored,
    StoredIndex,
    StoredState,
    Verified,
    Verify,
    kind_of,
)
from megascale_common.service.errors import DamagedError, RequestError, ServiceError
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.read_plan import Read, encode
from megascale_job.visible import agreed, counted

T = TypeVar("T")


class RestoreRequests:
    """The restore requests of one connection.

    Args:
        restores: returns the rank's restores; raises RequestError once a newer connection has taken
            over.
        registration: returns the connection's registration.
        held: returns the set of slots that the connection writes or reads, which is shared with it.
    """

    def __init__(
        self,
        restores: Callable[[], RankRestores],
        registration: Callable[[], RegisteredRank],
        held: Callable[[], set[int]],
    ) -> None:
        self._restores = restores
        self._registration = registration
        self._held = held
        self._reads: StoredReads | None = None
        self._found: FoundInMemory | None = None
        self._ended = False
        self.handlers: Mapping[type[Any], Callable[[Any], Awaitable[DaemonAnswer]]] = {
            Restore: self._restore,
            LookInMemory: self._look_in_memory,
            Verify: self._verify,
            OpenStored: self._open,
            ReadIndex: self._index,
            ReadStored: self._read,
        }

    def released(self, slot: int) -> None:
        """End a restore in windows if the worker gives its slot back."""
        if self._reads is not None and self._reads.slot == slot:
            self._restores().end_reads(self._reads)
            self._reads = None

    async def _restore(self, request: Restore) -> Restored | Refused:
        restored = await _answered(self._restores().restore(_plan(request)))
        if not isinstance(restored, Restoration):
            return restored
        self._held().add(restored.slot)
        return Restored(
            slot=restored.slot,
            source=restored.source,
            small_state=restored.small_state,
            bytes_read=restored.bytes_read,
        )

    async def _look_in_memory(self, request: LookInMemory) -> MemoryState:
        plan = _plan(request)
        found: Restoration | FoundInMemory | MemoryProblem
        if request.verified_later:
            found = await self._restores().find_in_memory(plan)
        else:
            found = await self._restores().look_in_memory(plan)
        if isinstance(found, FoundInMemory):
            self._found = found
            slot = found.restoration.slot
            if found.arriving:
                restores = self._restores()
                found.verdict.add_done_callback(
                    lambda ended: self._held_once_whole(ended, slot, restores)
                )
                return MemoryState(slot=slot, small_state={}, problem="", file="", arriving=True)
            found.verdict.add_done_callback(lambda ended: self._not_held_if_damaged(ended, slot))
            found = found.restoration
        if isinstance(found, Restoration):
            self._held().add(found.slot)
            return MemoryState(
                slot=found.slot,
                small_state=found.small_state,
                problem="",
                file="",
            )
        return MemoryState(
            slot=-1,
            small_state={},
            problem=found.text,
            file=found.damage.file if found.damage is not None else "",
        )

    async def _verify(self, request: Verify) -> Verified:
        found = self._found
        self._found = None
        if found is None:
            raise RequestError(
                "nothing is being verified: send restore_memory with verified_later first"
            )
        # Shielded: the threads must end by themselves even if the connection is cancelled.
        problem = await asyncio.shield(found.verdict)
        if problem is None:
            if not found.arrived:
                return Verified(problem="", file="")
            state = found.arrived[-1]
            return Verified(
                problem="",
                file="",
                small_state=state.small_state,
                fetched_bytes=state.size_bytes,
            )
        file = problem.damage.file if problem.damage is not None else ""
        return Verified(problem=problem.text, file=file)

    def ended(self) -> None:
        """Cancel a fetch for the connection, which has ended."""
        self._ended = True
        if self._found is not None and self._found.arriving:
            self._found.cancelled.cancel()

    def _held_once_whole(
        self, ended: asyncio.Task[MemoryProblem | None], slot: int, restores: RankRestores
    ) -> None:
        """Add the slot of an arrived state to those held, unless the connection has ended."""
        if ended.cancelled() or ended.exception() is not None or ended.result() is not None:
            return
        if self._ended:
            restores.release(slot)
        else:
            self._held().add(slot)

    def _not_held_if_damaged(self, ended: asyncio.Task[MemoryProblem | None], slot: int) -> None:
        """Remove a damaged slot, which is free already, from those to be released."""
        damaged = not ended.cancelled() and ended.exception() is None and ended.result() is not None
        if damaged:
            self._held().discard(slot)

    async def _open(self, request: OpenStored) -> StoredState | Refused:
        plan = _plan(request)
        if not plan.manifest_uri:
            raise RequestError("restore_open.plan.manifest_uri is empty; it must name a manifest")
        if self._reads is not None:
            raise RequestError("a checkpoint is open already: release its slot first")
        reads = await _answered(self._restores().open_stored(plan))
        if not isinstance(reads, StoredReads):
            return reads
        self._reads = reads
        self._held().add(reads.slot)
        given, manifest = self._registration(), reads.stored.manifest
        return StoredState(
            files=len(manifest.files),
            slot=reads.slot,
            small_state=manifest.small_state_of(given.rank, given.digest),
        )

    async def _index(self, request: ReadIndex) -> StoredIndex | Refused:
        reads = self._opened()
        file, first = request.file, request.first
        files = len(reads.stored.manifest.files)
        if not 0 <= file < files or first < 0:
            raise RequestError(
                f"restore_index.file is {file} and first {first}; "
                f"there {agreed(files, 'are')} {counted(files, 'file')}"
            )
        work = self._restores().index(reads, file, first, INDEX_UNITS)
        found = await self._with_slot(reads, work)
        if not isinstance(found, tuple):
            return found
        runs = base64.b64encode(encode(found[0])).decode()
        return StoredIndex(runs=runs, following=found[1])

    async def _read(self, request: ReadStored) -> DidRead | Refused:
        reads, at = self._opened(), request.at
        if len(request.reads) > MOST_READS:
            raise RequestError(f"restore_read.reads has {len(request.reads)}; at most {MOST_READS}")
        asked = [_read_of(values) for values in request.reads]
        _check_inside(asked, at, self._registration().layout.slot_bytes)
        if any(not 0 <= read.file < len(reads.stored.manifest.files) for read in asked):
            raise RequestError("restore_read.reads names a file that the checkpoint does not have")
        found = await self._with_slot(reads, self._restores().read(reads, at, asked))
        return DidRead(bytes_read=found) if isinstance(found, int) else found

    def _opened(self) -> StoredReads:
        if self._reads is None:
            raise RequestError("no checkpoint is open: send restore_open first")
        return self._reads

    async def _with_slot(self, reads: StoredReads, work: Awaitable[T]) -> T | Refused:
        """Await work that uses the slot; if this is cancelled, the work releases the slot."""
        self._held().discard(reads.slot)
        try:
            answer = await _answered(work)
        except Exception:  # a defect, and no cancellation, after which the work releases the slot
            self._held().add(reads.slot)
            raise
        self._held().add(reads.slot)
        return answer


async def _answered(work: Awaitable[T]) -> T | Refused:
    """The result of ``work``, or its error as an answer for the worker."""
    try:
        return await work
    except DamagedError as error:
        return _refused("CHECKPOINT_CORRUPT", error, error.file)
    except RequestError as error:  # such as another model: no attempt can restore it
        return _refused("BAD_JOB", error, "")
    except (ServiceError, OSError) as error:
        return _refused("OTHER", error, "")


def _refused(kind: ErrorKind, error: Exception, file: str) -> Refused:
    return Refused(error_kind=kind, error=str(error), file=file)


def _plan(request: Restore | LookInMemory | OpenStored) -> RestorePlan:
    try:
        plan = RestorePlan.from_mapping(request.plan)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if plan.source is RestoreSource.NONE:
        raise RequestError(f"{kind_of(request)}.plan.source is none; it must be memory or storage")
    return plan


def _read_of(values: Any) -> Read:
    try:
        read = Read(*values)
        numbers = (read.file, read.first, read.size_bytes, read.start, read.stop, read.at)
        good = all(type(number) is int for number in numbers) and isinstance(read.checksum, str)
    except TypeError:
        good = False
    if not good or not (0 <= read.start < read.stop <= read.size_bytes and read.first >= 0):
        raise RequestError(f"restore_read.reads: {values!r} is not a part of a piece")
    return read


def _check_inside(reads: list[Read], at: int, slot_bytes: int) -> None:
    for read in reads:
        if at < 0 or read.at < 0 or at + read.at + read.stop - read.start > slot_bytes:
            raise RequestError(
                f"restore_read: byte {at + read.at} of the slot lies outside its {slot_bytes} bytes"
            )
