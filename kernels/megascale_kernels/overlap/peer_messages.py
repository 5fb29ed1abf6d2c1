"""Messages from one rank to another through the receiver's memory, in the order of their sends.

The receiver has a ring of slots. The sender *pushes* a message into the next slot, on CUDA by a
copy engine, which takes no multiprocessor from the GEMMs, and signals. The receiver copies the
message out and signals that the slot is free. See Note [Message slots].
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from megascale_kernels.overlap.peer_memory import SignalledMemory
from megascale_kernels.overlap.side_stream import SideStream
from megascale_kernels.torch_calls import is_reached

# Note [Message slots]
# ~~~~~~~~~~~~~~~~~~~~
# - A slot is never overwritten too early: before message n the sender waits until message
#   n - SLOTS has left it.
# - A send never delays the sender's own work: its wait, copy and signal are on a stream (on a CPU:
# a
#   thread) of their own. They wait at most for the receive of message n - SLOTS. A send without a
#   buffer waits for the receive of message n itself. So a schedule that cannot deadlock with such
#   sends cannot deadlock with these.
# - A receive runs on the caller's stream and waits for its message alone, without a kernel. A
#   message arrives without a receive, so a receive needs nothing that runs parallel to computation.
# - Each slot has two channels of signals, one for each direction. A channel holds one signal, so a
#   rank may give one only after the last one was awaited. That is so: the sender gives data
# n + SLOTS after it has awaited "free" n, which the receiver gave after it had awaited data n. The
#   receiver gives "free" n + SLOTS after it has awaited data n + SLOTS, which the sender gave after
#   it had awaited "free" n.
# - Both ranks stay until all messages are received, since a step ends in a sum over all ranks.

SLOTS = 2
_MEETING = 2 * SLOTS  # the channel after those of the slots
_ALIGNMENT_BYTES = 256


class Transfer(Protocol):
    """One message on its way."""

    def is_completed(self) -> bool:
        """Whether it has ended (a receive: whether ``wait`` was called); never waits."""
        ...

    def wait(self) -> object:
        """Make the current stream (on a CPU: the caller) wait for the end.

        Raises:
            RuntimeError: on a CPU, the other rank has ended or did not answer within the timeout.
        """
        ...


def region_bytes(message_bytes: int) -> int:
    """The memory that each of two ranks needs for messages of up to ``message_bytes``."""
    return SLOTS * math.ceil(message_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class PeerMessages:
    """Messages in both directions between the two ranks of ``memory``.

    The memory belongs to this object alone. Both ranks create the object together, which waits for
    the device. One thread makes all calls.

    Raises:
        ValueError: the memory is not of two ranks.
    """

    def __init__(self, memory: SignalledMemory) -> None:
        if memory.size != 2:
            raise ValueError(f"messages pass between two ranks, the memory has {memory.size}")
        self._memory = memory
        self._peer = 1 - memory.rank
        self._slot_bytes = memory.size_bytes // SLOTS // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        self._sent = self._posted = 0
        self._lane = _StreamLane(memory.device) if _on_cuda(memory) else _ThreadLane()
        self._meet()

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Send ``tensor``, contiguous; it must not be written before the end of the transfer.

        On CUDA it leaves when the current stream has done all work that it has been given so far.

        Raises:
            RuntimeError: a slot is too small for it.
        """
        self._check(tensor)
        number, source, memory = self._sent, tensor.detach(), self._memory
        into = self._slot(self._peer, number, source)
        self._sent += 1

        def push() -> None:
            if number >= SLOTS:
                memory.await_signal(self._peer, _free(number))
            into.copy_(source)
            memory.signal(self._peer, _data(number))

        return self._lane.run(push)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """The next message, which the transfer's wait writes into ``tensor``, contiguous.

        The caller waits for transfers in the order of their receives.

        Raises:
            RuntimeError: a slot is too small for it.
        """
        self._check(tensor)
        number, memory = self._posted, self._memory
        source = self._slot(memory.rank, number, tensor)
        self._posted += 1

        def take() -> None:
            memory.await_signal(self._peer, _data(number))
            tensor.copy_(source)
            memory.signal(self._peer, _free(number))

        return _Receipt(take)

    def _meet(self) -> None:
        """Exchange a signal, after which both ranks have mapped each other's memory."""
        # On a channel of its own: this rank may send before the other has awaited this signal.
        self._memory.signal(self._peer, _MEETING)
        self._memory.await_signal(self._peer, _MEETING)
        if _on_cuda(self._memory):
            torch.cuda.synchronize(self._memory.device)

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.nbytes > self._slot_bytes:
            raise RuntimeError(
                f"a message has {tensor.nbytes} bytes, a slot of peer memory {self._slot_bytes}"
            )

    def _slot(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """The slot of message ``number`` to ``rank``, as a tensor like ``like``."""
        offset_bytes = number % SLOTS * self._slot_bytes
        return self._memory.tensor_of(rank, like.shape, like.dtype, offset_bytes)


def _data(number: int) -> int:
    """The channel that announces message ``number``."""
    return number % SLOTS


def _free(number: int) -> int:
    """The channel that gives the slot of message ``number`` back, in the other direction."""
    return SLOTS + number % SLOTS


def _on_cuda(memory: SignalledMemory) -> bool:
    return memory.device.type == "cuda"


class _Receipt:
    """A receive, whose ``wait`` copies the message on the caller's stream (on a CPU: at once)."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._taken = False

    def is_completed(self) -> bool:
        return self._taken

    def wait(self) -> None:
        self._take()
        self._taken = True


class _StreamLane:
    """Work on a stream of its own, after the work that the current stream has got so far."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)

    def run(self, work: Callable[[], None]) -> Transfer:
        self._side.follow_main()
        with self._side.active():
            work()
        mark = self._side.mark()
        assert mark is not None
        return _Marked(mark)


class _Marked:
    def __init__(self, mark: torch.cuda.Event) -> None:
        self._mark = mark

    def is_completed(self) -> bool:
        return is_reached(self._mark)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._mark)


class _ThreadLane:
    """Work on a thread of its own, which ends with its owner and never delays an exit."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(
            target=_work_off, args=(self._work,), name="peer-messages", daemon=True
        ).start()
        weakref.finalize(self, self._work.put, None)

    def run(self, work: Callable[[], None]) -> Transfer:
        task = _Task(work)
        self._work.put(task)
        return task


class _Task:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.end = Future[None]()

    def is_completed(self) -> bool:
        return self.end.done()

    def wait(self) -> None:
        self.end.result()


def _work_off(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.work()
        except RuntimeError as error:  # an error of the group, which the transfer's wait raises
            task.end.set_exception(error)
        else:
            task.end.set_result(None)
        # While the thread waits for the next task it must not keep the message, nor the object that
        # the work refers to: that is this thread's owner, whose end ends the thread.
        del task
