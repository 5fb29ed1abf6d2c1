"""A copy between two places of the host's memory in a thread: what a CUDA event is to a stream.

torch releases the interpreter lock while it copies, so that training goes on beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


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
