"""The plans of overlapped matmuls: every row once, own rows first or last, each with its owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_kernels.overlap.plan import Piece, Step, gather_plan, scatter_plan

SIZES = st.integers(1, 9)
ROWS = st.integers(1, 40)
CHUNKS = st.integers(1, 50)


@given(st.data(), SIZES, ROWS, CHUNKS)
def test_every_row_is_multiplied_once_and_travels_once(
    data: st.DataObject, size: int, rows: int, chunks: int
) -> None:
    index = data.draw(st.integers(0, size - 1))
    for plan in (gather_plan(index, size, rows, chunks), scatter_plan(index, size, rows, chunks)):
        covered = [row for step in plan for row in range(step.start, step.stop)]
        assert sorted(covered) == list(range(size * rows))
        for step in plan:
            pieces = [row for piece in step.pieces for row in range(piece.start, piece.stop)]
            assert pieces == list(range(step.start, step.stop))
            assert all(
                row // rows == piece.owner
                for piece in step.pieces
                for row in range(piece.start, piece.stop)
            )


@given(st.data(), SIZES, ROWS, CHUNKS)
def test_own_rows_come_first_or_last_and_peers_in_cyclic_order(
    data: st.DataObject, size: int, rows: int, chunks: int
) -> None:
    index = data.draw(st.integers(0, size - 1))
    first, *gathered = gather_plan(index, size, rows, chunks)
    *scattered, last = scatter_plan(index, size, rows, chunks)
    assert first == last and (last.start, last.stop) == (index * rows, (index + 1) * rows)
    whole = size * rows
    for peers in (gathered, scattered):
        travelled = [row for step in peers for row in range(step.start, step.stop)]
        assert travelled == [row % whole for row in range(last.stop, last.stop + whole - rows)]


@given(st.integers(2, 9), ROWS, CHUNKS)
def test_the_step_next_to_the_own_one_is_the_shortest(size: int, rows: int, chunks: int) -> None:
    """What arrives first hides under the own step alone, and so does what leaves last."""
    # Without a leap from the last row to the first: the last rank's peers are all behind it.
    lengths = [step.stop - step.start for step in gather_plan(size - 1, size, rows, chunks)[1:]]
    assert lengths[0] == min(lengths)
    reversed_lengths = [
        step.stop - step.start for step in scatter_plan(size - 1, size, rows, chunks)[:-1]
    ]
    assert reversed_lengths == lengths[::-1]


def test_seven_peers_in_three_steps() -> None:
    gathered, scattered = gather_plan(7, 8, 10, 3)[1:], scatter_plan(7, 8, 10, 3)[:-1]
    assert [step.stop - step.start for step in gathered] == [20, 20, 30]
    assert [step.stop - step.start for step in scattered] == [30, 20, 20]


@given(st.data(), st.integers(2, 9), ROWS, CHUNKS)
def test_as_many_steps_of_like_size_as_asked_for(
    data: st.DataObject, size: int, rows: int, chunks: int
) -> None:
    index = data.draw(st.integers(0, size - 1))
    wanted = min(chunks, (size - 1) * rows)
    for steps in (
        gather_plan(index, size, rows, chunks)[1:],
        scatter_plan(index, size, rows, chunks)[:-1],
    ):
        leaps = sum(step.start == 0 for step in steps[1:])
        assert wanted <= len(steps) <= wanted + leaps
        if not leaps:
            lengths = [step.stop - step.start for step in steps]
            most = rows + 1 if chunks < size - 1 else 2 * unit(lengths)
            assert max(lengths) - min(lengths) < most


def unit(lengths: list[int]) -> int:
    """At multiples of what chunks with these lengths are cut."""
    return next(unit for unit in (128, 16, 1) if unit * len(lengths) <= sum(lengths))


@given(st.data(), st.integers(2, 9), st.integers(1, 64), CHUNKS)
def test_parts_of_many_rows_are_cut_at_multiples(
    data: st.DataObject, size: int, rows: int, chunks: int
) -> None:
    index, rows = data.draw(st.integers(0, size - 1)), 16 * rows
    steps = (*gather_plan(index, size, rows, chunks), *scatter_plan(index, size, rows, chunks))
    multiple = 16 if chunks * 16 <= (size - 1) * rows else 1
    assert all(step.start % multiple == step.stop % multiple == 0 for step in steps)


def test_an_example() -> None:
    found = [
        (step.start, step.stop, [piece.owner for piece in step.pieces])
        for step in gather_plan(2, 4, 10, 2)
    ]
    assert found == [(20, 30, [2]), (30, 40, [3]), (0, 20, [0, 1])]
    assert gather_plan(0, 2, 10, 2)[1:] == (
        Step(10, 15, (Piece(1, 10, 15),)),
        Step(15, 20, (Piece(1, 15, 20),)),
    )


@pytest.mark.parametrize(("rows", "chunks"), [(0, 1), (4, 0)])
def test_nothing_to_cut_is_refused(rows: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        gather_plan(0, 2, rows, chunks)
