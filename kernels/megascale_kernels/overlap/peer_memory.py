"""Memory of each rank of a group that all its ranks read and write without the owner's help.

On CUDA it is torch's symmetric memory: peers' buffers are mapped into this process, a copy between
two of them is done by a copy engine over NVLink, a barrier is a kernel of one warp, and signals are
written and awaited by the streams' front ends. On a CPU it is one anonymous file that all ranks
map, and signals are empty messages of the group. Neither leaves anything behind when a process
dies. NVLink multicast is not used and is switched off.

Note [Equal numbers of openings]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that open symmetric memory together meet in a store, under a number that torch counts in each
*process*, whatever the group. Ranks that have opened different numbers of memories (a stage between
two others has one more than a stage at an end) would wait for each other under different names. So
before an opening those behind catch up, by openings in a group of their own.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from megascale_kernels.overlap.stream_signals import await_word, set_word

_REASONS = (
    "",
    "its ranks are on different hosts",
    "its ranks see the devices under different numbers (CUDA_VISIBLE_DEVICES)",
    "a device cannot access the memory of another (no peer-to-peer path)",
)


_CHANNELS = 64
_SIGNAL_BYTES = 4
_ALIGNMENT_BYTES = 256

# Memories over one group, of which the last may be gone with signals that nobody awaited.
_numbers = itertools.count()
_opened = 0  # symmetric memories of this process, from the first on


class PeerMemory(Protocol):
    """``size_bytes`` of each of ``size`` ranks, of which this one is ``rank``."""

    rank: int
    size: int
    size_bytes: int
    device: torch.device

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        """A contiguous tensor over ``rank``'s memory from ``offset_bytes`` (a multiple of the
        element's size) on.

        Raises:
            RuntimeError: it would not fit.
        """
        ...

    def barrier(self) -> None:
        """What the current stream (on a CPU: the caller) does next waits for what all ranks' did
        before.

        It also makes writes to peers' memory visible to them. All of a rank's barriers belong on
        one stream.
        """
        ...


class SignalledMemory(PeerMemory, Protocol):
    """Memory whose ranks also signal each other, in pairs.

    A channel (0 to 63) of two ranks and a direction holds one signal: the next is given only after
    the other rank has awaited the one before.
    """

    def signal(self, rank: int, channel: int) -> None:
        """``rank``, once it has awaited this, sees what the current stream (on a CPU: the caller)
        did before.
        """
        ...

    def await_signal(self, rank: int, channel: int) -> None:
        """What the current stream (on a CPU: the caller) does next waits for ``rank``'s signal.

        Raises:
            RuntimeError: on a CPU, ``rank`` has ended or did not signal within the group's timeout.
        """
        ...


def why_unreachable(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks of ``group`` cannot have a :class:`PeerMemory`, or "" where they can; the same
    on all ranks.

    Collective; waits for the device.
    """
    reason = _own_reason(_gather(group, device, (_host_key(), device.index or 0)), device)
    agreed = torch.tensor([reason], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return _REASONS[int(agreed)]


def open_peer_memory(
    group: dist.ProcessGroup, size_bytes: int, device: torch.device, *, timeout_s: float
) -> SignalledMemory:
    """Create the memory; all ranks of ``group``, which :func:`why_unreachable` let pass, call it
    together.

    Args:
        size_bytes: of each rank.
        timeout_s: on CUDA, how long a barrier waits for the last rank before it ends this rank's
            CUDA context. A wait for a signal has no bound there. On a CPU both have the group's own
            timeout.

    Raises:
        RuntimeError, OSError: there is not so much memory, or it cannot be shared.
    """
    if device.type == "cuda":
        return _CudaPeerMemory(group, size_bytes, device, timeout_s)
    return _SharedFileMemory(group, size_bytes)


class _CudaPeerMemory:
    def __init__(
        self, group: dist.ProcessGroup, size_bytes: int, device: torch.device, timeout_s: float
    ) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.size_bytes = size_bytes
        self.device = device
        # torch would otherwise make a multicast object for every buffer
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._signals = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        whole = self._signals + _CHANNELS * self.size * _SIGNAL_BYTES
        _catch_up(group, device)
        self._own, self._handle = _open(group, whole, device)
        self._own[self._signals :].zero_()
        self._timeout_ms = int(timeout_s * 1000)
        self.barrier()  # all ranks' signals are 0 before the first is set

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        _length_within(self.size_bytes, shape, dtype, offset_bytes)
        return self._handle.get_buffer(rank, tuple(shape), dtype, offset_bytes // dtype.itemsize)

    def barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)

    def signal(self, rank: int, channel: int) -> None:
        set_word(self._word(rank, self.rank, channel), torch.cuda.current_stream(self.device))

    def await_signal(self, rank: int, channel: int) -> None:
        await_word(self._word(self.rank, rank, channel), torch.cuda.current_stream(self.device))

    def _word(self, owner: int, sender: int, channel: int) -> int:
        """The address, in ``owner``'s memory, of what ``sender`` sets to signal."""
        place = channel * self.size + sender
        return int(self._handle.buffer_ptrs[owner]) + self._signals + place * _SIGNAL_BYTES


def _open(
    group: dist.ProcessGroup, size_bytes: int, device: torch.device
) -> tuple[torch.Tensor, _SymmetricMemory]:
    """Allocate symmetric memory and map that of the others; returns also torch's handle of all."""
    global _opened
    # Not symm_mem.empty: from its pool two buffers may share an allocation.
    own = _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)
    handle = symm_mem.rendezvous(own, group)
    _opened += 1
    return own, handle


def _catch_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """See Note [Equal numbers of openings]."""
    behind = max(opened for [opened] in _gather(group, device, (_opened,))) - _opened
    for _ in range(behind):
        # It is gone again before the next group is made: groups are named by their number.
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _open(alone, 1, device)
        dist.destroy_process_group(alone)


class _SharedFileMemory:
    """One file with the memories of all ranks in order, made by the first rank and opened by the
    others through it.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, size_bytes: int) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.size_bytes = size_bytes
        self._group = group
        self._signal = torch.zeros(1, dtype=torch.uint8)
        self._signals: dict[tuple[int, int], dist.Work] = {}
        descriptor = -1
        if self.rank == 0:
            descriptor = os.memfd_create("megascale-peer-memory", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, size_bytes * self.size)
        where = torch.tensor([os.getpid(), descriptor, next(_numbers) * _CHANNELS])
        dist.broadcast(where, group=group, group_src=0)
        owner, opened, self._first_tag = where.tolist()
        self._all = torch.from_file(
            f"/proc/{owner}/fd/{opened}",
            shared=True,
            size=size_bytes * self.size,
            dtype=torch.uint8,
        )
        self.barrier()  # all have mapped it
        if self.rank == 0:
            os.close(descriptor)

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        length = _length_within(self.size_bytes, shape, dtype, offset_bytes)
        start = rank * self.size_bytes + offset_bytes
        return self._all[start : start + length].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        dist.barrier(self._group)

    def signal(self, rank: int, channel: int) -> None:
        tag = self._first_tag + channel
        work = dist.isend(self._signal, group=self._group, group_dst=rank, tag=tag)
        assert work is not None
        self._signals[rank, channel] = work  # the one before was awaited

    def await_signal(self, rank: int, channel: int) -> None:
        found = torch.empty_like(self._signal)
        tag = self._first_tag + channel
        dist.recv(found, group=self._group, group_src=rank, tag=tag)


def _length_within(
    size_bytes: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int
) -> int:
    """Bytes of a tensor at ``offset_bytes`` of memory of ``size_bytes``.

    Raises:
        RuntimeError: it would not fit.
    """
    length = math.prod(shape) * dtype.itemsize
    if offset_bytes + length > size_bytes:
        raise RuntimeError(f"{length} bytes from {offset_bytes} on do not fit into {size_bytes}")
    return length


def _own_reason(peers: list[list[int]], device: torch.device) -> int:
    """Index into ``_REASONS`` of what this rank sees; ``peers`` holds (host, device index) of each
    rank.
    """
    hosts, indices = zip(*peers, strict=True)
    if len(set(hosts)) > 1:
        return 1
    if device.type == "cpu":
        return 0
    if len(set(indices)) < len(indices):
        return 2
    others = [index for index in indices if index != device.index]
    return 0 if all(torch.cuda.can_device_access_peer(device, other) for other in others) else 3


def _gather(
    group: dist.ProcessGroup, device: torch.device, values: tuple[int, ...]
) -> list[list[int]]:
    own = torch.tensor(values, device=device)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return [row.tolist() for row in found]


def _host_key() -> int:
    """A number that processes share which can open each other's files under /proc: one kernel, one
    pid namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
