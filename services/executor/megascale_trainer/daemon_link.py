"""One rank's connection to its node's checkpoint daemon: registration, requests, mapped slots.

The daemon owns the slots' memory, so a sealed snapshot survives this process. Requests and answers
alternate on one unix socket. On CUDA the slots are pinned, so that the copy engine writes into them
directly.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megascale_common.node import framing
from megascale_common.node.messages import DaemonRequest, Register
from megascale_common.sizes.checkpoint_layout import ShardLayout

# At the start: the first registration clears memory, a restore reads storage, and no peer waits.
START_TIMEOUT_S = 600.0
# Later the peers wait in their collectives for the answer, which takes milliseconds, or the time of
# a slot's checksums.
LONGEST_ANSWER_S, SHARE_OF_COLLECTIVE_TIMEOUT = 30.0, 4


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """What a rank registers with. ``sizes`` are those of the parallel axes, for the manifest."""

    job: str
    attempt: int
    rank: int
    world_size: int
    uri: str
    committer_endpoint: str
    slots: int
    sizes: Mapping[str, int]


class DaemonLink:
    """Connection of one rank to the checkpoint daemon of its node; not connected until asked to.

    Args:
        layout: how this rank's state lies in a slot.
        collective_timeout_s: of the job; an answer is awaited for a share of it.
    """

    def __init__(
        self,
        socket_path: str,
        registration: RankRegistration,
        layout: ShardLayout,
        device: torch.device,
        *,
        collective_timeout_s: float,
    ) -> None:
        self._path, self._registration, self._layout = socket_path, registration, layout
        self._device = device
        self._socket: socket.socket | None = None
        self._slots: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []
        self._unanswered = ""  # kind of a request whose answer has not been read
        self.answer_timeout_s = min(
            LONGEST_ANSWER_S, collective_timeout_s / SHARE_OF_COLLECTIVE_TIMEOUT
        )

    @property
    def connected(self) -> bool:
        """Whether the daemon was there at the last request."""
        return self._socket is not None

    def slot(self, index: int) -> torch.Tensor:
        """A slot's memory, uint8 [slot_bytes], on the host."""
        return self._slots[index]

    def connect(self, timeout_s: float) -> None:
        """Connect, register and map the slots.

        Raises:
            OSError: the daemon is not running, or refuses the registration; the message has its
                reason.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.answer_timeout_s)
        connection.connect(self._path)
        self._socket = connection
        who = self._registration
        message = Register(
            kind="register",
            version=framing.PROTOCOL_VERSION,
            job=who.job,
            attempt=who.attempt,
            rank=who.rank,
            world_size=who.world_size,
            uri=who.uri,
            committer_endpoint=who.committer_endpoint,
            slots=who.slots,
            layout=self._layout.to_dict(),
            layout_info=dict(who.sizes),
        )
        answer, descriptors = self._exchange(message, timeout_s)
        self._slots = [_map_slot(descriptor, answer["slot_bytes"]) for descriptor in descriptors]
        if self._device.type == "cuda":
            self._pinned = [slot for slot in self._slots if _pin(slot, self._device)]

    def ask(self, message: DaemonRequest, timeout_s: float | None = None) -> framing.Message:
        """One request and its answer, awaited for ``timeout_s``; default: the usual time.

        Raises:
            OSError: the daemon is gone, does not answer, or refuses the request.
        """
        return self._exchange(message, timeout_s or self.answer_timeout_s)[0]

    def post(self, message: DaemonRequest) -> None:
        """Send a request whose answer is read, and checked, before the next request.

        Raises:
            OSError: the daemon is gone, or refused the request before.
        """
        self._take_answer()
        framing.send(self._connected(), message)
        self._unanswered = message["kind"]

    def collect(self, timeout_s: float | None = None) -> framing.Message:
        """The answer to the request that was posted last.

        Raises:
            OSError: the daemon is gone, does not answer, or refuses the request.
        """
        connection = self._connected()
        connection.settimeout(timeout_s or self.answer_timeout_s)
        try:
            request, self._unanswered = self._unanswered, ""
            return self._answer(request)[0]
        finally:
            connection.settimeout(self.answer_timeout_s)

    def lost(self, error: OSError) -> None:
        """The daemon is gone: close and unmap. No copy may still write into a slot."""
        print(f"snapshots pause: {error}; training goes on", file=sys.stderr, flush=True)
        self.close()
        self._unanswered = ""
        self._unmap()

    def close(self) -> None:
        """Close the connection; sealed snapshots stay with the daemon."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(
        self, message: DaemonRequest, timeout_s: float
    ) -> tuple[framing.Message, Sequence[int]]:
        connection = self._connected()
        connection.settimeout(timeout_s)
        try:
            self._take_answer()
            framing.send(connection, message)
            return self._answer(message["kind"])
        finally:
            connection.settimeout(self.answer_timeout_s)

    def _take_answer(self) -> None:
        # Answers arrive in order: that of a posted request comes before the next.
        if self._unanswered:
            request, self._unanswered = self._unanswered, ""
            self._answer(request)

    def _answer(self, request: str) -> tuple[framing.Message, Sequence[int]]:
        answer = framing.receive(self._connected())
        if answer is None:
            raise ConnectionError("the checkpoint daemon closed the connection")
        if answer[0]["kind"] == "error":
            raise ConnectionError(f"the checkpoint daemon refused {request}: {answer[0]['error']}")
        return answer

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("not connected to the checkpoint daemon")
        return self._socket

    def _unmap(self) -> None:
        """Unmap the slots: the daemon's memory is freed only when no process maps it any more."""
        for slot in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned, self._slots = [], []


def _map_slot(descriptor: int, size_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(slot: torch.Tensor, device: torch.device) -> bool:
    """Pin a slot, so that the copy engine writes into it directly; returns whether that worked."""
    status = torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) == 0:
        return True
    print(
        f"slot is not pinned (cudaHostRegister status {int(status)}): "
        "training waits for each snapshot",
        flush=True,
    )
    # CUDA keeps the failure and would report it at the next launch of a kernel: launch one here
    # that takes it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False
