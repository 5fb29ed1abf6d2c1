"""One rank's connection to its node's checkpoint daemon: registration, requests, mapped slots.

The daemon owns the slots' memory, so a sealed snapshot survives this process. Registering, and
mapping, populating and pinning the slots (:mod:`megascale_trainer.save.mapped_slots`), takes
seconds for gigabytes: a thread does it. Requests are pipelined on one unix socket and answered in
order. A training thread posts them, reads answers as they come, and waits for one at most
:data:`LONGEST_HOLD_S`, however long the daemon hangs.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import torch

from megascale_common.node import framing, messages
from megascale_common.node.messages import (
    NO_REPLICAS,
    PIECES_IN_A_FRAME,
    Accepted,
    Acquired,
    Busy,
    DaemonAnswer,
    DaemonRequest,
    DidRead,
    Drained,
    MemoryState,
    Pace,
    Pieces,
    RankTerms,
    Refused,
    Register,
    Registered,
    Released,
    ReplicaOrders,
    RequestFailed,
    Restored,
    Sealed,
    StoredIndex,
    StoredState,
    Verified,
    kind_of,
)
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_trainer.save.mapped_slots import MappedSlots

# At the start: the first registration clears memory, a restore reads storage, and no peer waits.
START_TIMEOUT_S = 600.0
# A step waits for one answer no longer: its peers wait in their collectives.
LONGEST_HOLD_S = 0.05
# Where a rank waits on purpose, at the end of a run, the peers wait with it.
LONGEST_ANSWER_S, SHARE_OF_COLLECTIVE_TIMEOUT = 30.0, 4
READ_BYTES = 1 << 16

A = TypeVar("A")
Answered = Callable[[DaemonAnswer], None]
_ANSWERS: Accepted[DaemonAnswer] = Accepted(
    "a worker",
    Registered,
    Acquired,
    Busy,
    Sealed,
    Released,
    Drained,
    Pace,
    RequestFailed,
    Restored,
    MemoryState,
    Verified,
    StoredState,
    StoredIndex,
    DidRead,
    Refused,
)


def checked(answer: DaemonAnswer, kind: type[A]) -> A:
    """An answer of the kind that its request has.

    Raises:
        ConnectionError: it is of another kind.
    """
    if not isinstance(answer, kind):
        raise ConnectionError(
            f"the checkpoint daemon answered {kind_of(answer)!r}, not {kind_of(kind)!r}"
        )
    return answer


@dataclass(frozen=True, slots=True)
class RankRegistration(RankTerms):
    """What a rank registers with.

    ``sizes`` are those of the parallel axes, for the manifest. ``replicas`` goes to the daemon as
    it is.
    """

    sizes: Mapping[str, int] = field(kw_only=True)
    replicas: ReplicaOrders | None = None


class DaemonLink:
    """Connection of one rank to the checkpoint daemon of its node; not connected until asked to.

    Args:
        layout: how this rank's state lies in a slot.
        collective_timeout_s: of the job; an answer is awaited for a share of it at most.
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
        self._path = socket_path
        self._registration = registration
        self._layout = layout
        self._device = device
        self._socket: socket.socket | None = None
        self._opening: _Opening | None = None
        self._slots: MappedSlots | None = None
        self._prepares_all = False
        self._decoder = framing.Decoder()
        self._awaited: deque[tuple[str, Answered | None]] = deque()
        self._hung = False
        self.answer_timeout_s = min(
            LONGEST_ANSWER_S, collective_timeout_s / SHARE_OF_COLLECTIVE_TIMEOUT
        )

    @property
    def connected(self) -> bool:
        """Whether the daemon was there at the last request."""
        return self._socket is not None

    @property
    def prepared(self) -> bool:
        """Whether the slots can be copied into without a page fault: populated, and pinned."""
        return self._slots is not None and self._slots.prepared.is_set()

    @property
    def hung(self) -> bool:
        """Whether the daemon left a request unanswered for too long, and still does."""
        return self._hung

    def slot(self, index: int) -> torch.Tensor:
        """A slot's memory, uint8 [slot_bytes], on the host."""
        return self._mapped().tensors[index]

    def landing_word(self, index: int) -> torch.Tensor:
        """Where a slot's copy notes how many bytes have landed, int64 [1] on the host."""
        return self._mapped().landing_words[index]

    @property
    def slots_bytes(self) -> int:
        """Size of all slots; 0 without a connection."""
        return 0 if self._slots is None else sum(slot.numel() for slot in self._slots.tensors)

    def connect(self, timeout_s: float = START_TIMEOUT_S) -> DaemonLink:
        """Connect, register and map the slots; a thread populates and pins those asked for.

        Returns the link itself.

        Raises:
            OSError: the daemon is not running, or refuses the registration; the message has its
                reason.
        """
        self.begin_connect(timeout_s)
        assert self._opening is not None
        self._opening.done.wait(timeout_s)
        self.finish_connect()
        if not self.connected:
            self._opening = None
            raise TimeoutError(f"the checkpoint daemon has not registered in {timeout_s:g} s")
        return self

    def begin_connect(self, timeout_s: float) -> None:
        """Start to connect in a thread; :meth:`finish_connect` takes the result."""
        if self._opening is None and self._socket is None:
            self._opening = _Opening(
                self._path, self._registration, self._layout, self._device, timeout_s
            )

    def finish_connect(self) -> bool:
        """Take over a connection that was begun, once it stands; returns whether there is one.

        Raises:
            OSError: see :meth:`connect`.
        """
        opening = self._opening
        if opening is not None and opening.done.is_set():
            self._opening = None
            if opening.error is not None:
                raise opening.error
            self._socket = opening.socket
            self._slots = opening.slots
            if self._prepares_all and self._slots is not None:
                self._slots.prepare_all()
            self._decoder = framing.Decoder()
            self._hung = False
        return self.connected

    def prepare_all(self) -> None:
        """Have all slots populated and pinned, beside what this process does."""
        self._prepares_all = True
        if self._slots is not None:
            self._slots.prepare_all()

    def wait_prepared(self, timeout_s: float) -> bool:
        """Have all slots populated and pinned, and wait; returns whether they are."""
        self.prepare_all()
        return self._slots is not None and self._slots.prepared.wait(timeout_s)

    def prepare_next(self, index: int) -> None:
        """Have one slot populated and pinned before the others."""
        if self._slots is not None:
            self._slots.prepare_next(index)

    def wait_for_bytes(self, index: int, stop: int, timeout_s: float) -> bool:
        """Wait until those bytes of a slot that is prepared next are; returns whether they are."""
        return self._slots is not None and self._slots.wait(index, stop, timeout_s)

    def ask(self, message: DaemonRequest, timeout_s: float | None = None) -> DaemonAnswer:
        """One request and its answer, awaited for ``timeout_s``; default: the usual time.

        Raises:
            OSError: the daemon is gone, does not answer, or refuses the request.
        """
        answers: list[DaemonAnswer] = []
        self.post(message, answers.append)
        timeout_s = timeout_s or self.answer_timeout_s
        if not self.read_answers(timeout_s):
            raise TimeoutError(
                f"the checkpoint daemon has not answered {kind_of(message)} in {timeout_s:g} s"
            )
        return answers[0]

    def post(self, message: DaemonRequest, answered: Answered | None = None) -> None:
        """Send a request; ``answered`` is called with its answer in :meth:`read_answers`.

        Raises:
            OSError: the daemon is gone.
        """
        connection = self._connected()
        connection.settimeout(LONGEST_HOLD_S)
        framing.send(connection, message)
        self._awaited.append((kind_of(message), answered))

    def read_answers(self, wait_s: float = 0.0) -> bool:
        """Read answers until none is awaited, for at most ``wait_s``; returns whether none is.

        After a wait without an answer the daemon counts as hung, until it has answered everything.

        Raises:
            OSError: the daemon is gone, or refused a request.
        """
        connection, deadline = self._connected(), time.monotonic() + wait_s
        while self._awaited:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([connection], [], [], left_s)[0]:
                self._hung = self._hung or wait_s > 0
                return False
            data = connection.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the checkpoint daemon closed the connection")
            for message in self._decoder.feed(data):
                self._take(_ANSWERS.read(message))
        self._hung = False
        return True

    def lost(self, error: OSError) -> None:
        """The daemon is gone: close and unmap. No copy may still write into a slot."""
        print(f"snapshots pause: {error}; training goes on", file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """Close the connection and unmap the slots; sealed snapshots stay with the daemon."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._awaited.clear()
        self._hung = False
        # The daemon's memory is freed only when no process maps it any more.
        if self._slots is not None:
            self._slots.drop()
            self._slots = None

    def _take(self, answer: DaemonAnswer) -> None:
        if not self._awaited:
            raise ConnectionError(f"the checkpoint daemon sent {kind_of(answer)!r} unasked")
        request, answered = self._awaited.popleft()
        if isinstance(answer, RequestFailed):
            raise ConnectionError(f"the checkpoint daemon refused {request}: {answer.error}")
        if answered is not None:
            answered(answer)

    def _mapped(self) -> MappedSlots:
        if self._slots is None:
            raise ConnectionError("not connected to the checkpoint daemon")
        return self._slots

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("not connected to the checkpoint daemon")
        return self._socket


class _Opening:
    """A connection that a thread opens: ``done`` is set when it is registered, or has failed."""

    def __init__(
        self,
        path: str,
        who: RankRegistration,
        layout: ShardLayout,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.done = threading.Event()
        self.error: OSError | None = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.slots: MappedSlots | None = None
        self._path = path
        self._who = who
        self._layout = layout
        self._device = device
        self.socket.settimeout(timeout_s)
        # A daemon thread: a daemon process that hangs must not hold up this one's end.
        threading.Thread(target=self._run, name="register", daemon=True).start()

    def _run(self) -> None:
        try:
            self.slots = self._register()
        except OSError as error:
            self.socket.close()
            self.error = error
            self.done.set()
            return
        self.done.set()
        self.slots.prepare()

    def _register(self) -> MappedSlots:
        self.socket.connect(self._path)
        for message in registration_frames(self._who, self._layout):
            framing.send(self.socket, message)
        received = framing.receive(self.socket)
        if received is None:
            raise ConnectionError("the checkpoint daemon closed the connection")
        answer = _ANSWERS.read(received[0])
        if isinstance(answer, RequestFailed):
            raise ConnectionError(f"the checkpoint daemon refused register: {answer.error}")
        slots = checked(answer, Registered)
        return MappedSlots(received[1], slots.slot_bytes, slots.landing_at, self._device)


def registration_frames(who: RankRegistration, layout: ShardLayout) -> Iterator[Register | Pieces]:
    """A Register, and the Pieces messages that follow it: a large layout needs several frames."""
    pieces = [asdict(piece) for piece in layout.pieces]
    first, rest = pieces[:PIECES_IN_A_FRAME], pieces[PIECES_IN_A_FRAME:]
    yield Register(
        version=framing.PROTOCOL_VERSION,
        **messages.rank_values(who),
        layout={"slot_bytes": layout.slot_bytes, "pieces": first},
        further_pieces=len(rest),
        layout_info=dict(who.sizes),
        replicas=who.replicas or NO_REPLICAS,
    )
    for start in range(0, len(rest), PIECES_IN_A_FRAME):
        yield Pieces(pieces=rest[start : start + PIECES_IN_A_FRAME])
