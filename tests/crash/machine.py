"""A model of a machine's disk: what a power failure, a killed process or a failed sync leaves.

Only what was synced is sure to survive a loss of power: of the rest each write may have reached the
disk whole, in part or not at all, and in any order, and each name of a folder that was not synced
may be there or not. A sync that fails drops what it could not write: it stays visible, a later sync
reports success, and the disk does not have it. Every system call is a point at which a fault can
hit, before it takes effect or after.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megascale_checkpoint.storage.disk import Status

T = TypeVar("T")
# A folder of up to so many names is one block, written as a whole. A log is long, and its names lie
# in many blocks; here, where logs are short, each has a block of its own.
BLOCK_NAMES, LOG = 8, "commits"
POWER, KILL, FAILED_SYNC, NO_SPACE, LOST_REPLY, STALL = (
    *("power", "kill", "failed sync", "no space", "lost reply", "stall"),
)
SYNCS = ("fsync", "sync_folder")
CHANGES = ("create_temporary", "mkdir", "link", "rename", "unlink", "rmdir")
# Which calls a fault can hit; one that is not listed hits any.
CALLS_HIT: dict[str, tuple[str, ...]] = {
    FAILED_SYNC: SYNCS,
    NO_SPACE: ("write", "create_temporary", "mkdir"),
    LOST_REPLY: ("link", "rename", "mkdir"),
}


class Crash(BaseException):
    """The process that makes the call is gone."""


@dataclass(slots=True)
class Fault:
    """What hits at the first call from number ``point`` on that it can hit."""

    point: int
    kind: str
    after: bool = False


@dataclass(slots=True)
class Chunk:
    """One write; ``state`` is dirty, durable, or lost by a sync that failed."""

    offset: int
    data: bytes
    state: str = "dirty"


@dataclass(slots=True)
class File:
    """A file: as it is seen, and as the disk has it."""

    data: bytearray = field(default_factory=bytearray)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(slots=True)
class Folder:
    """A folder: names as they are seen and as the disk has them.

    Attributes:
        dirty: names that changed since the last sync.
        lost: names that a failed sync has dropped.
    """

    names: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    block_names: int = BLOCK_NAMES

    def change(self, name: str, node: int | None) -> None:
        """Set or remove a name."""
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node
        self.dirty.add(name)
        self.lost.discard(name)
        if len(self.names) <= self.block_names:
            self.dirty |= self.lost
            self.lost.clear()


class Machine:
    """The disk, and the faults that are still to hit.

    Attributes:
        points: calls so far.
        history: what happened, for people.
        hits: what faults have hit: kind, call and file's kind.
        violation: a rule that a process has broken, "" when none.
    """

    def __init__(self, rng: random.Random, faults: list[Fault]) -> None:
        self.rng = rng
        self.faults = sorted(faults, key=lambda fault: fault.point)
        self.points = 0
        self.history: list[str] = []
        self.hits: set[tuple[str, str, str]] = set()
        self.violation = ""
        self.nodes: dict[int, File | Folder] = {1: Folder()}
        self.processes: list[Process] = []
        self.lock = threading.RLock()
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(text)

    def fault_at(self, call: str, path: str, process: Process) -> Fault | None:
        """The fault that hits this call, if one does."""
        self.points += 1
        for fault in self.faults:
            if fault.point > self.points:
                return None
            in_lane = threading.current_thread() is not threading.main_thread()
            if fault.kind == STALL and not (in_lane and call in (*CHANGES, *SYNCS)):
                continue
            if call not in CALLS_HIT.get(fault.kind, (call,)):
                continue
            self.faults.remove(fault)
            if fault.kind == FAILED_SYNC and self.rng.random() < 0.3:
                # Before it can do anything about it, the process is gone.
                self.faults.insert(0, Fault(self.points + 1, KILL))
            name = Path(path).name.lstrip(".").split(".")[0].rstrip("0123456789-")
            self.hits.add((fault.kind, call, f"{Path(path).parent.name[:4]}/{name}"))
            when = "after" if fault.after else "before"
            self.note(f"{fault.kind} {when} {call} {path} of process {process.number}")
            return fault
        return None

    def release(self) -> None:
        """End a stall."""
        self.stalled.clear()
        self.go_on.set()

    def power_off(self) -> None:
        """Every process ends; the disk keeps what it has, and some of what was under way."""
        for process in self.processes:
            process.alive = False
        self.go_on.set()
        for node in self.nodes.values():
            if isinstance(node, Folder):
                self._settle_folder(node)
            else:
                self._settle_file(node)

    def _settle_folder(self, folder: Folder) -> None:
        for name in sorted(folder.dirty):
            if self.rng.random() < 0.5:
                continue
            if name in folder.names:
                folder.durable[name] = folder.names[name]
            else:
                folder.durable.pop(name, None)
        folder.names = dict(folder.durable)
        folder.dirty.clear()
        folder.lost.clear()

    def _settle_file(self, file: File) -> None:
        data = bytearray()
        for chunk in file.chunks:
            kept = len(chunk.data)
            if chunk.state != "durable":
                kept = self.rng.choice((0, self.rng.randrange(kept + 1), kept))
            if kept and chunk.offset + kept > len(data):
                data.extend(bytes(chunk.offset + kept - len(data)))
            data[chunk.offset : chunk.offset + kept] = chunk.data[:kept]
        file.data = data
        file.chunks = [Chunk(0, bytes(data), "durable")]

    def files(self, below: str) -> list[str]:
        """Paths of all files below a folder, without unfinished ones."""
        found: list[str] = []
        try:
            node = self.nodes[self.find(Path(below))]
        except FileNotFoundError:
            return found
        if isinstance(node, File):
            return [below]
        for name in sorted(node.names):
            if not name.startswith("."):
                found += self.files(f"{below}/{name}")
        return found

    def find(self, path: Path) -> int:
        """The node at a path."""
        number = 1
        for part in path.parts[1:]:
            node = self.nodes[number]
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
            if part not in node.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            number = node.names[part]
        return number

    def folder(self, path: Path) -> Folder:
        """The folder at a path."""
        node = self.nodes[self.find(path)]
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        return node

    def file(self, path: Path) -> File:
        """The file at a path."""
        node = self.nodes[self.find(path)]
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, "a folder", str(path))
        return node

    def replace(self, path: str, data: bytes) -> None:
        """Put other bytes into a durable file, as a fault of the disk does."""
        file = self.file(Path(path))
        file.data = bytearray(data)
        file.chunks = [Chunk(0, bytes(data), "durable")]

    def remove(self, path: str) -> None:
        """Remove a file for good."""
        folder = self.folder(Path(path).parent)
        folder.change(Path(path).name, None)
        folder.durable.pop(Path(path).name, None)


class Process:
    """The disk as one process uses it: a :class:`megascale_checkpoint.storage.disk.Disk`."""

    def __init__(self, machine: Machine) -> None:
        self.durable: dict[Path, int] = {}
        self.failed: set[Path] = set()
        self.alive = True
        self.number = len(machine.processes) + 1
        self._machine = machine
        self._open: dict[int, tuple[File, str]] = {}
        self._descriptors = self._temporaries = 0
        self._appending: int | None = None
        machine.processes.append(self)

    def message(self, text: str) -> None:
        """A point between two calls: a message, or an await."""
        self._call("message", text, lambda: None)

    def create_temporary(self, folder: Path, prefix: str) -> tuple[int, str]:
        """See Disk."""

        def effect() -> tuple[int, str]:
            self._temporaries += 1
            name = f"{prefix}{self.number}-{self._temporaries}"
            file, number = File(), self._new_node()
            self._machine.nodes[number] = file
            self._machine.folder(folder).change(name, number)
            return self._descriptor(file, f"{folder}/{name}"), f"{folder}/{name}"

        return self._call("create_temporary", f"{folder}/{prefix}", effect)

    def write(self, descriptor: int, data: memoryview) -> int:
        """See Disk. Writes in parts of random sizes, as a disk that is torn would show."""
        file, path = self._open[descriptor]

        def effect() -> int:
            size = min(len(data), self._machine.rng.choice((100, 700, 5000)))
            file.chunks.append(Chunk(len(file.data), bytes(data[:size])))
            file.data += data[:size]
            return size

        return self._call("write", path, effect)

    def fsync(self, descriptor: int) -> None:
        """See Disk."""
        file, path = self._open[descriptor]
        self._call("fsync", path, lambda: _mark(file, "durable"), lambda: _mark(file, "lost"))

    def close(self, descriptor: int) -> None:
        """See Disk."""
        self._open.pop(descriptor, None)

    def open(self, path: Path) -> int:
        """See Disk."""
        return self._call(
            "open", str(path), lambda: self._descriptor(self._machine.file(path), str(path))
        )

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See Disk."""
        part = self._open[descriptor][0].data[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def link(self, source: str, target: Path) -> None:
        """See Disk."""

        def effect() -> None:
            folder = self._machine.folder(target.parent)
            if target.name in folder.names:
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            folder.change(target.name, self._machine.find(Path(source)))

        self._call("link", str(target), effect)

    def rename(self, source: str, target: Path) -> None:
        """See Disk."""

        def effect() -> None:
            number = self._machine.find(Path(source))
            self._machine.folder(Path(source).parent).change(Path(source).name, None)
            self._machine.folder(target.parent).change(target.name, number)

        self._call("rename", str(target), effect)

    def unlink(self, path: str | Path) -> None:
        """See Disk."""

        def effect() -> None:
            self._machine.find(Path(path))
            self._machine.folder(Path(path).parent).change(Path(path).name, None)

        if self.alive:  # cleaning up after a crash is what nobody does
            self._call("unlink", str(path), effect)

    def mkdir(self, path: Path) -> None:
        """See Disk."""

        def effect() -> None:
            folder = self._machine.folder(path.parent)
            if path.name in folder.names:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            number = self._new_node()
            folder_of_log = path.name == LOG
            self._machine.nodes[number] = Folder(block_names=1 if folder_of_log else BLOCK_NAMES)
            folder.change(path.name, number)

        self._call("mkdir", str(path), effect)

    def rmdir(self, path: Path) -> None:
        """See Disk."""

        def effect() -> None:
            if self._machine.folder(path).names:
                raise OSError(errno.ENOTEMPTY, "not empty", str(path))
            self._machine.folder(path.parent).change(path.name, None)

        self._call("rmdir", str(path), effect)

    def listdir(self, path: Path) -> list[str]:
        """See Disk."""
        return self._call("listdir", str(path), lambda: list(self._machine.folder(path).names))

    def sync_folder(self, path: Path) -> None:
        """See Disk."""

        def effect() -> None:
            folder = self._machine.folder(path)
            for name in folder.dirty:
                if name in folder.names:
                    folder.durable[name] = folder.names[name]
                else:
                    folder.durable.pop(name, None)
            folder.dirty.clear()

        def fail() -> None:
            folder = self._machine.folder(path)
            folder.lost |= folder.dirty
            folder.dirty.clear()

        self._call("sync_folder", str(path), effect, fail)

    def status(self, path: Path) -> Status:
        """See Disk."""

        def effect() -> Status:
            number = self._machine.find(path)
            node = self._machine.nodes[number]
            size = len(node.data) if isinstance(node, File) else 0
            return Status(isinstance(node, Folder), size, number, 1)

        return self._call("status", str(path), effect)

    def _new_node(self) -> int:
        return max(self._machine.nodes) + 1

    def _descriptor(self, file: File, path: str) -> int:
        self._descriptors += 1
        self._open[self._descriptors] = file, path
        return self._descriptors

    def _call(
        self,
        call: str,
        path: str,
        effect: Callable[[], T],
        fail: Callable[[], None] = lambda: None,
    ) -> T:
        machine = self._machine
        with machine.lock:
            self._check_alive()
            self._check_one_writer(call, path)
            fault = machine.fault_at(call, path, self)
            if fault is not None and fault.kind in (FAILED_SYNC, NO_SPACE):
                fail()
                number = errno.EIO if fault.kind == FAILED_SYNC else errno.ENOSPC
                raise OSError(number, os.strerror(number), path)
            if fault is not None and not fault.after:
                self._end(fault)
        if fault is not None and fault.kind == STALL and not fault.after:
            self._stall()
        with machine.lock:
            self._check_alive()
            result = effect()
            if fault is not None and fault.after:
                self._end(fault)
        if fault is not None and fault.kind == STALL and fault.after:
            self._stall()
        if fault is not None and fault.kind == LOST_REPLY:
            raise OSError(errno.EIO, "the reply was lost", path)
        return result

    def _end(self, fault: Fault) -> None:
        if fault.kind == POWER:
            self._machine.power_off()
        if fault.kind == KILL:
            self.alive = False
        if fault.kind in (POWER, KILL):
            raise Crash(fault.kind)

    def _stall(self) -> None:
        self._machine.go_on.clear()
        self._machine.stalled.set()
        self._machine.go_on.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            raise Crash("the process has ended")

    def _check_one_writer(self, call: str, path: str) -> None:
        """A process has one append to a log under way, never two."""
        if "/commits/" not in path or call not in ("create_temporary", "link", "unlink"):
            return
        me = threading.get_ident()
        if self._appending not in (None, me):
            self._machine.violation = f"two appends of process {self.number} at once"
        self._appending = None if call == "unlink" else me


def _mark(file: File, state: str) -> None:
    for chunk in file.chunks:
        if chunk.state == "dirty":
            chunk.state = state
