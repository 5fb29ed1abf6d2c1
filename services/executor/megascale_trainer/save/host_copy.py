"""Copies to and from a slot in the host's memory: their cuts, their check, and threads on a CPU.

A slot is pinned in parts of :data:`PINNED_AT_ONCE` bytes, because the driver launches no kernel
while it pins (0.26 s for 6 GB at once, on an H200's host), and one copy must not reach from one
pinned part into the next. On a CPU a thread copies: torch releases the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch

# Note [Snapshots off the training thread]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A state of gigabytes takes longer to reach the host than a step may be delayed, so nothing about a
# snapshot runs on the training thread or on the stream that trains. On CUDA the copy is enqueued on
# a side stream, after the update that made the state, into pinned memory, so that a copy engine
# moves it while the next forward and backward compute. On a CPU a thread copies. The state must not
# change meanwhile, and it does not: forward and backward read the parameters, and only the next
# update writes the states. So exactly one thing waits for the copy, the next update: on CUDA the
# stream waits for an event, and the host continues to launch.
#
# The daemon receives no call per part. The copy notes in the slot's last page how many bytes have
# landed, and on CUDA this number is itself a small copy on the same stream, so it can never be
# ahead of the bytes that it counts. Requests to the daemon are posted, and answers read when they
# have arrived; a daemon that hangs costs one step LONGEST_HOLD_S, then snapshots pause.

# Note [Checked copies]
# ~~~~~~~~~~~~~~~~~~~~~
# Checksums are computed from the bytes on the host, so they do not see a copy that went wrong.
# Samples of the copy are therefore compared with the device's own bytes, on the copy's stream and
# after it, so no host thread waits. The samples move from step to step, so over time they cover
# the whole state.

PINNED_AT_ONCE = 256 << 20
# Called after each part of a copy, with the number of bytes from the slot's start.
Landed: TypeAlias = Callable[[int], None]


def parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes [start, stop) of a slot, cut at the ends of pinned parts."""
    while start < stop:
        end = min(stop, (start // PINNED_AT_ONCE + 1) * PINNED_AT_ONCE)
        yield start, end
        start = end


class LandingNotes:
    """Notes in a slot's last page how many of its bytes have landed; the daemon follows.

    On CUDA the number is itself a copy on the same stream, so it arrives after the bytes that it
    counts, and no thread waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[int, torch.Tensor] = {}  # on the device, by the end of a part

    def into(self, word: torch.Tensor) -> Landed:
        """A function that notes numbers in ``word``, int64 [1] on the host."""

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
        """Make the next update wait: the current CUDA stream, or on a CPU this thread."""

    def query(self) -> bool:
        """Whether the copy has ended."""

    def synchronize(self) -> None:
        """Wait for the end in this thread."""


class HostCopies:
    """Copies one after the other, in one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "snapshot-copy")

    def start(self, copy: Callable[[], None]) -> HostCopyEnd:
        """Run ``copy`` after the copies before it."""
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
        """See :meth:`wait`."""
        self._running.result()


WINDOW_BYTES = 1 << 20  # least size of a sample
# The training thread launches the comparison of each window: 73 of them took it 4 ms (H200).
MOST_WINDOWS = 8
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive steps evenly over the places of a stretch


def sampled(size_bytes: int, share: float, step: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of about ``share`` of the bytes: one window in each equal stretch."""
    if share <= 0 or not size_bytes:
        return []
    if share >= 1:
        return [(0, size_bytes)]
    wanted = round(share * size_bytes)
    window = min(max(WINDOW_BYTES, wanted // MOST_WINDOWS), size_bytes)
    count = max(1, min(size_bytes // window, round(wanted / window), MOST_WINDOWS))
    ranges = []
    for number in range(count):
        begin, end = number * size_bytes // count, (number + 1) * size_bytes // count
        places = -(-(end - begin) // window)
        start = min(begin + (step * _GOLDEN >> 32) % places * window, end - window)
        ranges.append((start, start + window))
    return ranges


class CopyCheck:
    """The comparison of one copy: Note [Checked copies].

    ``image`` and ``slot`` are uint8, on the device and on the host.
    """

    def __init__(self, image: torch.Tensor, slot: torch.Tensor, share: float, step: int) -> None:
        self._differs: torch.Tensor | None = None
        ranges = sampled(image.numel(), share, step)
        if not ranges:
            return
        self._differs = torch.zeros((), dtype=torch.bool, pin_memory=image.is_cuda)
        found = torch.zeros((), dtype=torch.bool, device=image.device)
        for start, stop in (part for each in ranges for part in parts(*each)):
            copied = slot[start:stop].to(image.device, non_blocking=True)
            found |= (copied != image[start:stop]).any()
        self._differs.copy_(found, non_blocking=True)

    def problem(self) -> str:
        """The problem of a copy that has ended; "" if there is none."""
        if self._differs is None or not bool(self._differs):
            return ""
        return (
            "the copy to the host is not what was on the device: check the node's memory and PCIe"
        )
