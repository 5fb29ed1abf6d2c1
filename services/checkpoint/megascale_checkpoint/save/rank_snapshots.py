"""One rank's snapshots: the memory and state of its slots, and the task that persists sealed ones.

Stage 1 of the two-stage checkpoint (MegaScale section 4.4): the trainer copies its state into a
slot and goes on training. Stage 2, from the slot to storage, runs here in the background, in the
order of the steps.

All state changes happen on the event loop. Threads only read or fill the memory of a slot, and a
slot counts as in use until its thread has ended: a cancelled task waits for the thread before it
releases the slot.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from dataclasses import replace
from typing import Any, Protocol

from megascale_checkpoint.concurrency import Cancellation, Pools, in_pool
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.slots import (
    Landing,
    Slot,
    SlotPages,
    SlotPhase,
    SlotSeal,
    SlotTable,
    slots_of,
)
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_checkpoint.restore.rank_restore import RankRestores, RestoreListener
from megascale_checkpoint.save import persist
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_common.service import logs, tasks
from megascale_common.service.errors import (
    ServiceError,
    SupersededError,
)

log = logs.get("stage")
KEPT_FAILURES = 16  # steps whose failure is kept for a later Drain
STORE_SILENT_S = 20.0  # without a byte taken: the storage is reported as hung
# Without a byte taken: its thread is left alone, and the slot is free again. A sync of what a slow
# disk has in its cache may take minutes.
GIVEN_UP_S = 300.0
MOST_LEFT_ALONE = 2  # threads of one rank that a storage holds
STOP_S = 5.0  # for threads to see that they are cancelled; one in a hung storage does not
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 10.0  # pauses of a Drain between two writes of a step


class ProgressListener(RestoreListener, Protocol):
    """What a rank's snapshots report to their job."""

    def note_commit(self, step: int, attempt: int, manifest_uri: str) -> None:
        """A checkpoint is complete."""

    def note_failure(self, rank: int, attempt: int, step: int, error: str) -> None:
        """A step could not be kept."""

    def note_persisted(self, duration_s: float, size_bytes: int) -> None:
        """A step's file is durable."""


class Owner(Protocol):
    """The connection of the worker that owns a rank's snapshots.

    ``serial`` is higher for a connection that was accepted later.
    """

    serial: int

    def end(self) -> set[int]:
        """Close it; the caller releases the slots that are returned."""


class RankSnapshots:
    """The snapshots of one (job, rank), kept across workers and attempts of the same layout.

    ``store_silent_s``: a storage that takes nothing for so long is reported; after ``given_up_s``
    the slot that it holds is free again.
    """

    store_silent_s, given_up_s = STORE_SILENT_S, GIVEN_UP_S

    def __init__(
        self,
        registration: RegisteredRank,
        memories: list[SlotMemory],
        listener: ProgressListener,
        pools: Pools,
        committer: CommitterClient,
        staging: StagingFolder,
    ) -> None:
        self.registration = registration
        self.memories = memories
        self.table = SlotTable(len(memories))
        self._staging = staging
        self._pages = SlotPages(self, listener, staging, pools)
        self.owner: Owner | None = None
        self.persisting: persist.Progress | None = None
        self.durable_step = 0  # the newest whose file this rank has written
        self.persist_s = 0.0  # how long that took
        self._listener = listener
        self._pools = pools
        self._committer = committer
        self._wake = asyncio.Event()
        self._cancelled = Cancellation()
        self._left_alone: set[asyncio.Future[persist.Report]] = set()
        self._landings: dict[int, Landing] = {}  # of the slots that are being written
        self._following: set[asyncio.Task[None]] = set()
        self._seals: set[asyncio.Task[None]] = set()
        self._reports: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._committed: deque[tuple[int, int]] = deque(maxlen=KEPT_FAILURES)
        self._failures: dict[tuple[int, int], str] = {}
        self._storage_failed: set[tuple[int, int]] = set()  # these may succeed when tried again
        self.restores = RankRestores(self, listener, pools)
        self._pages.populate(n for n, memory in enumerate(memories) if not memory.populated)
        what = f"persist {registration.job}/{registration.rank}"
        self._worker = tasks.essential(self._persist_all(), what)

    @classmethod
    async def create(
        cls,
        registration: RegisteredRank,
        listener: ProgressListener,
        staging: StagingFolder,
        pools: Pools,
        committer: CommitterClient,
    ) -> RankSnapshots:
        """Snapshots with fresh slots. Raises LimitError when there is no room."""
        memories = await in_pool(pools.memory, slots_of, registration, staging)
        return cls(registration, memories, listener, pools, committer, staging)

    def fits(self, registration: RegisteredRank) -> bool:
        """Whether the slots can be used for this registration as they are."""
        enough = registration.slots in (0, len(self.memories))
        return enough and self.registration.digest == registration.digest

    async def detach_owner(self) -> None:
        """Disconnect a worker whose successor registers, so that it can damage nothing.

        The slots that it was writing get new memory: it still maps the old one, and may write to it
        until its process has ended.

        Raises:
            LimitError: there is no room for that.
        """
        owner = self.owner
        self.owner = None
        if owner is None:
            return
        renewed = list[int]()
        for index in owner.end():
            self._end_landing(index)
            # Slots that it only read keep their memory: checksums detect a write into those.
            if self.table.at(index).phase in (SlotPhase.WRITING, SlotPhase.RESTORING):
                self.memories[index] = await in_pool(
                    self._pools.memory, self._staging.renew, self.memories[index]
                )
                renewed.append(index)
            self.table.release(index)
        await self._pages.renewed(renewed)

    def take_over(self, registration: RegisteredRank, owner: Owner) -> None:
        """Make a worker's connection the owner, in place of an older one."""
        self.registration = registration
        self.owner = owner

    def supersede(self, attempt: int) -> None:
        """A later attempt has begun: stop what earlier ones still persist or report."""
        self.table.supersede(attempt)
        if self.registration.attempt < attempt:
            # Work that runs keeps the old object and stops; work of the new attempt gets a new one.
            self._cancelled.cancel()
            self._cancelled = Cancellation()
            for task in self._reports.values():
                task.cancel()

    def idle(self) -> bool:
        """Whether no worker is connected, no step is being persisted, and no thread uses a slot.

        A report needs no slot: where another rank's part could not be written, it can only wait.
        """
        in_progress = (
            self._seals
            or self._following
            or self.restores.in_progress
            or any(slot.in_use for slot in self.table.slots)
        )
        return self.owner is None and not in_progress

    def acquire(self, step: int) -> int | None:
        """A slot for the state after ``step``; None when all are needed."""
        index = self.table.acquire(step)
        if index is not None:
            layout, memory = self.registration.layout, self.memories[index]
            landing = self._landings[index] = Landing(layout, memory, self._pools.memory)
            self._following.add(landing.following)
            landing.following.add_done_callback(self._following.discard)
        return index

    def seal(
        self,
        index: int,
        step: int,
        small_state: dict[str, Any],
        *,
        finite: bool,
        persist: bool = True,
        replicate: bool = False,
        problem: str = "",
    ) -> None:
        """The slot holds the whole state: seal it, and queue it for storage if ``persist``.

        With ``replicate`` it is also copied to the peer, if the rank has one. Returns at once;
        threads first compute the checksums of what has landed last. A state with values that are
        not finite, or whose copy has a ``problem``, is not kept: no restart may resume from it.

        Raises:
            RequestError: the slot is not being written for ``step``.
        """
        # Taken now: before the task runs, a successor may have registered under another attempt.
        registration = self.registration
        self.table.begin_seal(
            index,
            step,
            persist=persist and bool(registration.uri),
            replicate=replicate and bool(registration.replica_target),
        )
        if problem or not finite:
            why = problem or "the state holds values that are not finite"
            self._abandon(index, (registration.attempt, step), why)
            return
        # A task of its own: the state is whole, so it is sealed even if the worker disconnects.
        landing = self._landings.pop(index)
        task = tasks.single(
            self._seal(registration, index, step, small_state, landing), f"seal {step}"
        )
        self._seals.add(task)
        task.add_done_callback(self._seals.discard)

    async def sealed(self) -> None:
        """Wait until no checksums are being computed any more."""
        while self._seals:
            await asyncio.wait(set(self._seals))

    def adopt(self, index: int) -> None:
        """The present attempt goes on from this state: have it persisted as this attempt's own."""
        if self.registration.uri:
            self.table.adopt(index, self.registration.attempt)
            self._wake.set()

    def replicate(self, index: int) -> None:
        """The present attempt goes on from this state: its peer, maybe a new one, gets a copy."""
        if self.registration.replica_target:
            self.table.replicate(index)
            self._listener.changed.notify()

    def release(self, index: int) -> None:
        """See :meth:`SlotTable.release`."""
        self._end_landing(index)
        self.table.release(index)
        self._listener.changed.notify()

    async def drain(self, step: int) -> str:
        """Wait until nothing more happens to ``step``; tries a write again that the storage failed.

        Returns:
            Why it failed; without meaning for a committed step, which the caller checks.
        """
        # Only a step that a worker waits for is tried again: the slot of an earlier one is needed
        # for the next snapshot, which is newer.
        key, pause_s = (self.registration.attempt, step), FIRST_RETRY_S
        while True:
            while key in self._reports or self._is_pending(key):
                await self._listener.changed.wait()
            if key not in self._storage_failed:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            slot = self.table.find(*key, self.registration.digest)
            if slot is None or key[0] != self.registration.attempt:
                break
            slot.pending = True
            self._wake.set()
        if not self.registration.uri:
            return "the job has no checkpoint uri: its snapshots stay in memory"
        return self.failure(step) or f"step {step} was not sealed by this worker's attempt"

    def failure(self, step: int) -> str:
        """Why ``step`` of the present attempt failed so far; "" if it has not."""
        return self._failures.get((self.registration.attempt, step), "")

    def is_reported(self, step: int) -> bool:
        """Whether the present attempt's part of ``step`` is stored, and its commit awaited."""
        return (self.registration.attempt, step) in self._reports

    def hand_over_reports(self) -> list[asyncio.Task[None]]:
        """The reports in progress, which :meth:`stop` no longer ends."""
        reports = list(self._reports.values())
        self._reports.clear()
        return reports

    async def stop(self, drain_s: float) -> bool:
        """Stop persisting, after at most ``drain_s`` for work in progress.

        Returns whether no thread uses a slot any more, so that its memory can be freed; one that a
        storage holds does not end. It takes STOP_S more at most.
        """
        busy = [task for task in self._reports.values() if not task.done()]
        if drain_s and (busy or self.table.next_pending()):
            try:
                async with asyncio.timeout(drain_s):
                    while self._reports or self.table.next_pending():
                        await self._listener.changed.wait()
            except TimeoutError:
                pass
        self._cancelled.cancel()
        tasks = [self._worker, *self._reports.values()]
        for task in tasks:
            task.cancel()
        for index in list(self._landings):
            self._end_landing(index)
        ending = [*tasks, *self._seals, *self._following]
        ending += [*self._pages.cancel(), *self.restores.cancel()]
        _, stuck = await asyncio.wait(ending, timeout=STOP_S)
        return not stuck and not self._left_alone

    async def _seal(
        self,
        registration: RegisteredRank,
        index: int,
        step: int,
        small_state: dict[str, Any],
        landing: Landing,
    ) -> None:
        key = (registration.attempt, step)
        try:
            checksums = await landing.checksums()
        except Exception as error:
            log.exception("defect while sealing", job=registration.job, step=step)
            self._abandon(index, key, f"defect in the checkpoint daemon, see its log: {error!r}")
            return
        # Sealed in any case, because a restart can restore it from memory; persisted only while its
        # attempt is the current one and may still commit (see supersede).
        seal = SlotSeal(registration.attempt, step, registration.digest, checksums, small_state)
        self.table.finish_seal(index, seal)
        self._wake.set()
        self._listener.changed.notify()

    def _end_landing(self, index: int) -> None:
        landing = self._landings.pop(index, None)
        if landing is not None:
            landing.end()

    def _abandon(self, index: int, key: tuple[int, int], why: str) -> None:
        self._end_landing(index)
        self.table.release(index)
        self._fail(key, why)

    def _is_pending(self, key: tuple[int, int]) -> bool:
        if self.table.sealing(key[1]):
            return True
        slot = self.table.find(*key, self.registration.digest)
        return slot is not None and slot.pending

    def _remember(self, key: tuple[int, int], why: str) -> None:
        self._failures[key] = why
        while len(self._failures) > KEPT_FAILURES:
            self._forget(next(iter(self._failures)))

    def _forget(self, key: tuple[int, int]) -> None:
        self._failures.pop(key, None)
        self._storage_failed.discard(key)

    def _fail(self, key: tuple[int, int], why: str) -> None:
        self._remember(key, why)
        self._listener.note_failure(self.registration.rank, *key, why)

    async def _persist_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (slot := self.table.next_pending()) is not None and slot.seal is not None:
                await self._persist(slot, slot.seal)

    async def _persist(self, slot: Slot, seal: SlotSeal) -> None:
        if slot.adopter:
            seal = replace(seal, attempt=slot.adopter)
        key = (seal.attempt, seal.step)
        if key in self._reports or key in self._committed:
            slot.pending = False  # an adopted state that was taken again
            self._listener.changed.notify()
            return
        sealed = slot.seal
        registration, cancelled = self.registration, self._cancelled.part()
        slot.busy += 1  # before the thread starts: from now on nobody may acquire the slot
        began_s = time.monotonic()
        image = self.memories[slot.index].view
        pool, progress = self._pools.storage, self._progress_of(registration)
        self.persisting = progress
        running = asyncio.ensure_future(
            in_pool(pool, persist.persist, registration, seal, image, cancelled, progress)
        )
        watching = asyncio.create_task(self._watch_storage(key, progress))
        try:
            # The thread reads the slot until it sees the cancellation: the slot must not be written
            # or freed before.
            report = await self._finish(running, cancelled, progress)
        except SupersededError:
            log.info(
                "persist superseded", job=registration.job, attempt=seal.attempt, step=seal.step
            )
        except OSError as error:
            self._storage_failed.add(key)
            self._fail(key, str(error))
        except ServiceError as error:
            self._fail(key, str(error))
        except Exception as error:
            # A defect costs this step only; later steps must still be persisted.
            log.exception("defect while persisting", job=registration.job, step=seal.step)
            self._fail(key, f"defect in the checkpoint daemon, see its log: {error!r}")
        else:
            self._forget(key)
            self.durable_step = seal.step
            size_bytes = sum(file.size_bytes for file in report.files)
            self.persist_s = time.monotonic() - began_s
            self._listener.note_persisted(self.persist_s, size_bytes)
            # Not awaited: the commit waits for all ranks, and the next step can be persisted
            # meanwhile. The slot is free already, because the file is durable.
            task = tasks.single(
                self._report(key, report, registration.committer_endpoint), f"report {key[1]}"
            )
            self._reports[key] = task
        finally:
            watching.cancel()
            self.persisting = None
            # The slot may have been discarded as damaged, and reused, in the meantime.
            if slot.seal is sealed:
                slot.busy -= 1
                slot.pending = False
            self._listener.changed.notify()

    async def _finish(
        self,
        running: asyncio.Future[persist.Report],
        cancelled: Cancellation,
        progress: persist.Progress,
    ) -> persist.Report:
        """The result of a thread; if the caller is cancelled, wait until the thread has ended.

        Raises:
            OSError: the storage holds it for too long. It is asked to stop, and what it may still
                read or write counts for nothing: its file is reported by nobody.
        """
        try:
            while not running.done():
                left_s = max(self.given_up_s - progress.still_s, self.given_up_s / 10)
                await asyncio.wait([running], timeout=left_s)
                given_up = not running.done() and progress.still_s >= self.given_up_s
                if given_up and len(self._left_alone) < MOST_LEFT_ALONE:
                    cancelled.cancel()
                    self._left_alone.add(running)
                    running.add_done_callback(self._ended_at_last)
                    text = (
                        f"the storage {self.registration.uri} has taken nothing for "
                        f"{progress.still_s:.0f} s: the step is given up, and its slot is free"
                    )
                    raise OSError(errno.ETIMEDOUT, text)
            return running.result()
        except asyncio.CancelledError:
            cancelled.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # marks it as retrieved, or asyncio would log a warning
            raise

    def _ended_at_last(self, running: asyncio.Future[persist.Report]) -> None:
        self._left_alone.discard(running)
        if not running.cancelled():
            running.exception()  # marks it as retrieved
        self._listener.changed.notify()

    @staticmethod
    def _progress_of(registration: RegisteredRank) -> persist.Progress:
        pieces = registration.layout.pieces
        return persist.Progress(sum(piece.size_bytes for piece in pieces if piece.primary))

    async def _watch_storage(self, key: tuple[int, int], progress: persist.Progress) -> None:
        """Report a storage that takes nothing, again whenever twice the time has passed."""
        limit_s = self.store_silent_s
        while True:
            await asyncio.sleep(max(limit_s - progress.still_s, limit_s / 10))
            if progress.still_s >= limit_s:
                still_s, uri = progress.still_s, self.registration.uri
                self._fail(key, f"the storage {uri} has not answered for {still_s:.0f} s")
                limit_s *= 2

    async def _report(self, key: tuple[int, int], report: persist.Report, endpoint: str) -> None:
        try:
            manifest_uri = await self._committer.report_prepared(
                report, endpoint, lambda problem: self._fail(key, problem)
            )
            self._committed.append(key)
            self._listener.note_commit(key[1], key[0], manifest_uri)
        except SupersededError as error:
            self._remember(key, str(error))
        except ServiceError as error:
            self._fail(key, str(error))
        finally:
            self._reports.pop(key, None)
            self._listener.changed.notify()
