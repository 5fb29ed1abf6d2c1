"""Transfers of rows that are gathered for a GEMM, or summed after one, while the GEMM runs.

This is MegaScale section 3.2. A sequence is divided over the ranks along its first dimension: each
rank owns ``rows / size`` rows. Copies between ranks run on a side stream, on CUDA by copy engines,
which take no multiprocessor from the GEMMs. A gather *pulls* its peers' rows and a scatter *pushes*
into its owners' memory, since in these directions one barrier per operation is enough: see
Note [Peer-memory barriers].

One thread calls the operations of an object one after another, in the same order on all ranks. On
return the caller's stream has been made to wait for the transfers, so tensors can be used, changed
and freed as after any other operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megascale_kernels.overlap.peer_memory import PeerMemory
from megascale_kernels.overlap.plan import Step, gather_plan, scatter_plan
from megascale_kernels.overlap.side_stream import SideStream
from megascale_kernels.partial_sums import SumOfParts, sum_of_parts

# Note [Peer-memory barriers]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Each rank's region holds two slots, which operations use in turn. An operation has three parts:
#
#   first access    gather: writes its own slot; scatter, largest: push into their peers' slots
#   one barrier     of all ranks
#   second access   gather: pulls from its peers' slots; scatter, largest: read their own slot
#
# The barrier orders the two accesses of one operation. Nothing else orders the ranks, so it must
# also be enough for the next operation that uses the same slot: no rank may begin the first access
# of operation n + 2 while any rank is still in operation n. None does:
#
# 1. Barriers run on the side stream. Before barrier n + 1 this stream has done its own copies of
# operation n and, because it has followed main since, main's accesses of operation n too. So when
#    barrier n + 1 opens, operation n has ended on *all* ranks.
# 2. Operation n + 2 accesses slots on the side stream after barrier n + 1, which ran there before
#    it. On main it accesses them after the last mark of operation n + 1, for which main has waited,
#    and which is after barrier n + 1.
#
# With one slot, operation n + 1 would need a second barrier before its first access.
#
# A graph repeats the slots that its operations had when they were captured. So a captured sequence
# begins and ends on an even number of operations (RowTransfers.even).

_SLOTS = 2
_ALIGNMENT_BYTES = 256

# Arguments: rows start:stop of each gathered tensor, start, stop.
Consume = Callable[[Sequence[torch.Tensor], int, int], None]
# Arguments: start, stop, the memory for rows start:stop of the whole.
Produce = Callable[[int, int, torch.Tensor], None]


def region_bytes(whole_bytes: int) -> int:
    """The peer memory that each rank needs for sequences [S, B, width] of up to ``whole_bytes``."""
    return _SLOTS * _aligned(whole_bytes)


class RowTransfers:
    """Gathers and scatters over ``memory``, which belongs to this object alone.

    ``chunks``: the number of steps for the peers' rows
    (:func:`megascale_kernels.overlap.plan.gather_plan`). ``total`` adds the ranks' partial sums.
    """

    def __init__(self, memory: PeerMemory, chunks: int, total: SumOfParts = sum_of_parts) -> None:
        self.size = memory.size
        self._memory = memory
        self._chunks = chunks
        self._total = total
        self._side = SideStream(memory.device)
        self._slot_bytes = memory.size_bytes // _SLOTS // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        self._operations = 0

    def own_part(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's rows of the next operation, a gather, which then copies nothing.

        The caller writes it on its own stream, and there must be no other operation before that
        gather. The memory is that of the first tensor that is gathered.
        """
        return self._memory.tensor_of(self._memory.rank, shape, dtype, self._slot(1))

    def gather(self, part: Sequence[torch.Tensor], consume: Consume) -> tuple[torch.Tensor, ...]:
        """All ranks' rows of several tensors, handed to ``consume`` step by step as they arrive.

        Args:
            part: this rank's rows, [rows / size, ...] each.
            consume: work of the caller's stream on the rows of one step; steps cover each row once.

        Returns:
            [rows, ...] for each tensor of ``part``.

        Raises:
            RuntimeError: the slot is too small for ``part``.
        """
        memory, side, part = self._memory, self._side, [one.contiguous() for one in part]
        rows = part[0].shape[0]
        own, *peers = gather_plan(memory.rank, memory.size, rows, self._chunks)
        offsets = self._next_slot([one.nbytes for one in part])
        for one, offset in zip(part, offsets, strict=True):
            own_rows = memory.tensor_of(memory.rank, one.shape, one.dtype, offset)
            if own_rows.data_ptr() != one.data_ptr():  # equal: the caller has written them there
                own_rows.copy_(one)
        gathered = tuple(one.new_empty((memory.size * rows, *one.shape[1:])) for one in part)
        side.follow_main()
        # All work of the side stream is launched first, since each change of streams costs the host
        # time. Marks note the points for which main waits.
        arrived = []
        with side.active():
            memory.barrier()
            # If main launched its GEMM first, that would fill every multiprocessor, and the
            # barrier's kernel and all transfers would start late. So main waits for the barrier
            # first.
            open_to_all = side.mark()
            for step in peers:
                for whole, offset in zip(gathered, offsets, strict=True):
                    self._pull(step, whole, rows, offset)
                arrived.append(side.mark())
            for whole, one in zip(gathered, part, strict=True):
                whole[own.start : own.stop].copy_(one)
            complete = side.mark()
        side.hold_main(open_to_all)
        consume(part, own.start, own.stop)
        for step, mark in zip(peers, arrived, strict=True):
            side.hold_main(mark)
            consume([whole[step.start : step.stop] for whole in gathered], step.start, step.stop)
        side.hold_main(complete)
        return gathered

    def scatter(
        self,
        whole: torch.Tensor,
        produce: Produce,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """This rank's rows of the sum over ranks: added in float32 in a fixed order, rounded once.

        Args:
            whole: [rows, ...], memory for this rank's partial sums that travel.
            produce: work of the caller's stream that writes the partial sums of one step.
            meanwhile: further work for the caller's stream, under which the last rows travel.

        Returns:
            [rows / size, ...].

        Raises:
            RuntimeError: the slot is too small for ``whole``.
        """
        memory, side = self._memory, self._side
        rows = whole.shape[0] // memory.size
        *peers, own = scatter_plan(memory.rank, memory.size, rows, self._chunks)
        [offset] = self._next_slot([whole.nbytes])
        # One partial sum of this rank's rows from each rank, in the order of ranks: the sum has the
        # same order whichever rank's rows arrive first.
        shape = (memory.size, rows, *whole.shape[1:])
        partials = memory.tensor_of(memory.rank, shape, whole.dtype, offset)
        for step in peers:
            produce(step.start, step.stop, whole[step.start : step.stop])
            side.follow_main()
            with side.active():
                self._push(step, whole, shape, offset)
                if step is peers[-1]:
                    memory.barrier()
                    arrived = side.mark()
        produce(own.start, own.stop, partials[memory.rank])
        if meanwhile is not None:
            meanwhile()
        side.hold_main(arrived)
        return self._total(partials)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """The largest of each rank's ``value`` (float32 [1]), the same on all; NaN spreads.

        No computation hides it: the caller's stream waits for the last rank.
        """
        memory, side = self._memory, self._side
        [offset] = self._next_slot([memory.size * value.nbytes])
        for peer in range(memory.size):
            into = memory.tensor_of(peer, (memory.size,), value.dtype, offset)
            into[memory.rank : memory.rank + 1].copy_(value)
        side.follow_main()
        with side.active():
            memory.barrier()
        side.hold_main(side.mark())
        return memory.tensor_of(memory.rank, (memory.size,), value.dtype, offset).amax(0, True)

    def even(self) -> None:
        """Make the next operation take the first slot, as the one after a captured sequence does.

        Called before and after a sequence that a graph repeats, on all ranks together.
        """
        if self._operations % _SLOTS:
            self._next_slot([0])
            self._side.follow_main()
            with self._side.active():
                self._memory.barrier()
            self._side.hold_main(self._side.mark())

    def rows_at_once(self, rows: int) -> Sequence[int]:
        """The different lengths of the steps of a gather and of a scatter of ``rows`` rows."""
        memory = self._memory
        place = (memory.rank, memory.size, rows // memory.size, self._chunks)
        steps = (*gather_plan(*place), *scatter_plan(*place))
        return sorted({step.stop - step.start for step in steps})

    def _next_slot(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Offsets for tensors of these sizes, one after another in the slot that is next."""
        starts = [0]
        for size_bytes in sizes_bytes:
            starts.append(starts[-1] + _aligned(size_bytes))
        needed_bytes = starts[-2] + sizes_bytes[-1]
        if needed_bytes > self._slot_bytes:
            raise RuntimeError(
                f"an operation needs {needed_bytes} bytes of peer memory, "
                f"a slot has {self._slot_bytes}"
            )
        self._operations += 1
        return [self._slot(0) + start for start in starts[:-1]]

    def _slot(self, ahead: int) -> int:
        """The offset of the slot of the operation that is ``ahead`` of the current one."""
        return (self._operations + ahead) % _SLOTS * self._slot_bytes

    def _pull(self, step: Step, gathered: torch.Tensor, rows: int, offset: int) -> None:
        shape = (rows, *gathered.shape[1:])
        for piece in step.pieces:
            first = piece.owner * rows
            source = self._memory.tensor_of(piece.owner, shape, gathered.dtype, offset)
            gathered[piece.start : piece.stop].copy_(
                source[piece.start - first : piece.stop - first]
            )

    def _push(self, step: Step, whole: torch.Tensor, shape: Sequence[int], offset: int) -> None:
        for piece in step.pieces:
            first = piece.owner * shape[1]
            slot = self._memory.tensor_of(piece.owner, shape, whole.dtype, offset)[
                self._memory.rank
            ]
            slot[piece.start - first : piece.stop - first].copy_(whole[piece.start : piece.stop])


def _aligned(size_bytes: int) -> int:
    return math.ceil(size_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
