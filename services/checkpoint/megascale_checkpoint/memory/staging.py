"""Staging memory: slots as plain files in a private folder of tmpfs, allocated and mapped here.

The daemon owns the files, so they survive the death of a trainer. They are plain files and not
multiprocessing.shared_memory, whose resource tracker unlinks segments of other processes on Python
3.11 and 3.12. The tree is ``BASE/CLUSTER/NODE/INCARNATION/JOB/rank-00003/slot-0``. Seal records
live in the daemon's own memory, because a sealed slot is used only while its daemon runs.

A daemon that starts removes the folders whose owner has ended: those of its own node, and those of
any other name, because a daemon of that name may never start again. An owner is a process of one
boot of the host.

The kernel clears a page when it allocates it, which takes up to a second per gigabyte in one
thread. So several threads allocate, and most of a rank's slots only after it has registered.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import iglob
from pathlib import Path
from typing import Any

from megascale_common.node.host import left_bytes as cgroups_left_bytes
from megascale_common.node.host import memory_bytes
from megascale_common.node.process import boot_id, start_ticks
from megascale_common.service.errors import LimitError
from megascale_job.sizes.memory import LEAST_SLOTS

OWNER_FILE = "owner.json"
LOCK_FILE = ".lock"
MAX_MAKE_TRIES = 100  # to make the folder, while other daemons remove its empty parents
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
# Threads that allocate one slot's pages, in parts of POPULATED_BYTES between which they can stop.
POPULATING_THREADS = min(8, max(1, os.cpu_count() or 1))
POPULATED_BYTES, LEAST_BYTES_OF_A_THREAD = 512 << 20, 16 << 20
MADV_REMOVE = 9  # frees the pages of a tmpfs file, and leaves a hole

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


def default_base() -> Path:
    """Staging folder of this user in the host's shared memory."""
    return Path(f"/dev/shm/megascale-{os.getuid()}")


class SlotMemory:
    """One slot's file, mapped; ``view`` is its memory, which has its pages after :meth:`populate`.

    The page after it holds the number of bytes that the copy into the slot has written so far.

    Mapped through the C library and not Python's mmap, which keeps a descriptor of its own and
    cannot be closed while the traceback of a failed write, or a thread in a hung storage, holds a
    view.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.populated = False
        self._closed = False
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.landing_at = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self.file_bytes = self.landing_at + mmap.PAGESIZE
            os.ftruncate(self.descriptor, self.file_bytes)
            self._whole = _mapped(self.descriptor, self.file_bytes)
        except OSError:
            os.close(self.descriptor)
            path.unlink()
            raise
        # Huge pages, if the mount gives them (huge=advise or within_size): mapping and pinning 4
        # KiB pages takes a restarted rank several times as long as the copy.
        _advise(self._whole, mmap.MADV_HUGEPAGE)
        self.view = self._whole[:size_bytes]
        self._landed = self._whole[self.landing_at :].cast("Q")

    def populate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Allocate all pages; end early once ``stopped`` is true. Nothing may write before.

        Raises:
            OSError: there is no room.
        """
        for begin in range(0, self.file_bytes, POPULATED_BYTES):
            if stopped():
                return
            _populate(self._whole[begin : begin + POPULATED_BYTES])
        # Reserve what is still missing: a full tmpfs raises an error here, while a hole in the file
        # would later kill the writer with SIGBUS.
        os.posix_fallocate(self.descriptor, 0, self.file_bytes)
        self.populated = True

    @property
    def landed_bytes(self) -> int:
        """Bytes of the slot, from its start, that the writer claims to have written."""
        return self._landed[0]

    @landed_bytes.setter
    def landed_bytes(self, count: int) -> None:
        self._landed[0] = count

    def close(self) -> None:
        """Remove the file and free its pages and descriptor at once, even if it is still mapped.

        Later reads through a remaining map find zeros; its addresses are unmapped with the last
        view. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self.path.unlink(missing_ok=True)
        _advise(self._whole, MADV_REMOVE)
        os.close(self.descriptor)
        for view in (self._landed, self.view, self._whole):
            with suppress(BufferError):  # a thread is in a system call with it
                view.release()


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    """A file's memory, shared with other processes; unmapped when its last view is gone.

    Raises:
        OSError: it cannot be mapped.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = _libc.mmap(None, size_bytes, protection, flags, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Not at interpreter exit, where a thread may still read it.
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return memoryview(memory).cast("B")


class StagingFolder:
    """The daemon's own folder.

    Raises:
        LimitError: the folder belongs to another user, a running daemon uses it, or it cannot be
            created.
    """

    def __init__(
        self, base: Path, cluster: str, node: str, incarnation: str, limit_bytes: int | None = None
    ) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._reserving = threading.Lock()
        self._base = base
        self._node_folder = base / cluster / node
        self.path = self._node_folder / incarnation
        try:
            self._make()
            self._remove_other_names()
        except FileExistsError as error:
            raise LimitError(
                f"another checkpoint daemon uses {error.filename}: stop it first"
            ) from error
        except OSError as error:
            raise LimitError(
                f"staging folder {base} cannot be used ({error}): give another --staging-folder"
            ) from error

    def affordable_slots(
        self, size_bytes: int, wanted: int, ranks: int, replica_bytes: int = 0
    ) -> int:
        """Number of slots, up to ``wanted``, for each rank if all ranks of the host get as many.

        At least LEAST_SLOTS. This node has ``ranks`` ranks, and for each of them it also keeps
        ``replica_bytes`` of another node's rank. Every other daemon of this user on the host is
        assumed to need as much.
        """
        daemons, staged_bytes = self._host()
        share = (self._system_bytes() + staged_bytes) // (daemons * ranks)
        if self._limit_bytes is not None:
            share = min(share, self._limit_bytes // ranks)
        affordable = max(0, share - replica_bytes) // max(size_bytes, mmap.PAGESIZE)
        return max(LEAST_SLOTS, min(wanted, affordable))

    def allocate(
        self, job: str, rank: int, size_bytes: int, count: int, populated_bytes: int | None = None
    ) -> list[SlotMemory]:
        """Allocate ``count`` slots for a rank.

        With ``populated_bytes``, only that many bytes, and at least the first slot, have their
        pages on return; the caller populates the others.

        Raises:
            LimitError: there is no room; the message gives the fix.
        """
        size_bytes = max(size_bytes, mmap.PAGESIZE)
        # Reserved before the slow allocation: ranks register at the same time, each in its own
        # thread, and together they could pass the limit.
        with self._reserving:
            if count * size_bytes > self.room_bytes():
                raise LimitError(self._no_room(job, rank, count * size_bytes))
            self.used_bytes += count * size_bytes
        folder = self.path / job / f"rank-{rank:05d}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        slots: list[SlotMemory] = []
        try:
            for index in range(count):
                slots.append(SlotMemory(folder / f"slot-{index}", size_bytes))
            for slot in slots[: _at_once(size_bytes, populated_bytes)]:
                slot.populate()
        except OSError as error:
            self._unreserve(count * size_bytes)
            for slot in slots:
                slot.close()
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise LimitError(self._no_room(job, rank, count * size_bytes)) from error
            raise LimitError(
                f"slots for rank {rank} of {job} cannot be created in {folder}: {error}"
            ) from error
        return slots

    def populate(self, slot: SlotMemory, stopped: Callable[[], bool] = lambda: False) -> None:
        """Allocate a slot's pages (:meth:`SlotMemory.populate`); LimitError if there is no room."""
        try:
            slot.populate(stopped)
        except OSError as error:
            raise LimitError(f"slot {slot.path} cannot be allocated: {error}") from error

    def renew(self, slot: SlotMemory) -> SlotMemory:
        """New memory, not yet populated, for a slot that a process which should be dead still maps.

        Raises:
            LimitError: there is no room. The slot is closed then; the caller still frees it.
        """
        # close() unlinks the file; the new one has the same name but another inode, so the old
        # process keeps writing to memory that no other process maps.
        slot.close()
        try:
            return SlotMemory(slot.path, slot.size_bytes)
        except OSError as error:
            raise LimitError(f"slot {slot.path} cannot be allocated again: {error}") from error

    def free(self, slots: list[SlotMemory]) -> None:
        """Close slots and return their memory to the budget."""
        for slot in slots:
            self._unreserve(slot.size_bytes)
            slot.close()

    def room_bytes(self) -> int:
        """Bytes that may still be allocated within the limit, the file system, host memory
        and the memory cgroups of this process."""
        room = self._system_bytes()
        return room if self._limit_bytes is None else min(room, self._limit_bytes - self.used_bytes)

    def _system_bytes(self) -> int:
        """Bytes that the system has left, less what existing slots have still to allocate."""
        system = os.statvfs(self.path)
        left = min(
            system.f_bavail * system.f_frsize, memory_bytes("MemAvailable"), cgroups_left_bytes()
        )
        promised = (max(0, file_bytes - held) for file_bytes, held in self._slot_files())
        return left - sum(promised)

    def _host(self) -> tuple[int, int]:
        """Number of this user's running daemons on the host, and the bytes of all their slots."""
        owners = _found(self._base, f"*/*/*/{OWNER_FILE}")
        daemons = sum(_owner_lives(file.parent) for file in owners)
        return max(1, daemons), sum(file_bytes for file_bytes, _ in self._slot_files())

    def _slot_files(self) -> Iterator[tuple[int, int]]:
        """The size of each slot's file on the host, and its allocated bytes."""
        for slot in _found(self._base, "*/*/*/**/slot-*"):
            with suppress(FileNotFoundError):  # another daemon may be freeing it
                found = slot.stat()
                yield found.st_size, found.st_blocks * 512

    def remove(self) -> None:
        """Remove the folder, and its parents if they are empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError), _locked(self._node_folder):
            _remove_empty(self._node_folder)

    def _unreserve(self, size_bytes: int) -> None:
        with self._reserving:
            self.used_bytes -= size_bytes

    def _make(self) -> None:
        """Make the folder; raise FileExistsError if a running daemon has it."""
        for tries_left in reversed(range(MAX_MAKE_TRIES)):
            try:
                _private_folder(self._base)
                self._node_folder.parent.mkdir(mode=0o700, exist_ok=True)
                self._node_folder.mkdir(mode=0o700, exist_ok=True)
                with _locked(self._node_folder, create=True):
                    self._remove_stale()
                    self.path.mkdir(mode=0o700)
                    (self.path / OWNER_FILE).write_text(json.dumps(_identity(os.getpid())))
                return
            except (FileNotFoundError, FileExistsError) as error:
                # Another daemon that ends or starts has removed a parent while it was empty.
                if not tries_left or error.filename == str(self.path):
                    raise

    def _remove_stale(self) -> None:
        # Folder and owner file are made under one lock, so a folder without an owner file belongs
        # to a daemon that died in between.
        for folder in self._node_folder.iterdir():
            if folder.is_dir() and not _owner_lives(folder):
                shutil.rmtree(folder)

    def _remove_other_names(self) -> None:
        """Remove folders left by this user's dead daemons of other nodes and clusters."""
        for node_folder in _found(self._base, "*/*"):
            if node_folder == self._node_folder or not node_folder.is_dir():
                continue
            # If a daemon of that name is starting, it holds the lock and removes them itself.
            with suppress(OSError), _locked(node_folder, wait=False):
                for folder in node_folder.iterdir():
                    if folder.is_dir() and not _owner_lives(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                _remove_empty(node_folder)

    def _no_room(self, job: str, rank: int, wanted_bytes: int) -> str:
        return (
            f"no room for the snapshot slots of rank {rank} of {job}: {wanted_bytes} bytes needed, "
            f"{max(self.room_bytes(), 0)} left in {self.path} ({self.used_bytes} used). "
            "Raise the size of the tmpfs (containers start with 64 MiB of /dev/shm), the memory "
            "limit of the daemon's cgroup or "
            f"--staging-limit-bytes, or set checkpoint.slots to {LEAST_SLOTS}"
        )


def _found(base: Path, pattern: str) -> Iterator[Path]:
    """The paths below ``base`` that match; folders that are removed meanwhile are skipped.

    Not :meth:`Path.glob`, which on Python 3.11 and 3.12 raises FileNotFoundError if another daemon
    removes a folder that it is about to read.
    """
    return map(base.joinpath, iglob(pattern, root_dir=base, recursive=True))


def _at_once(size_bytes: int, populated_bytes: int | None) -> int | None:
    """Number of slots to populate during the allocation; None: all."""
    return None if populated_bytes is None else max(1, populated_bytes // size_bytes)


def _populate(view: memoryview) -> None:
    """Allocate all pages of ``view``, in several threads. No effect on a kernel before 5.14."""
    size = max(LEAST_BYTES_OF_A_THREAD, -(-len(view) // POPULATING_THREADS))
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    starts = range(0, len(view), size)
    if len(starts) == 1:
        _advise(view, MADV_POPULATE_WRITE)
        return
    with ThreadPoolExecutor(len(starts), "populate") as pool:
        parts = [view[start : start + size] for start in starts]
        list(pool.map(_advise, parts, [MADV_POPULATE_WRITE] * len(parts)))


def _advise(view: memoryview, advice: int) -> None:
    # Through ctypes, which releases the interpreter lock; mmap with MAP_POPULATE would hold it for
    # seconds.
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    _libc.madvise(address, len(view), advice)


def _private_folder(base: Path) -> None:
    """Make sure that only this user can enter ``base``; /dev/shm is open to all users of a host."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    # lstat, so that a symbolic link of another user is not followed.
    found = base.lstat()
    if base.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LimitError(
            f"staging folder {base} is not a folder of mode 0700 of user {os.getuid()}: remove it"
        )


def _remove_empty(node_folder: Path) -> None:
    """Remove a node's folder, whose lock is held, and its parents, unless a daemon uses them.

    Raises:
        OSError: one of the parents is in use.
    """
    if any(entry.is_dir() for entry in node_folder.iterdir()):
        return
    (node_folder / LOCK_FILE).unlink()
    for folder in (node_folder, node_folder.parent, node_folder.parent.parent):
        folder.rmdir()


@contextmanager
def _locked(folder: Path, *, wait: bool = True, create: bool = False) -> Iterator[None]:
    """Hold the lock of a node's folder.

    Raises:
        FileNotFoundError: the folder is gone, or has no lock and ``create`` is off.
        BlockingIOError: another process holds it, and ``wait`` is off.
    """
    # flock, because the kernel releases it when its holder dies; a file's existence would stay.
    path = folder / LOCK_FILE
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The previous holder may have removed the file with its folder: a lock on the unlinked
            # inode excludes no one, so open the path again.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                yield
                return
        finally:
            os.close(descriptor)


def _owner_lives(folder: Path) -> bool:
    try:
        owner = json.loads((folder / OWNER_FILE).read_text())
        return bool(owner == _identity(owner["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _identity(pid: int) -> dict[str, Any]:
    """Identity of a running process, distinct from any later process with the same pid.

    Raises:
        OSError: the process has ended.
    """
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"process {pid} is dead")
    return {"pid": pid, "boot_id": boot_id(), "start_ticks": str(ticks)}
