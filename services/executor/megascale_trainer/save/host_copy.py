"""Copies to and from a slot in the host's memory: where they are cut, and how a CPU runs them.

A slot is pinned in parts of :data:`PINNED_AT_ONCE` bytes, because the driver launches no kernel
while it pins (0.26 s for 6 GB at once, on an H200's host), and one copy may not reach from one
part into the next. On a CPU a thread copies: torch releases the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch

PINNED_AT_ONCE = 256 << 20
# Called behind each part of a copy, with the number of bytes from the slot's start.
Landed: TypeAlias = Callable[[int], None]


def parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes [start, stop) of a slot, cut where one pinned part of it ends."""
    while start < stop:
        end = min(stop, (start // PINNED_AT_ONCE + 1) * PINNED_AT_ONCE)
        yield start, end
        start = end


class LandingNotes:
    """Notes in a slot's last page how many of its bytes have landed; the daemon follows.

    On CUDA the number is itself a copy, on the same stream: it arrives behind what it counts, and
    no thread waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[int, torch.Tensor] = {}  # on the device, of each end of a part

    def into(self, word: torch.Tensor) -> Landed:
        """What notes the numbers in ``word``, int64 [1] on the host."""

        def landed(stop: int) -> None:
            if self._device.type != "cuda":
                word.fill_(stop)
                return
            if stop not in self._numbers:
                self._numbers[stop] = torch.full((1,), stop, dtype=word.dtype, device=self._device)
            word.copy_(self._numbers[stop], non_blocking=True)

        return landed


class CopyEnd(Protocol):
    """The end of a copy that is in progress; ``torch.cuda.Event`` is one."""

    def wait(self) -> None:
        """Have the next update wait: on the current CUDA stream, or, on a CPU, this thread."""

    def query(self) -> bool:
        """Whether the copy has ended."""

    def synchronize(self) -> None:
        """Wait for it in this thread."""


class HostCopies:
    """Copies one after the other, in one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "snapshot-copy")

    def start(self, copy: Callable[[], None]) -> HostCopyEnd:
        """Run ``copy`` behind those before it."""
        return HostCopyEnd(self._pool.submit(copy))

    def join(self) -> None:
        """Wait for all copies that were started."""
        self._pool.submit(lambda: None).result()


class HostCopyEnd:
    """See :class:`CopyEnd`; an error of the copy is raised by each of its methods."""

    def __init__(self, running: Future[None]) -> None:
        self._running = running

    def wait(self) -> None:
        """Wait until the copy has ended."""
        self._running.result()

    def query(self) -> bool:
        """Whether the copy has ended."""
        if not self._running.done():
            return False
        self._running.result()
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self._running.result()
