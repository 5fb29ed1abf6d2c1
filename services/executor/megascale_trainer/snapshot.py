"""Stage 1 of a checkpoint, the trainer's side: copy the state to the daemon's memory and seal it.

The daemon owns the memory (slots), so a sealed snapshot survives this process. All ranks take a
snapshot together or skip it together: each reserves a slot one step ahead, and its vote rides in
the gradient-norm all-reduce. Busy slots skip and count; nothing blocks. A daemon that ends costs
snapshots, never the run.

On CUDA the copy runs on a side stream into pinned slots during the next forward and backward; the
next optimizer update waits for it on the device (:attr:`Snapshotter.copied`), the host never does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from megascale_common.node import framing
from megascale_common.node.messages import (
    Acquire,
    Acquired,
    Busy,
    DaemonRequest,
    Drain,
    Release,
    Seal,
)
from megascale_common.sizes.checkpoint_layout import ShardLayout
from megascale_trainer.daemon_link import START_TIMEOUT_S, DaemonLink, RankRegistration

ACQUIRE_RETRY_S = 0.2


class TrainingState(Protocol):
    """What the snapshotter needs of a trainer."""

    def shard_layout(self) -> ShardLayout:
        """How this rank's state lies in a slot."""

    def state_copy_to(self, slot: torch.Tensor) -> None:
        """Copy the state into ``slot`` (uint8, host), on the current stream."""


@dataclass(slots=True)
class _Pending:
    """A copy that was started and is not sealed; ``done`` is None on CPU: it is complete at once.

    ``finite`` is None until the result of the step has been read.
    """

    slot: int
    step: int
    small_state: dict[str, Any]
    done: torch.cuda.Event | None
    finite: bool | None = None


@dataclass(frozen=True, slots=True)
class Drainage:
    """Answer to a drain: "" or why the step is not committed; ``waiting``: it still may be."""

    problem: str
    waiting: bool


class Snapshotter:
    """Connection of one rank to the checkpoint daemon of its node.

    Raises:
        OSError: the daemon is not running, or refuses the registration; the message has its reason.
    """

    def __init__(
        self,
        socket_path: str,
        registration: RankRegistration,
        state: TrainingState,
        device: torch.device,
        *,
        collective_timeout_s: float,
    ) -> None:
        self._state, self._device = state, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # By step: the next slot is reserved before the snapshot of this step is taken.
        self._reserved: dict[int, int] = {}
        self._pending: deque[_Pending] = deque()
        self.skipped = 0
        self.link = DaemonLink(
            socket_path,
            registration,
            state.shard_layout(),
            device,
            collective_timeout_s=collective_timeout_s,
        )
        self.link.connect(START_TIMEOUT_S)

    def reserve(self, step: int) -> int:
        """Reserve a slot for the snapshot after ``step``; the vote: 0 ready, 1 must skip."""
        self.seal_if_copied()
        try:
            if not self.link.connected:
                self.link.connect(self.link.answer_timeout_s)
            if self._pending:
                return 1  # the previous snapshot is still being copied or settled
            answer = cast(Acquired | Busy, self.link.ask(Acquire(kind="acquire", step=step)))
        except OSError as error:
            self._lost(error)
            return 1
        if answer["kind"] != "acquired":
            return 1
        self._reserved[step] = answer["slot"]
        return 0

    def reserve_or_wait(self, step: int, timeout_s: float) -> int:
        """As :meth:`reserve`, but wait for a busy slot: the last step delays no other."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.seal_if_copied(wait=True)
            if self.reserve(step) == 0:
                return 0
            if time.monotonic() > deadline:
                return 1
            time.sleep(ACQUIRE_RETRY_S)

    def take(self, step: int, small_state: dict[str, Any], *, votes: int) -> bool:
        """After ``step``: start the copy into the reserved slot, or skip if ``votes`` is above 0.

        It is sealed after :meth:`settle`. Returns whether a snapshot was started.
        """
        slot = self._reserved.pop(step, None)
        if votes:
            self.skipped += 1
            print(
                f"step {step}: no snapshot, {votes} ranks have no slot "
                f"({self.skipped} skipped so far)",
                flush=True,
            )
            if slot is not None:
                self._try(Release(kind="release", slot=slot))
            return False
        # The daemon ended after the vote: the other ranks take their part, and the step cannot be
        # committed without this one's. Training goes on.
        if slot is None:
            self.skipped += 1
            print(
                f"step {step}: no snapshot here, the slot is lost ({self.skipped} skipped so far)",
                flush=True,
            )
            return False
        self._pending.append(_Pending(slot, step, small_state, self._copy(self.link.slot(slot))))
        return True

    def settle(self, step: int, small_state: Mapping[str, Any], *, finite: bool) -> None:
        """The result of ``step`` was read: complete its snapshot's small state and finite flag."""
        for pending in self._pending:
            if pending.step == step:
                pending.small_state |= small_state
                pending.finite = finite

    @property
    def copied(self) -> torch.cuda.Event | None:
        """Event that the next optimizer update must wait for; None when no copy is in progress."""
        # All copies are on one stream, so the newest one ends last.
        return self._pending[-1].done if self._pending else None

    def seal_if_copied(self, *, wait: bool = False) -> None:
        """Have finished and settled copies sealed; with ``wait``, wait for the copies first.

        A copy is sealed only when it has ended on the device *and* its step's result was read: the
        seal carries ``finite``. The daemon answers when it has checksummed the slot; training does
        not wait for that (the next request does).
        """
        while self._pending and self._pending[0].finite is not None:
            done = self._pending[0].done
            if done is not None and wait:
                done.synchronize()
            elif done is not None and not done.query():  # type: ignore[no-untyped-call]
                return
            # From here on the slot belongs to the daemon: the next update may overwrite the states.
            self._seal(self._pending.popleft())

    def _seal(self, copied: _Pending) -> None:
        assert copied.finite is not None
        message = Seal(
            kind="seal",
            slot=copied.slot,
            step=copied.step,
            small_state=copied.small_state,
            finite=copied.finite,
        )
        try:
            self.link.post(message)
        except OSError as error:
            self._lost(error)

    @property
    def connected(self) -> bool:
        """Whether the daemon was there at the last request."""
        return self.link.connected

    def drain(self, step: int, timeout_s: float) -> Drainage:
        """Wait until ``step`` is committed, but at most ``timeout_s``."""
        message = Drain(kind="drain", step=step, timeout_s=timeout_s)
        answer = self._try(message, timeout_s + self.link.answer_timeout_s)
        if answer is None:
            return Drainage("the checkpoint daemon is gone", waiting=False)
        return Drainage(str(answer.get("error", "")), waiting=bool(answer.get("waiting")))

    def close(self) -> None:
        """Close the connection; sealed snapshots stay with the daemon."""
        self.link.close()

    def _copy(self, slot: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            self._state.state_copy_to(slot)
            return None
        # Behind the update that made these states, and beside everything that follows it; the next
        # update waits for ``done`` (Trainer.wait_before_update), because it overwrites them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._state.state_copy_to(slot)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def _try(
        self, message: DaemonRequest, timeout_s: float | None = None
    ) -> framing.Message | None:
        """Send a message whose loss only costs a snapshot."""
        try:
            return self.link.ask(message, timeout_s)
        except OSError as error:
            self._lost(error)
            return None

    def _lost(self, error: OSError) -> None:
        self._reserved.clear()
        self._pending.clear()
        if self._stream is not None:
            self._stream.synchronize()  # a copy may still write into a slot
        self.link.lost(error)
