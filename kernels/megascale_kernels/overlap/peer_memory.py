"""Memory of each rank of a group that all its ranks read and write without the owner's help.

On CUDA it is torch's symmetric memory: peers' buffers are mapped into this process, a copy engine
copies between two of them over NVLink, a barrier is a kernel of one warp, and the front ends of the
streams write and await signals. On a CPU it is one anonymous file that all ranks map, and signals
are empty messages of the group. Nothing remains of either when a process dies. NVLink multicast is
not used and is switched off.

Each user of the memory proves that no rank writes what another still reads: see
Note [Peer-memory barriers] in :mod:`megascale_kernels.overlap.row_transfers`, and Note [Message
slots] in :mod:`megascale_kernels.overlap.peer_messages`.
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

# Note [Equal numbers of openings]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Ranks that open symmetric memory together meet in a store, under a number that torch counts in
# each *process*, for all groups together. Ranks that have opened different numbers of memories (a
# stage between two others has opened one more than a stage at an end) would wait for each other
# under different names. So before an opening the ranks with fewer openings catch up, by openings in
# a group of their own.

_REASONS = (
    "",
    "its ranks are on different hosts",
    "its ranks see the devices under different numbers (CUDA_VISIBLE_DEVICES)",
    "a device cannot access the memory of another (no peer-to-peer path)",
)


_CHANNELS = 64
_SIGNAL_BYTES = 4
_ALIGNMENT_BYTES = 256

# Numbers for the memories of a group, so that each has tags of its own: an earlier memory may have
# ended with signals that were not awaited.
_numbers = itertools.count()
_opened = 0  # the symmetric memories that this process has opened so far


class PeerMemory(Protocol):
    """``size_bytes`` of each of ``size`` ranks; this rank is ``rank``."""

    rank: int
    size: int
    size_bytes: int
    device: torch.device

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        """A contiguous tensor over ``rank``'s memory, beginning at ``offset_bytes``.

        The offset is a multiple of the element's size.

        Raises:
            RuntimeError: it would not fit.
        """
        ...

    def barrier(self) -> None:
        """Make the current stream (on a CPU: the caller) wait for the earlier work of all ranks.

        The work meant is what each rank's stream got before its own call. A barrier also makes
        writes to peers' memory visible to them. All barriers of a rank belong on one stream.
        """
        ...


class SignalledMemory(PeerMemory, Protocol):
    """Memory whose ranks also signal each other, in pairs.

    A channel (0 to 63) of two ranks and a direction holds one signal: a rank gives the next one
    only after the other rank has awaited the one before.
    """

    def signal(self, rank: int, channel: int) -> None:
        """Signal ``rank``, after the current stream's earlier work (on a CPU: the caller's).

        Once ``rank`` has awaited the signal, it sees the results of that work.
        """
        ...

    def await_signal(self, rank: int, channel: int) -> None:
        """Make the current stream (on a CPU: the caller) wait for ``rank``'s signal.

        Raises:
            RuntimeError: on a CPU, ``rank`` has ended or did not signal within the group's timeout.
        """
        ...


def why_unreachable(group: dist.ProcessGroup, device: torch.device) -> str:
    """The reason why the ranks of ``group`` cannot have a :class:`PeerMemory`; "" if they can.

    All ranks get the same reason. A collective; it waits for the device.
    """
    reason = _own_reason(_gather(group, device, (_host_key(), device.index or 0)), device)
    agreed = torch.tensor([reason], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return _REASONS[int(agreed)]


def open_peer_memory(
    group: dist.ProcessGroup, size_bytes: int, device: torch.device, *, timeout_s: float
) -> SignalledMemory:
    """Create the memory: all ranks of ``group`` call it together.

    :func:`why_unreachable` must have found no reason against it.

    Args:
        size_bytes: the memory of each rank.
        timeout_s: on CUDA, the time for which a barrier waits for the last rank before it ends this
            rank's CUDA context. A wait for a signal has no bound there. On a CPU both have the
            group's own timeout.

    Raises:
        RuntimeError, OSError: there is too little memory, or it cannot be shared.
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
        # Without this torch makes a multicast object for each buffer.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._signals = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        whole = self._signals + _CHANNELS * self.size * _SIGNAL_BYTES
        _catch_up(group, device)
        self._own, self._handle = _open(group, whole, device)
        self._own[self._signals :].zero_()
        self._timeout_ms = int(timeout_s * 1000)
        self.barrier()  # all ranks' signals are 0 before the first one is set

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
        """The address, in ``owner``'s memory, of the word that ``sender`` sets as a signal."""
        place = channel * self.size + sender
        return int(self._handle.buffer_ptrs[owner]) + self._signals + place * _SIGNAL_BYTES


def _open(
    group: dist.ProcessGroup, size_bytes: int, device: torch.device
) -> tuple[torch.Tensor, _SymmetricMemory]:
    """Allocate symmetric memory and map that of the others; also returns torch's handle of all."""
    global _opened
    # Not symm_mem.empty: two buffers of its pool may share an allocation.
    own = _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, device)
    handle = symm_mem.rendezvous(own, group)
    _opened += 1
    return own, handle


def _catch_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """See Note [Equal numbers of openings]."""
    behind = max(opened for [opened] in _gather(group, device, (_opened,))) - _opened
    for _ in range(behind):
        # The group is destroyed before the next one is made, since torch names groups by their
        # number.
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _open(alone, 1, device)
        dist.destroy_process_group(alone)


class _SharedFileMemory:
    """One file with the memories of all ranks in order.

    The first rank makes it; the others open it through that process.
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
        self.barrier()  # all ranks have mapped the file, and the descriptor can go
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
        # The message must live until it is received; the one before it has been awaited.
        self._signals[rank, channel] = work

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
    """The index into ``_REASONS`` of what this rank finds.

    ``peers``: (host, device index) of each rank.
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
    """A number that is equal in processes that can open each other's files under /proc.

    They share a kernel and a pid namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
