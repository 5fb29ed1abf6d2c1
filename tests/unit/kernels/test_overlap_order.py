"""Whether streams, events and barriers order all accesses of overlapped matmuls: a race detector.

It uses vector clocks. One thread runs each rank's operations with a side stream that only records;
every tensor operation is recorded with the stream it would run on and the bytes it reads and
writes. Then two accesses of the same bytes, one of them a write, must be ordered by streams, marks
or barriers, as nothing else orders them on a device.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.harness.kept_memory import OwnMemory
from torch.utils._python_dispatch import TorchDispatchMode

from megascale_kernels.gemm import Gemm
from megascale_kernels.overlap import row_transfers
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms, OverlappedFp8Gemms
from megascale_kernels.overlap.row_transfers import region_bytes
from megascale_kernels.quantize import Per, quantize, transpose

MAIN, SIDE = 0, 1
Clock = dict[tuple[int, int], int]  # newest known note of each (rank, stream)


@dataclass(frozen=True)
class _Access:
    rank: int
    stream: int
    start: int
    stop: int
    write: bool
    count: int
    clock: Clock

    def races(self, other: _Access) -> bool:
        """Whether ``self``, noted earlier, meets ``other`` and nothing orders the two."""
        if (self.rank, self.stream) == (other.rank, other.stream) or not (
            self.write or other.write
        ):
            return False
        before = other.clock.get((self.rank, self.stream), 0) >= self.count
        after = self.clock.get((other.rank, other.stream), 0) >= other.count
        return self.start < other.stop and other.start < self.stop and not before and not after


class _Notes(TorchDispatchMode):
    """What one rank did, in the order of its thread; it is also its side stream and peer memory."""

    device = torch.device("cpu")

    def __init__(self, rank: int, regions: list[torch.Tensor]) -> None:
        super().__init__()
        self.rank, self.size, self.size_bytes = rank, len(regions), regions[0].numel()
        self._regions, self._stream, self._marks = regions, MAIN, 0
        self.notes: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        made = [value.alias_info for value in schema.returns]
        # A view accesses nothing.
        if not any(alias is not None and not alias.is_write for alias in made):
            for position, argument in enumerate(schema.arguments):
                value = (
                    args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                )
                if isinstance(value, torch.Tensor):
                    write = argument.alias_info is not None and argument.alias_info.is_write
                    self.notes.append(("access", (self._stream, *self._bytes_of(value), write)))
            if made and made[0] is None and "empty" not in str(function):
                self.notes.append(("access", (self._stream, *self._bytes_of(result), True)))
        return result

    def _bytes_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Addresses (start, stop); memory that is not shared lies apart for each rank.

        Memory that was freed may be allocated again at the same address.
        """
        start = tensor.data_ptr()
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if not any(0 <= start - region.data_ptr() < region.numel() for region in self._regions):
            start += (self.rank + 1) << 52
        return start, start + (last + 1) * tensor.itemsize

    # the side stream

    def follow_main(self) -> None:
        self.notes.append(("follow", None))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._stream = SIDE
        yield
        self._stream = MAIN

    def mark(self) -> int:
        self._marks += 1
        self.notes.append(("mark", self._marks))
        return self._marks

    def hold_main(self, mark: int) -> None:
        self.notes.append(("hold", mark))

    # the memory

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        length = torch.Size(shape).numel() * dtype.itemsize
        return (
            self._regions[rank][offset_bytes : offset_bytes + length].view(dtype).view(tuple(shape))
        )

    def barrier(self) -> None:
        assert self._stream == SIDE, "all barriers on one stream"
        self.notes.append(("barrier", None))


def _races(ranks: list[_Notes]) -> list[tuple[_Access, _Access]]:
    """All pairs of accesses that nothing orders; ranks pass their barriers together, in order."""
    clocks: dict[tuple[int, int], Clock] = {
        (notes.rank, stream): {} for notes in ranks for stream in (MAIN, SIDE)
    }
    accesses: list[_Access] = []
    left = [list(reversed(notes.notes)) for notes in ranks]
    marks: dict[tuple[int, int], Clock] = {}
    while any(left):
        for rank, notes in enumerate(left):
            while notes and (note := notes.pop())[0] != "barrier":
                _replay(rank, note, clocks, marks, accesses)
        known = _join(*(clocks[rank, SIDE] for rank in range(len(ranks))))
        for rank in range(len(ranks)):
            clocks[rank, SIDE] = known
    return [
        (one, other)
        for number, other in enumerate(accesses)
        for one in accesses[:number]
        if one.races(other)
    ]


def _replay(
    rank: int,
    note: tuple[str, Any],
    clocks: dict[tuple[int, int], Clock],
    marks: dict[tuple[int, int], Clock],
    accesses: list[_Access],
) -> None:
    kind, value = note
    if kind == "follow":
        clocks[rank, SIDE] = _join(clocks[rank, SIDE], clocks[rank, MAIN])
    elif kind == "mark":
        marks[rank, value] = clocks[rank, SIDE]
    elif kind == "hold":
        clocks[rank, MAIN] = _join(clocks[rank, MAIN], marks[rank, value])
    else:
        stream, start, stop, write = value
        place = (rank, stream)
        count = clocks[place].get(place, 0) + 1
        clocks[place] = {**clocks[place], place: count}
        accesses.append(_Access(rank, stream, start, stop, write, count, clocks[place]))


def _join(*clocks: Clock) -> Clock:
    return {
        place: max(clock.get(place, 0) for clock in clocks) for clock in clocks for place in clock
    }


def _run(
    size: int, chunks: int, monkeypatch: pytest.MonkeyPatch, notes_type: type[_Notes] = _Notes
) -> list[_Notes]:
    """What each rank notes of the same operations."""
    dice = random.Random(size)
    names = dice.choices(list(_OPERATIONS), k=7)
    names += [name for name in _OPERATIONS for _ in range(2)]  # each after itself, and more
    regions = [torch.zeros(region_bytes(4 * 6 * size * 8), dtype=torch.uint8) for _ in range(size)]
    ranks = []
    for rank in range(size):
        notes = notes_type(rank, regions)
        monkeypatch.setattr(row_transfers, "SideStream", lambda device, side=notes: side)
        with torch.no_grad(), notes:
            products = CollectiveMatmuls(notes, chunks)
            gemms = OverlappedFp8Gemms(products.transfers, Gemm())
            for name in names:
                _OPERATIONS[name](products, gemms, size)
        ranks.append(notes)
    return ranks


def _gather(products: CollectiveMatmuls, gemms: Fp8Gemms, size: int) -> None:
    product, gathered = products.all_gather_matmul(torch.ones(6, 1, 8), torch.ones(8, 8))
    torch.mm(gathered.flatten(0, 1).t(), product.flatten(0, 1))


def _scatter(products: CollectiveMatmuls, gemms: Fp8Gemms, size: int) -> None:
    x = torch.ones(6 * size, 1, 8)
    products.matmul_reduce_scatter(x, torch.ones(8, 8), partial(torch.sum, x)).add_(1.0)


def _fp8_gather(
    products: CollectiveMatmuls, gemms: Fp8Gemms, size: int, per: Per = "tensor"
) -> None:
    weight = quantize(torch.ones(8, 8)).over_columns()
    part = quantize(torch.ones(6, 8), per=per)
    product, gathered = gemms.all_gather_matmul(part, weight, fast=True)
    torch.mm(transpose(gathered).over_rows().data.float(), product.float())


def _fp8_scatter(products: CollectiveMatmuls, gemms: Fp8Gemms, size: int) -> None:
    x, weight = (quantize(torch.ones(rows, 8)).over_columns() for rows in (6 * size, 8))
    meanwhile = partial(torch.sum, x.data.float())
    gemms.matmul_reduce_scatter(x, weight, meanwhile, fast=True).add_(1.0)


def _fp8_largest(products: CollectiveMatmuls, gemms: Fp8Gemms, size: int) -> None:
    gemms.largest(torch.ones(1)).add_(1.0)


def _even(products: CollectiveMatmuls, gemms: Fp8Gemms, size: int) -> None:
    """Between captured sequences."""
    products.transfers.even()


_OPERATIONS: Mapping[str, Callable[[CollectiveMatmuls, Fp8Gemms, int], None]] = {
    "gather": _gather,
    "scatter": _scatter,
    "fp8 gather": _fp8_gather,
    "fp8 gather by rows": partial(_fp8_gather, per="row"),
    "fp8 scatter": _fp8_scatter,
    "fp8 largest": _fp8_largest,
    "even": _even,
}


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        (2, 1),
        (2, 3),
        (3, 1),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_every_conflict_is_ordered(size: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _run(size, chunks, monkeypatch)
    assert len(ranks[0].notes) > 100
    assert _races(ranks) == []


class _WithoutHold(_Notes):
    def hold_main(self, mark: int) -> None:
        pass


class _WithoutFollow(_Notes):
    def follow_main(self) -> None:
        pass


class _WithoutBarrier(_Notes):
    def barrier(self) -> None:
        pass


@pytest.mark.parametrize("broken", [_WithoutHold, _WithoutFollow, _WithoutBarrier])
def test_the_detector_sees_a_missing_order(
    broken: type[_Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _races(_run(2, 1, monkeypatch, broken))


def test_the_detector_sees_a_slot_that_is_used_again_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_transfers, "_SLOTS", 1)
    assert _races(_run(2, 1, monkeypatch))


def test_a_captured_sequence_begins_on_the_slot_that_it_was_captured_on() -> None:
    memory = OwnMemory(2, region_bytes(4 * 12 * 8), torch.device("cpu"))
    products = CollectiveMatmuls(memory, 1)

    def slot() -> int:
        """Where the next operation puts this rank's rows."""
        return products.transfers.own_part((6, 1, 8), torch.float32).data_ptr()

    first = slot()
    products.all_gather_matmul(torch.ones(6, 1, 8), torch.ones(8, 8))
    assert slot() != first
    for _ in range(2):  # a second time it does nothing
        products.transfers.even()
        assert slot() == first
