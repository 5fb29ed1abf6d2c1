"""Stage 1 of a checkpoint, the trainer's side: copy the state to the daemon's memory and seal it.

The daemon owns the memory (slots), so a sealed snapshot survives this process. All ranks take a
snapshot together or skip it together: each reserves a slot one step ahead, and its vote rides in
the gradient-norm all-reduce. Busy slots skip and count. Nothing waits: a request to a daemon that
hangs holds up a step for daemon_link.LONGEST_HOLD_S once, then snapshots pause until it answers. A
daemon that ends costs snapshots, never the run.

The copy runs on a side stream into pinned slots (CUDA) or in a thread (CPU) during the next forward
and backward; the next optimizer update waits for it (:attr:`Snapshotter.copied`).
:mod:`megascale_trainer.save.snapshot_schedule` decides; this module carries it out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from megascale_common.node.messages import (
    Acquire,
    Acquired,
    Busy,
    DaemonAnswer,
    DaemonRequest,
    Drain,
    Drained,
    Pace,
    Release,
    Seal,
    StepTime,
)
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.visible import agreed, counted
from megascale_kernels.torch_calls import cuda_event, cuda_stream
from megascale_trainer.save.daemon_link import (
    LONGEST_HOLD_S,
    Answered,
    DaemonLink,
    checked,
)
from megascale_trainer.save.host_copy import CopyCheck, CopyEnd, HostCopies, Landed, LandingNotes
from megascale_trainer.save.snapshot_schedule import ReplicaRounds, SnapshotSchedule, ToSeal, Votes

ACQUIRE_RETRY_S = 0.2
# Small slots are prepared by then; large ones only behind the first step, which would be slower.
PREPARE_WAIT_S, SMALL_SLOTS_BYTES = 2.0, 1 << 30


class TrainingState(Protocol):
    """What the snapshotter needs of a trainer."""

    def shard_layout(self) -> ShardLayout:
        """How this rank's state lies in a slot."""

    def state_image(self) -> torch.Tensor:
        """The states' bytes on the device, uint8, as they lie in a slot."""

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = ...) -> None:
        """Copy the state into ``slot`` (uint8, host) from its start on, on the current stream.

        ``landed`` is called behind each part with the number of bytes until there.
        """


@dataclass(slots=True)
class _Copy:
    """A copy that was started; its small state is complete once its step's result was read."""

    small_state: dict[str, Any]
    ended: CopyEnd
    checks: list[CopyCheck]


@dataclass(frozen=True, slots=True)
class Drainage:
    """Answer to a drain: "" or why the step is not committed; ``waiting``: it still may be."""

    problem: str
    waiting: bool


@dataclass(frozen=True, slots=True)
class StoreState:
    """What the daemon answered to the newest step: whether it persists, how long that last took."""

    persisting: bool = False
    persist_s: float = 0.0


class Snapshotter:
    """The snapshots of one rank; ``link`` is its connection to its node's checkpoint daemon.

    It has registered there. ``replicas``: the ranks vote on which of them are copied to peers.
    """

    def __init__(
        self,
        link: DaemonLink,
        state: TrainingState,
        device: torch.device,
        *,
        verified_share: float = 0.0,
        replicas: bool = False,
    ) -> None:
        self.replicas = ReplicaRounds(enabled=replicas)
        self._state = state
        self._device = device
        self._verified_share = verified_share
        self._stream = cuda_stream(device) if device.type == "cuda" else None
        self._host_copies = HostCopies()
        self._landing_notes = LandingNotes(device)
        self._schedule = SnapshotSchedule()
        self._copies: dict[int, _Copy] = {}
        self._said_hung = False
        self.store = StoreState()
        self._time_unanswered = False
        self.skipped = 0
        self.link = link
        if self.link.slots_bytes <= SMALL_SLOTS_BYTES:
            self.link.wait_prepared(PREPARE_WAIT_S)

    def ask_ahead(self, step: int) -> None:
        """Ask for the slot of a later ``step``; the answer is read before its vote."""
        if self._usable():
            self._ask(step)

    def reserve(self, step: int) -> int:
        """Reserve a slot for the snapshot after ``step``; returns this rank's vote.

        0: ready; see :mod:`megascale_trainer.save.snapshot_schedule` for the others.
        """
        self.seal_if_copied()
        if self._usable():
            self._ask(step)
            if self._schedule.awaited(step):
                self._read_answers(LONGEST_HOLD_S)
        return self._schedule.vote(step) + self.replicas.vote(step)

    def reserve_or_wait(self, step: int, timeout_s: float) -> int:
        """As :meth:`reserve`, but wait for a busy slot: the last step delays no other."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.seal_if_copied(wait=True)
            vote = self.reserve(step)
            if Votes.of(vote).must_skip == 0 or time.monotonic() > deadline:
                return vote
            time.sleep(ACQUIRE_RETRY_S)

    def take(
        self,
        step: int,
        small_state: dict[str, Any],
        *,
        votes: int,
        persist: bool = True,
        replicate: bool = False,
    ) -> bool:
        """After ``step``: start the copy into the reserved slot, or skip if ``votes`` is above 0.

        ``votes`` ranks must skip. It is sealed after :meth:`settle`, and persisted, or copied to
        the peers, where all ranks agree to ``persist`` or ``replicate`` it. Returns whether a
        snapshot was started.
        """
        if votes:
            self._skip(
                f"step {step}: no snapshot, {counted(votes, 'rank')} "
                f"{agreed(votes, 'have')} no slot"
            )
            slot = self._schedule.skip(step)
            if slot is not None:
                self._give_back(slot)
            return False
        slot = self._schedule.launch(step, persist=persist, replicate=replicate)
        # The daemon ended after the vote: the other ranks take their part, and the step cannot be
        # committed without this one's. Training goes on.
        if slot is None:
            self._skip(f"step {step}: no snapshot here, the slot is lost")
            if replicate:
                self.replicas.lost()
            return False
        checks: list[CopyCheck] = []
        ended = self._copy(slot, step, checks)
        self._copies[step] = _Copy(small_state, ended, checks)
        return True

    def settle(self, step: int, small_state: Mapping[str, Any], *, finite: bool) -> None:
        """The result of ``step`` was read: complete its snapshot's small state and finite flag."""
        self.link.prepare_all()
        if step in self._copies:
            self._copies[step].small_state |= small_state
            self._schedule.settle(step, finite=finite)

    @property
    def copied(self) -> CopyEnd | None:
        """The copy that the next optimizer update must wait for; None when none is in progress."""
        # Copies run one after the other, so the newest one ends last.
        return self._copies[max(self._copies)].ended if self._copies else None

    def seal_if_copied(self, *, wait: bool = False) -> None:
        """Have finished and settled copies sealed; with ``wait``, wait for the copies first.

        A copy is sealed only when it has ended on the device *and* its step's result was read: the
        seal carries ``finite``. The daemon computes the checksums behind its answer.
        """
        for step in self._schedule.copying():
            ended = self._copies[step].ended
            if wait and self._schedule.settled(step):
                ended.synchronize()
            if not ended.query():
                break
            self._schedule.copied(step)
        while (sealed := self._schedule.next_seal()) is not None:
            # The slot belongs to the daemon now: the next update may overwrite the states.
            self._seal(sealed, self._copies.pop(sealed.step))
        self._read_answers()

    def report_time(self, step: int, time_s: float) -> None:
        """Send the time of a step to the daemon; the answer, read later, becomes ``store``."""

        def answered(answer: DaemonAnswer) -> None:
            pace = checked(answer, Pace)
            self._time_unanswered = False
            self.store = StoreState(pace.persisting, pace.persist_s)
            self.replicas.answered(question, ended=pace.replica_ended)

        # One at a time: a daemon that is slow to answer gets no queue of them.
        if self._time_unanswered or not self._usable():
            return
        question = self.replicas.question
        self._time_unanswered = self._post(StepTime(step=step, time_s=time_s), answered)

    @property
    def connected(self) -> bool:
        """Whether the daemon was there at the last request."""
        return self.link.connected

    def drain(self, step: int, timeout_s: float) -> Drainage:
        """Wait until ``step`` is committed, but at most ``timeout_s``."""
        message = Drain(step=step, timeout_s=timeout_s)
        try:
            answer = self.link.ask(message, timeout_s + self.link.answer_timeout_s)
            drained = checked(answer, Drained)
        except OSError as error:
            self._lost(error)
            return Drainage("the checkpoint daemon is gone", waiting=False)
        return Drainage(drained.error, waiting=drained.waiting)

    def close(self) -> None:
        """Close the connection; sealed snapshots stay with the daemon."""
        self._join_copies()
        self.link.close()

    def _usable(self) -> bool:
        """Whether requests may be sent; a lost connection is opened again beside training."""
        try:
            if not self.link.connected:
                self.link.begin_connect(self.link.answer_timeout_s)
                if not self.link.finish_connect():
                    return False
        except OSError as error:
            self._lost(error)
            return False
        self._read_answers()
        return self.link.prepared and not self.link.hung

    def _ask(self, step: int) -> None:
        def answered(answer: DaemonAnswer) -> None:
            if isinstance(answer, Busy):
                self._schedule.refused(step)
                return
            acquired = checked(answer, Acquired)
            unneeded = self._schedule.granted(step, acquired.slot, store_ready=acquired.store_ready)
            if unneeded is not None:
                self._give_back(unneeded)

        if self._schedule.ask(step):
            self._post(Acquire(step=step), answered)

    def _seal(self, sealed: ToSeal, copy: _Copy) -> None:
        message = Seal(
            slot=sealed.slot,
            step=sealed.step,
            small_state=copy.small_state,
            finite=sealed.finite,
            persist=sealed.persist,
            replicate=sealed.replicate,
            problem="".join(check.problem() for check in copy.checks),
        )
        if self._post(message) and sealed.replicate:
            self.replicas.sealed()

    def _give_back(self, slot: int) -> None:
        self._post(Release(slot=slot))

    def _post(self, message: DaemonRequest, answered: Answered | None = None) -> bool:
        """Send a request; returns whether the daemon is still there."""
        try:
            self.link.post(message, answered)
        except OSError as error:
            self._lost(error)
            return False
        return True

    def _read_answers(self, wait_s: float = 0.0) -> None:
        """Read what has arrived, or arrives within ``wait_s``."""
        if not self.link.connected:
            return
        # While it hangs nothing more is asked, so that no step waits for it again.
        wait_s = 0.0 if self.link.hung else wait_s
        try:
            self.link.read_answers(wait_s)
        except OSError as error:
            self._lost(error)
            return
        if self.link.hung is not self._said_hung:
            self._said_hung = self.link.hung
            print(
                "snapshots pause: the checkpoint daemon does not answer; training goes on"
                if self._said_hung
                else "snapshots go on: the checkpoint daemon has answered",
                flush=True,
            )

    def _skip(self, why: str) -> None:
        self.skipped += 1
        print(f"{why} ({self.skipped} skipped so far)", flush=True)

    def _copy(self, index: int, step: int, checks: list[CopyCheck]) -> CopyEnd:
        """Start the copy and its check, which is added to ``checks``."""
        slot = self.link.slot(index)
        landed = self._landing_notes.into(self.link.landing_word(index))

        def copy() -> None:
            self._state.state_copy_to(slot, landed)
            checks.append(CopyCheck(self._state.state_image(), slot, self._verified_share, step))

        if self._stream is None:
            return self._host_copies.start(copy)
        # Behind the update that made these states, and beside everything that follows it; the next
        # update waits for ``done`` (Trainer.wait_before_update), because it overwrites them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            done = cuda_event()
            done.record(self._stream)
        return cast(CopyEnd, done)

    def _lost(self, error: OSError) -> None:
        self._join_copies()
        self._schedule.lose()
        self.replicas.lost()
        self._copies.clear()
        self._said_hung = False
        self.store = StoreState()
        self._time_unanswered = False
        self.link.lost(error)

    def _join_copies(self) -> None:
        """A copy may still write into a slot, which is about to be unmapped."""
        if self._stream is not None:
            self._stream.synchronize()
        self._host_copies.join()
