"""The slots of one rank in this process: mapped, their pages populated, and pinned on CUDA.

Populating and pinning gigabytes takes seconds, and the driver launches no kernel while it pins. So
a thread does it in parts: first the slot that a restore needs, and the others only on request,
after the first step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from megascale_trainer.save.host_copy import parts

LANDING_BYTES = 8  # size of the word with the number of bytes that have landed
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
DROP_WAIT_S = 0.05  # longest time by which a lost daemon delays a step
# Threads that populate one part: each maps 4 KiB pages at some 10 GB/s.
POPULATING_THREADS, LEAST_BYTES_OF_A_THREAD = 4, 16 << 20


class MappedSlots:
    """``prepared`` is set once all slots are populated and pinned."""

    def __init__(
        self, descriptors: list[int], size_bytes: int, landing_at: int, device: torch.device
    ) -> None:
        end = landing_at + LANDING_BYTES
        self._files = [_map_slot(descriptor, end) for descriptor in descriptors]
        self.tensors = [file[:size_bytes] for file in self._files]
        self.landing_words = [file[landing_at:end].view(torch.int64) for file in self._files]
        self.prepared = threading.Event()
        self._device = device
        self._pinned = list[torch.Tensor]()
        self._pins = device.type == "cuda"
        self._dropped = False
        self._lock = threading.Lock()  # held while pages are prepared
        # The condition guards the fields below, and reports their changes.
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._all = False
        self._done_bytes = [0] * len(self.tensors)

    def prepare(self) -> None:
        """Populate and pin requested slots until all are done, or they are dropped; in a thread."""
        with self._lock:
            for index in self._asked_for():
                self._prepare_part(index)
            if not self._dropped:
                self.prepared.set()

    def prepare_all(self) -> None:
        """Request all slots."""
        if not self._all:
            with self._changed:
                self._all = True
                self._changed.notify_all()

    def prepare_next(self, index: int) -> None:
        """Request one slot, before all others."""
        with self._changed:
            self._wanted = index
            self._changed.notify_all()

    def wait(self, index: int, stop: int, timeout_s: float) -> bool:
        """Wait until the bytes of a slot up to ``stop`` are prepared; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._dropped or self._done_bytes[index] >= stop, timeout_s
            )

    def drop(self) -> None:
        """Unpin and unmap the slots once :meth:`prepare` stops; in a thread if that takes long.

        Not always in a thread: a thread that frees memory while the process ends would abort it.
        """
        with self._changed:
            self._dropped = True
            self._changed.notify_all()
        if self._lock.acquire(timeout=DROP_WAIT_S):
            self._unmap()
            self._lock.release()
        else:
            threading.Thread(target=self._unmap_later, name="unmap", daemon=True).start()

    def _asked_for(self) -> Iterator[int]:
        """The slot whose next part is to be prepared, again and again until all are done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dropped or self._next() is not None)
                found = self._next()
            if self._dropped or found is None or found < 0:
                return
            yield found

    def _next(self) -> int | None:
        """The slot to prepare next; None: no request now; -1: all are done."""
        left = [at for at, file in enumerate(self._files) if self._done_bytes[at] < file.numel()]
        if not left:
            return -1
        if self._wanted in left:
            return self._wanted
        return left[0] if self._all else None

    def _prepare_part(self, index: int) -> None:
        file = self._files[index]
        start, stop = next(parts(self._done_bytes[index], file.numel()))
        part = file[start:stop]
        _populate(part)
        if self._pins:
            self._pins = _pin(part, self._device)  # no further attempt after one failure
            self._pinned += [part] if self._pins else []
        with self._changed:
            self._done_bytes[index] = stop
            self._changed.notify_all()

    def _unmap_later(self) -> None:
        with self._lock:
            self._unmap()

    def _unmap(self) -> None:
        for part in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(part.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned = []
        self._files = []
        self.tensors = []
        self.landing_words = []


def _map_slot(descriptor: int, size_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _populate(part: torch.Tensor) -> None:
    """Map the pages of ``part`` now; their content stays. An older kernel does nothing."""
    size = max(LEAST_BYTES_OF_A_THREAD, -(-part.numel() // POPULATING_THREADS))
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    starts = range(0, part.numel(), size)
    if len(starts) == 1:
        _populate_now(part)
        return
    with ThreadPoolExecutor(len(starts), "populate") as pool:
        list(pool.map(lambda start: _populate_now(part[start : start + size]), starts))


def _populate_now(part: torch.Tensor) -> None:
    # Through ctypes, which releases the interpreter lock during the call: mmap's methods hold it.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.numel()), MADV_POPULATE_WRITE
    )


def _pin(part: torch.Tensor, device: torch.device) -> bool:
    """Pin a part of a slot for the copy engine; returns whether that worked."""
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) == 0:
        return True
    print(
        f"slot is not pinned (cudaHostRegister status {int(status)}): "
        "training waits for each snapshot",
        flush=True,
    )
    # CUDA keeps the failure and would report it at the next launch of a kernel. So launch a kernel
    # here, whose error is ignored.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False
