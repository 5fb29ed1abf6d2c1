"""One crash case: a job's lives on one machine, with faults; then a last restore without any.

The daemon's own code runs: committer, commit log, persist, manifest, restore decision, restore and
repair, on the model of a disk in :mod:`tests.crash.machine`. The case plays the driver and the
workers: it opens an attempt, restores, saves some steps, until a fault ends the process; then the
next life begins. A process that was cut off may go on beside its successor.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.crash.machine import (
    FAILED_SYNC,
    KILL,
    LOST_REPLY,
    NO_SPACE,
    POWER,
    STALL,
    Crash,
    Fault,
    Machine,
    Process,
)
from tests.crash.oracle import Oracle, Saved
from tests.harness.checkpoint_files import registration_of

from megascale.v1 import checkpoint_pb2
from megascale_checkpoint import storage
from megascale_checkpoint.checksums import dump_record, load_record, piece_checksums
from megascale_checkpoint.commit import commit_repair, manifest
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.restore_decision import RestoreDecision, SealedStep
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.memory.slots import SlotSeal
from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.save.persist import Progress, persist
from megascale_checkpoint.serve.committer import Committer
from megascale_checkpoint.serve.opening import Opening
from megascale_common.service.errors import (
    DamagedError,
    ServiceError,
    SupersededError,
    UnavailableError,
)
from megascale_job.config import CheckpointConfig
from megascale_job.restore import RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

URI = "crash:///job"
COLUMNS = 32
# Faults of the disk that change what was durable; they hit between two lives.
FLIP, SWAP_RECORD, SWAP_MANIFEST, REMOVE_RECORD, SWAP_FILE = (
    *("flip", "swap record", "swap manifest", "remove record", "swap file"),
)
CALL_FAULTS = (POWER, POWER, KILL, KILL, FAILED_SYNC, NO_SPACE, LOST_REPLY, STALL)
DISK_FAULTS = ("", "", "", FLIP, FLIP, SWAP_RECORD, SWAP_MANIFEST, REMOVE_RECORD, SWAP_FILE)
LOSE_REQUEST, LOSE_REPLY, TWICE = "lose request", "lose reply", "twice"


KINDS = sorted({*CALL_FAULTS, *DISK_FAULTS} - {""})


class Case:
    """One case; everything in it follows from ``seed``.

    Args:
        only: no other faults than these and losses of power; empty for all kinds.
    """

    def __init__(self, seed: int, only: tuple[str, ...] = ()) -> None:
        self.call_faults = [k for k in CALL_FAULTS if not only or k in (*only, POWER)]
        self.disk_faults = [k for k in DISK_FAULTS if not only or k in only] or [""]
        self.rng = random.Random(seed)
        self.world = self.rng.randint(1, 3)
        self.checkpoint = CheckpointConfig(uri=URI, keep_latest=self.rng.choice((0, 1, 1, 2)))
        points = sorted(self.rng.randrange(1, 700) for _ in range(self.rng.randint(1, 4)))
        faults = [
            Fault(point, self.rng.choice(self.call_faults), self.rng.random() < 0.5)
            for point in points
        ]
        self.machine = Machine(self.rng, faults)
        self.oracle = Oracle()
        self.layouts = [_layout(rank, self.world) for rank in range(self.world)]
        self.attempt = self.step = 0
        self.process = Process(self.machine)
        self.zombie: tuple[Process, Committer, int] | None = None

    def open(self, uri: str) -> storage.Storage:
        """What the scheme ``crash`` opens: the disk as the present process has it."""
        path = Path(urlsplit(uri).path)
        return storage.FileStorage(path, self.process, uri)

    async def run(self) -> None:
        """All lives, the last of them without faults."""
        asyncio.get_running_loop().set_exception_handler(_unless_crash)
        lives = self.rng.randint(2, 4)
        hit = self.rng.randrange(lives)  # the life after which the disk damages something
        for life in range(lives):
            await self._life(last=False)
            if self.oracle.failed or self.machine.violation:
                break
            self._between_lives(hit=life == hit)
        self.machine.faults.clear()
        self.machine.note("no faults from here on")
        if not self.oracle.failed:
            await self._life(last=True)
        if not self.oracle.failed:
            self.process = Process(self.machine)
            log = CommitLog(self.open(URI))
            log.refresh(whole=True)
            self.oracle.check_log(log)
        self.machine.power_off()
        if self.machine.violation:
            self.oracle.silent = self.oracle.silent or self.machine.violation

    async def _life(self, *, last: bool) -> None:
        self.process = Process(self.machine)
        committer = Committer(lambda _: None)
        self.machine.note(f"process {self.process.number} starts")
        cut_off = False
        try:
            await self._train(committer, last)
            # A driver may take a node for lost that goes on.
            cut_off = not last and self.rng.random() < 0.3
        except Crash as crash:
            self.machine.note(f"process {self.process.number} ends: {crash}")
        finally:
            self.machine.release()
            self._note_retired()
            if cut_off:
                self.zombie = self.process, committer, self.attempt
            else:
                self.process.alive = False
                committer.close()

    async def _train(self, committer: Committer, last: bool) -> None:
        if not await self._open_and_restore(committer):
            return
        if self.zombie is not None:
            await self._wake_zombie()
        for _ in range(1 if last else self.rng.randint(1, 4)):
            with suppress(SupersededError):
                await self._save(committer)
            await self._collect(committer)

    async def _open_and_restore(self, committer: Committer) -> bool:
        """Open attempts until one restores; False when a fault of the storage prevents it."""
        refused: set[int] = set()
        error: Exception = RuntimeError("never tried")
        for _ in range(8):
            self.attempt += 1
            decision = None
            for _ in range(3):
                try:
                    decision = await self._open_attempt(committer, frozenset(refused))
                    break
                except (UnavailableError, OSError) as failed:
                    error = failed
                    self.machine.note(f"attempt {self.attempt} not opened: {failed}")
                except DamagedError as failed:
                    if not self._repair(failed):
                        return False
                except ServiceError as failed:
                    self.machine.note(f"attempt {self.attempt} refused: {failed}")
                    self.oracle.refused(failed)
                    return False
            if decision is None:
                continue
            self.oracle.opened.append(self.attempt)
            try:
                self._restore(decision)
                return True
            except DamagedError as failed:
                self.machine.note(f"step {decision.plan.step} refused: {failed}")
                refused.add(decision.plan.step)
                error = failed
            except OSError as failed:
                error = failed
        self.oracle.refused(error)
        return False

    async def _open_attempt(self, committer: Committer, refused: frozenset[int]) -> RestoreDecision:
        self._note_retired()
        self.process.message(f"OpenAttempt {self.attempt}")
        _, decision = await self._call(
            lambda: committer.open_attempt(
                Opening("job", self.checkpoint, self.world),
                self.attempt,
                SealedStep(0, 0),
                refused,
                (1, self.attempt),
            )
        )
        self.process.message(f"OpenAttempt {self.attempt} answered")
        return decision

    def _repair(self, error: DamagedError) -> bool:
        """What an operator does about a damaged log."""
        self.machine.note(f"log damaged: {error}")
        if not self.oracle.log_damaged:
            self.oracle.lost = self.oracle.lost or f"damaged without a fault: {error}"
            return False
        self.oracle.reported = True
        with suppress(OSError):
            plan = commit_repair.plan(self.open(URI))
            commit_repair.carry_out(self.open(URI), plan)
            self.machine.note(f"repaired: {[(r.seq, r.restored) for r in plan]}")
        return True

    def _restore(self, decision: RestoreDecision) -> None:
        plan = decision.plan
        if plan.source is RestoreSource.NONE:
            self.machine.note("starts from initial values")
            self.oracle.restored(None, [], [])
            return
        images, states = [], []
        for rank, layout in enumerate(self.layouts):
            image = bytearray(layout.slot_bytes)
            filled = restore.fill(plan, rank, layout, memoryview(image))
            images.append(bytes(image))
            states.append(filled.small_state)
        self.machine.note(f"restored step {plan.step} of attempt {plan.written_by_attempt}")
        self.oracle.restored((plan.written_by_attempt, plan.step), images, states)

    async def _save(self, committer: Committer) -> None:
        """Save a step as all ranks do; a failure costs the step."""
        self.step += 1
        saved = Saved(
            [self._image(layout) for layout in self.layouts],
            [{"position": self.step, "rank": rank} for rank in range(self.world)],
        )
        self.oracle.saved[self.attempt, self.step] = saved
        reports = []
        try:
            for rank in range(self.world):
                reports.append(self._persist(rank, saved))
        except (OSError, ServiceError) as error:
            self.machine.note(f"step {self.step} not persisted: {error}")
            return
        await self._report(committer, reports, saved)

    def _persist(self, rank: int, saved: Saved) -> checkpoint_pb2.ReportPreparedRequest:
        layout = self.layouts[rank]
        registration = registration_of(URI, rank, self.world, layout, self.attempt)
        image = memoryview(bytearray(saved.images[rank]))
        seal = SlotSeal(
            self.attempt,
            self.step,
            registration.digest,
            piece_checksums(layout, image),
            saved.small_states[rank],
        )
        self.process.message(f"persist step {self.step} of rank {rank}")
        return persist(registration, seal, image, Cancellation(), Progress())

    async def _report(
        self,
        committer: Committer,
        reports: list[checkpoint_pb2.ReportPreparedRequest],
        saved: Saved,
    ) -> None:
        """Report until the step is committed, as the ranks do, up to five times."""
        step = reports[0].step
        for _ in range(5):
            for report in reports:
                fate = self.rng.choice(("", "", "", "", LOSE_REQUEST, LOSE_REPLY, TWICE))
                self.process.message(f"report step {step} of rank {report.rank} {fate}")
                if fate == LOSE_REQUEST:
                    continue
                try:
                    for _ in range(2 if fate == TWICE else 1):
                        found = await self._call(lambda report=report: committer.report(report))
                        # Beside its calls, ours would come in an order that the clock decides.
                        await self._collect(committer)
                except (UnavailableError, OSError) as error:
                    self.machine.note(f"step {step} not committed: {error}")
                    continue
                except DamagedError as error:
                    self.machine.note(f"step {step} refused: {error}")
                    self.oracle.reported |= self.oracle.log_damaged
                    return
                except ServiceError as error:
                    self.machine.note(f"step {step} refused: {error}")
                    return
                self.process.message(f"step {step} of rank {report.rank} answered")
                if found and fate != LOSE_REPLY:
                    self.machine.note(f"step {step} of attempt {reports[0].attempt} committed")
                    saved.reported = True
                    return

    async def _call(self, call: Callable[[], Awaitable[object]]) -> object:
        """A call to the committer; one that stalls is given up, and the stall ends soon after."""
        task = asyncio.ensure_future(call())
        if not await _first(task, self.machine):
            self.machine.note("a call is given up while the storage stalls")
            task.cancel()
            await asyncio.wait([task])
            # Another call comes in meanwhile, as from another rank.
            other = asyncio.ensure_future(call())
            await asyncio.wait([other], timeout=0.01)
            self.machine.release()
            await self._through_stalls([other])
            return other.result()
        return task.result()

    async def _collect(self, committer: Committer) -> None:
        """Wait until what follows a commit, the collection of retired checkpoints, has ended."""
        running = list(committer._collector._tasks.values())
        await self._through_stalls(running)
        for task in running:
            task.result()
        self._note_retired()

    async def _through_stalls(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Wait until the tasks have ended, and end every stall on the way."""
        while any(not task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.002)
            if self.machine.stalled.is_set():
                self.machine.note("the storage stalls, and goes on")
                self.machine.release()

    def _note_retired(self) -> None:
        """Inform the oracle of what the log says is no more."""
        committed: list[tuple[int, int]] = []
        for path in self.machine.files("/job/commits"):
            try:
                values = load_record(bytes(self.machine.file(Path(path)).data), path)
            except DamagedError:
                continue
            if values.get("kind") == "COMMIT":
                committed.append((values["attempt"], values["step"]))
            if values.get("kind") == "RETIRE":
                key = values["of_attempt"], values["step"]
                later = committed[committed.index(key) + 1 :] if key in committed else committed
                if self.oracle.retires(key, [o for o in later if o in self.oracle.saved]):
                    self.machine.note(f"step {key[1]} of attempt {key[0]} is retired")

    async def _wake_zombie(self) -> None:
        """The process that was cut off saves a step: it must be refused."""
        assert self.zombie is not None
        process, committer, attempt = self.zombie
        self.zombie = None
        if not process.alive:
            return
        present = self.process, self.attempt
        self.process, self.attempt = process, attempt
        self.machine.note(f"process {process.number} goes on with attempt {attempt}")
        try:
            with suppress(SupersededError):
                await self._save(committer)
        except Crash as crash:
            self.machine.note(f"process {process.number} ends: {crash}")
        finally:
            self.process, self.attempt = present
            process.alive = False
            committer.close()
        if self.oracle.saved[attempt, self.step].reported:
            self.oracle.silent = self.oracle.silent or f"fenced attempt {attempt} has committed"
        # Not restored by anybody: it was never committed.
        del self.oracle.saved[attempt, self.step]

    def _image(self, layout: ShardLayout) -> bytes:
        image = bytearray(layout.slot_bytes)
        for piece in layout.pieces:
            start = piece.slot_offset_bytes
            image[start : start + piece.size_bytes] = self.rng.randbytes(piece.size_bytes)
        return bytes(image)

    def _between_lives(self, *, hit: bool) -> None:
        """The power may fail, and the disk may damage what was durable."""
        if self.zombie is None and self.rng.random() < 0.5:
            self.machine.note("power fails between two processes")
            self.machine.power_off()
            self.process = Process(self.machine)
        if hit:
            damage_disk(self, self.rng.choice(self.disk_faults))


def _unless_crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say nothing of a task that has ended with its process."""
    if not isinstance(context.get("exception"), Crash):
        loop.default_exception_handler(context)


async def _first(task: asyncio.Future[object], machine: Machine) -> bool:
    """Wait until the call has ended (True) or stalls (False)."""
    while not task.done():
        if machine.stalled.is_set():
            return False
        await asyncio.wait([task], timeout=0.002)
    return True


def damage_disk(case: Case, kind: str) -> None:
    """Damage one durable file; the oracle is informed of what cannot be restored any more."""
    machine, rng = case.machine, case.rng
    records = machine.files("/job/commits")
    files = machine.files("/job/attempts")
    found = [path for path in files if path.endswith(manifest.NAME)]
    ranks = [path for path in files if path.endswith(".safetensors")]
    # Records behind which there is another: what stands there in their place can be seen from it.
    followed = [path for path in records[:-1] if b'"COMMIT"' in machine.file(Path(path)).data]
    path = ""
    if kind == FLIP and records:
        kinds = records[-1:], records, found[-1:], ranks[-case.world :]
        path = rng.choice(rng.choice(kinds) or records)
        machine.replace(path, _flipped(rng, bytes(machine.file(Path(path)).data)))
    elif kind == SWAP_RECORD and followed:
        path = followed[-1]
        _lose(case, path)
        machine.replace(path, _changed(machine, path, {"kind": "PIN", "name": "another"}))
    elif kind == SWAP_MANIFEST and found:
        path = found[-1]
        small = {"small_state": {"position": -1}, "rank_small_states": {}}
        machine.replace(path, _changed(machine, path, small))
    elif kind == REMOVE_RECORD and followed:
        path = rng.choice(followed)
        _lose(case, path)
        machine.remove(path)
    elif kind == SWAP_FILE and ranks:
        path = ranks[-1]
        data = bytes(machine.file(Path(path)).data)
        machine.replace(path, data[:-64] + rng.randbytes(len(data[-64:])))
    if not path:
        return
    machine.note(f"the disk: {kind}: {path}")
    machine.hits.add((kind, "", path.split("/")[2]))
    case.oracle.log_damaged |= "/commits/" in path
    for (attempt, step), saved in case.oracle.saved.items():
        saved.damaged |= f"/{manifest.step_folder(attempt, step)}/" in path


def _lose(case: Case, path: str) -> None:
    """A COMMIT record is lost for good, and with it the checkpoint."""
    values = json.loads(bytes(case.machine.file(Path(path)).data))
    saved = case.oracle.saved.get((values["attempt"], values["step"]))
    if saved is not None:
        saved.damaged = True


def _flipped(rng: random.Random, data: bytes) -> bytes:
    """``data`` with one bit flipped; often in the number of a step, which stays a number."""
    step = data.find(b'"step": ') + len(b'"step": ')
    bit = rng.randrange(8 * len(data))
    if step >= len(b'"step": ') and rng.random() < 0.5:
        bit = 8 * step + rng.choice((0, 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _changed(machine: Machine, path: str, values: dict[str, object]) -> bytes:
    """A JSON file with other values and the right checksum, as another writer would have it."""
    data = bytes(machine.file(Path(path)).data)
    try:
        return dump_record({**load_record(data, path), **values})
    except DamagedError:  # a sabotage has left it so
        return data[:-1]


def _layout(rank: int, world: int) -> ShardLayout:
    box = ("float32", (world, COLUMNS), (rank, 0), (rank + 1, COLUMNS), 0, COLUMNS)
    pieces = (
        ShardPiece("matrix", "master", *box, 0, primary=True),
        ShardPiece("matrix", "exp_avg", *box, 256, primary=True),
    )
    return ShardLayout(pieces, 4096)
