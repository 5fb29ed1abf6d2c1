"""Messages from one rank to another through the receiver's memory, in the order of their sends.

The receiver has a ring of slots. The sender *pushes* a message into the next slot, on CUDA by a
copy engine, which takes no multiprocessor from the GEMMs, and signals. The receiver copies it out
and signals that the slot is free.

- A slot is never overwritten too early: before message n the sender awaits that message
  n - :data:`SLOTS` has left it.
- A send never holds the sender's own work up: its wait, copy and signal are on a stream (on a CPU:
  a thread) of their own. They wait for the receive of message n - SLOTS at most, where a send
  without a buffer waits for that of message n: programs that end with those end with these.
- A receive runs on the caller's stream and waits for its message alone, without a kernel.
  A message needs no receive to arrive, so nothing of it runs beside computation before.
- Each slot has two channels of signals, one for each way. A signal is given only after the one
  before on its channel was awaited: data n + SLOTS after the slot's last "free", which the receiver
  gave behind its wait for data n; "free" n + SLOTS after data n + SLOTS, which the sender gave
  behind its wait for "free" n.
- Both ranks stay until all messages were received: a step ends in a sum over all ranks.
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

SLOTS = 2
_MEETING = 2 * SLOTS  # the channel behind those of the slots
_ALIGNMENT_BYTES = 256


class Transfer(Protocol):
    """One message on its way."""

    def is_completed(self) -> bool:
        """Whether it has ended (a receive on CUDA: whether it was waited for); never waits."""
        ...

    def wait(self) -> object:
        """Have the current stream wait for the end (CPU: the caller waits).

        Raises:
            RuntimeError: on a CPU, the other rank has ended or did not come within the timeout.
        """
        ...


def region_bytes(message_bytes: int) -> int:
    """Memory that each of two ranks needs for messages of up to ``message_bytes``."""
    return SLOTS * math.ceil(message_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class PeerMessages:
    """Messages both ways between the two ranks of ``memory``, which belongs to this object alone.

    Both ranks create it together; it waits for the device. One thread makes all calls.

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
        """Send ``tensor``, contiguous; until the end of the transfer it must not be written.

        On CUDA it leaves when the current stream has done everything enqueued so far.

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

        Transfers are waited for in the order of their receives.

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
        """Exchange a signal: both ranks are there, and each has mapped the other's memory."""
        # A channel of its own: this rank may send before the other has awaited this signal.
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
        """Where message ``number`` to ``rank`` lies, in the form of ``like``."""
        offset_bytes = number % SLOTS * self._slot_bytes
        return self._memory.tensor_of(rank, like.shape, like.dtype, offset_bytes)


def _data(number: int) -> int:
    """The channel in which message ``number`` is announced."""
    return number % SLOTS


def _free(number: int) -> int:
    """The channel in which its slot is given back, the other way."""
    return SLOTS + number % SLOTS


def _on_cuda(memory: SignalledMemory) -> bool:
    return memory.device.type == "cuda"


class _Receipt:
    """Takes a message out of its slot on the caller's stream (CPU: now) when it is waited for."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self._taken = False

    def is_completed(self) -> bool:
        return self._taken

    def wait(self) -> None:
        self._take()
        self._taken = True


class _StreamLane:
    """Work on a stream of its own, behind what the current stream holds now."""

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
    """Work on a thread of its own; the thread ends with its owner, and never holds an exit up."""

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
        except RuntimeError as error:  # of the group: raised again where the transfer is waited for
            task.end.set_exception(error)
        else:
            task.end.set_result(None)
        del task  # and with it the message, and what its work refers to: this thread's owner
