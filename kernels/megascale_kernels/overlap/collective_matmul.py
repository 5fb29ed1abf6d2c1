"""Matrix products whose sequence-parallel all-gather or reduce-scatter runs under them (MegaScale
section 3.2).

A sequence [S, B, width] is cut over the ranks along S, of which each owns ``S / size`` rows. Copies
between ranks run on a side stream, on CUDA by copy engines, which take no multiprocessor from the
products. A gather *pulls* its peers' rows and a scatter *pushes* into its owners' memory, since in
these directions one barrier an operation is enough.

Memory. Each rank's region holds two slots, which operations use in turn. An operation first
accesses its slot (gather: writes its own; scatter: pushes into its peers'), then has its one
barrier, then accesses it again (gather: pulls from its peers'; scatter: reads its own). No access
of operation n + 2 before its barrier may meet one of operation n, in the same slot, of any rank.
None does:

1. Barriers run on the side stream. Before barrier n + 1 it has done its own copies of operation n
   and, having followed main since, main's accesses of operation n. So when barrier n + 1 opens,
   operation n has ended on *all* ranks.
2. Operation n + 2 accesses slots on the side stream after barrier n + 1, which ran there before;
   and on main after operation n + 1's last mark, for which main waited, and which lies behind
   barrier n + 1.

Operations of one object follow each other on one thread, the same on all ranks. On return the
caller's stream has been made to wait for the transfers, so tensors may be used, changed and freed
as after any other operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megascale_kernels.overlap.peer_memory import PeerMemory
from megascale_kernels.overlap.plan import Step, gather_plan, scatter_plan
from megascale_kernels.overlap.side_stream import SideStream

_SLOTS = 2
_ALIGNMENT_BYTES = 256


def region_bytes(whole_bytes: int) -> int:
    """Peer memory that operations on sequences of up to ``whole_bytes`` [S, B, width] need of each
    rank.
    """
    return _SLOTS * math.ceil(whole_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class OverlappedProducts:
    """The two products over ``memory``, which belongs to this object alone.

    ``chunks``: into how many steps the peers' rows are cut
    (:func:`megascale_kernels.overlap.plan.gather_plan`).
    """

    def __init__(self, memory: PeerMemory, chunks: int) -> None:
        self._memory, self._chunks = memory, chunks
        self._side = SideStream(memory.device)
        self._slot_bytes = memory.size_bytes // _SLOTS // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        self._operations = 0

    def gather_multiply(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of all ranks' rows with this rank's ``factor``.

        Args:
            part: [S / size, B, K], this rank's rows.
            factor: [K, N]; may be a transposed view.

        Returns:
            product: [S, B, N].
            gathered: [S, B, K], all ranks' rows.

        Raises:
            RuntimeError: the slot is too small for ``part``.
        """
        memory, side, part = self._memory, self._side, part.contiguous()
        rows = part.shape[0]
        own, *peers = gather_plan(memory.rank, memory.size, rows, self._chunks)
        offset = self._next_slot(part.nbytes)
        memory.tensor_of(memory.rank, part.shape, part.dtype, offset).copy_(part)
        gathered = part.new_empty((memory.size * rows, *part.shape[1:]))
        product = part.new_empty((*gathered.shape[:-1], factor.shape[1]))
        side.follow_main()
        with side.active():
            memory.barrier()
        # A barrier behind a product that fills every multiprocessor would start all transfers late:
        # it goes first.
        side.hold_main(side.mark())
        _multiply(part, factor, product[own.start : own.stop])
        for step in peers:
            with side.active():
                self._pull(step, gathered, rows, offset)
            side.hold_main(side.mark())
            _multiply(gathered[step.start : step.stop], factor, product[step.start : step.stop])
        with side.active():
            gathered[own.start : own.stop].copy_(part)
        side.hold_main(side.mark())
        return product, gathered

    def multiply_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """This rank's rows of the sum over ranks of their products: in float32, rounded once, in
        one fixed order.

        Args:
            x: [S, B, K].
            factor: [K, N]; may be a transposed view.
            meanwhile: further work for the caller's stream, under which the last rows travel.

        Returns:
            [S / size, B, N].

        Raises:
            RuntimeError: the slot is too small for the whole product.
        """
        memory, side, x = self._memory, self._side, x.contiguous()
        rows = x.shape[0] // memory.size
        *peers, own = scatter_plan(memory.rank, memory.size, rows, self._chunks)
        product = x.new_empty((*x.shape[:-1], factor.shape[1]))
        offset = self._next_slot(product.nbytes)
        # one partial sum of this rank's rows from each rank, in the order of ranks
        shape = (memory.size, rows, *product.shape[1:])
        partials = memory.tensor_of(memory.rank, shape, x.dtype, offset)
        for step in peers:
            _multiply(x[step.start : step.stop], factor, product[step.start : step.stop])
            side.follow_main()
            with side.active():
                self._push(step, product, shape, offset)
        with side.active():
            memory.barrier()
        arrived = side.mark()
        _multiply(x[own.start : own.stop], factor, partials[memory.rank])
        if meanwhile is not None:
            meanwhile()
        side.hold_main(arrived)
        # of two the sum is the same as an addition, which keeps more loads in flight than a
        # reduction
        return torch.add(*partials) if memory.size == 2 else partials.sum(0)

    def _next_slot(self, needed_bytes: int) -> int:
        """The offset of the slot whose turn it is."""
        if needed_bytes > self._slot_bytes:
            raise RuntimeError(
                f"an operation needs {needed_bytes} bytes of peer memory, a slot has {self._slot_bytes}"
            )
        self._operations += 1
        return self._operations % _SLOTS * self._slot_bytes

    def _pull(self, step: Step, gathered: torch.Tensor, rows: int, offset: int) -> None:
        shape = (rows, *gathered.shape[1:])
        for piece in step.pieces:
            first = piece.owner * rows
            source = self._memory.tensor_of(piece.owner, shape, gathered.dtype, offset)
            gathered[piece.start : piece.stop].copy_(
                source[piece.start - first : piece.stop - first]
            )

    def _push(self, step: Step, product: torch.Tensor, shape: Sequence[int], offset: int) -> None:
        for piece in step.pieces:
            first = piece.owner * shape[1]
            slot = self._memory.tensor_of(piece.owner, shape, product.dtype, offset)[
                self._memory.rank
            ]
            slot[piece.start - first : piece.stop - first].copy_(product[piece.start : piece.stop])


def _multiply(rows: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write [R, B, K] x [K, N] into ``out`` [R, B, N]; all contiguous but ``factor``."""
    torch.mm(rows.flatten(0, 1), factor, out=out.flatten(0, 1))
