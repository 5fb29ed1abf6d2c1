"""The limits that snapshots and restores are held against: copies between host memory and devices.

    python benchmarks/host_copies.py --gigabytes 4
    python benchmarks/host_copies.py --device cpu --gigabytes 0.25      # the host's part alone

On all devices at once, each from a process of its own, GB/s per device and in sum: device to pinned
host memory and back, and the ways in which a new process can read a state that lies in shared
memory: mapping its pages, pinning them, copying it from pageable memory, and through pinned windows
that go to the device in turn (file_T_W: read by T threads into windows of W MiB; mapped_T_W:
mapped and copied by them).
The last line of stdout is one JSON object. Exit status: 0, 2 where a device is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

MADV_POPULATE_WRITE = 23
WINDOWS = 3
READ_BYTES = 1 << 20
THROUGH = ((4, 16), (8, 16), (12, 16), (16, 16), (16, 64))  # threads, MiB of a window
ROUNDS = 3
START_TIMEOUT_S = 300.0


Fill = Callable[[memoryview, int], object]  # bytes of the state from an offset on, into a view


class Copies:
    """All measurements of one process, in step with the others: every part begins together."""

    def __init__(self, device: torch.device, size_bytes: int, path: Path, barrier: Barrier) -> None:
        self._device, self._size, self._path, self._barrier = device, size_bytes, path, barrier
        self._found: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """GB/s by name."""
        device = self._device
        state = torch.ones(self._size, dtype=torch.uint8, device=device)
        self._pinned(state)
        self._write_file()
        for threads, mib in THROUGH:
            for name, source in (("file", self._read), ("mapped", self._copy)):
                through = functools.partial(self._through, state, threads, mib << 20, source)
                self._time(f"{name}_{threads}_{mib}", through, rounds=2)
        slot = self._mapped()
        self._time("map_pages", lambda: _populate(slot), rounds=1)
        self._time("pageable_to_device", lambda: state.copy_(slot))
        if device.type == "cuda":
            self._time("pin_pages", lambda: _pin(slot), rounds=1)
            self._time("slot_to_device", lambda: state.copy_(slot, non_blocking=True))
            self._time("device_to_slot", lambda: slot.copy_(state, non_blocking=True))
        return self._found

    def _pinned(self, state: torch.Tensor) -> None:
        pinned = torch.zeros(self._size, dtype=torch.uint8, pin_memory=state.is_cuda)
        self._time("device_to_pinned", lambda: pinned.copy_(state, non_blocking=True))
        self._time("pinned_to_device", lambda: state.copy_(pinned, non_blocking=True))

    def _time(self, name: str, work: Callable[[], object], rounds: int = ROUNDS) -> None:
        times_s = []
        for _ in range(rounds):
            self._barrier.wait(START_TIMEOUT_S)
            began_s = time.perf_counter()
            work()
            self._wait()
            times_s.append(time.perf_counter() - began_s)
        self._found[name] = self._size / min(times_s) / 1e9

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write_file(self) -> None:
        chunk = os.urandom(1 << 20) * 16
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size)
            for start in range(0, self._size, len(chunk)):
                file.write(chunk[: self._size - start])

    def _mapped(self) -> torch.Tensor:
        with self._path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), self._size), dtype=torch.uint8)

    def _read(self) -> Fill:
        file = os.open(self._path, os.O_RDONLY)
        return lambda view, start: os.preadv(file, [view], start)

    def _copy(self) -> Fill:
        slot = self._mapped()

        def fill(view: memoryview, start: int) -> None:
            part = slot[start : start + len(view)]
            _populate(part)
            torch.frombuffer(view, dtype=torch.uint8).copy_(part)

        return fill

    def _through(
        self, state: torch.Tensor, threads: int, window_bytes: int, source: Callable[[], Fill]
    ) -> None:
        """Fill pinned windows in turn, each copied on while the others fill."""
        cuda = self._device.type == "cuda"
        windows = [
            torch.empty(window_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(WINDOWS)
        ]
        fill = source()
        sent: list[torch.cuda.Event | None] = [None] * WINDOWS
        with ThreadPoolExecutor(threads) as pool:
            for number, start in enumerate(range(0, self._size, window_bytes)):
                stop, turn = min(start + window_bytes, self._size), number % WINDOWS
                event = sent[turn]
                if event is not None:
                    event.synchronize()
                window = windows[turn][: stop - start]
                view = memoryview(window.numpy())  # type: ignore[arg-type]

                def part(at: int, view: memoryview = view, start: int = start) -> None:
                    fill(view[at : at + READ_BYTES], start + at)

                list(pool.map(part, range(0, stop - start, READ_BYTES)))
                state[start:stop].copy_(window, non_blocking=True)
                if cuda:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    sent[turn] = event
            self._wait()


def _populate(memory: torch.Tensor) -> None:
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), MADV_POPULATE_WRITE
    )


def _pin(memory: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    assert int(status) == 0, f"cudaHostRegister: {status}"


def _process(
    number: int, options: argparse.Namespace, folder: str, barrier: Barrier, results: Any
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size_bytes = int(options.gigabytes * 1e9) // mmap.PAGESIZE * mmap.PAGESIZE
    found = Copies(device, size_bytes, Path(folder) / f"slot-{number}", barrier).run()
    results.put((number, found))


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of one device's state")
    parser.add_argument("--processes", type=int, default=0, help="default: one per device")
    options = parser.parse_args()
    there = torch.cuda.device_count() if options.device == "cuda" else 1
    count = options.processes or there
    if not count or (options.device == "cuda" and count > there):
        print(f"host_copies.py: {there} CUDA devices are there, {max(1, count)} wanted")
        return 2
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    with tempfile.TemporaryDirectory(prefix="megascale-copies-", dir="/dev/shm") as folder:
        processes = [
            context.Process(target=_process, args=(each, options, folder, barrier, results))
            for each in range(count)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=START_TIMEOUT_S) for _ in processes)
        for process in processes:
            process.join()
    names = found[0]
    print(
        json.dumps(
            {
                "device": options.device,
                "devices": count,
                "gigabytes": options.gigabytes,
                "gb_per_s_each": {
                    name: [round(found[each][name], 2) for each in range(count)] for name in names
                },
                "gb_per_s_sum": {
                    name: round(sum(each[name] for each in found.values()), 2) for name in names
                },
                "torch": torch.__version__,
                "load": os.getloadavg()[0],
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
