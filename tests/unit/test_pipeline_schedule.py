"""1F1B, plain and interleaved, is valid on in-order, untagged, unbuffered communicators and keeps its memory bound.

The proof runs all stages' programs against a model of such communicators: every directed edge of the ring has one per
kind, on it the k-th send meets the k-th receive, data moves only when both are posted, a receive blocks its stage, a
posted send does not.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megascale_executor.trainer.parallel.pipeline.schedule import (
    Action,
    Kind,
    forward_only,
    one_forward_one_backward,
    warm_up_forwards,
)

_ACTIVATIONS = (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
Shape = tuple[int, int, int]  # stages, micro-batches, chunks

plain = st.tuples(st.integers(1, 9), st.integers(1, 20), st.just(1))
interleaved = st.builds(
    lambda stages, rounds, chunks: (stages, stages * rounds, chunks),
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(2, 5),
)
shapes = plain | interleaved


def _programs(shape: Shape) -> list[list[Action]]:
    stages, micro_batches, chunks = shape
    return [one_forward_one_backward(stage, stages, micro_batches, chunks) for stage in range(stages)]


def _edge(stage: int, kind: Kind, stages: int) -> tuple[int, bool]:
    """The communicator of an action: the stage that the directed ring edge leaves, and whether it is for activations.

    Two stages have two edges between them, 0 to 1 and 1 to 0; each has its own communicators.
    """
    from_here = kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
    return (stage if from_here else (stage - 1) % stages), kind in _ACTIVATIONS


def _message(stage: int, action: Action, stages: int) -> tuple[int, int]:
    """What travels: the micro-batch, and the virtual stage whose forward the edge follows."""
    virtual = action.chunk * stages + stage
    before = action.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
    return action.micro_batch, virtual - 1 if before else virtual


def _run(programs: list[list[Action]]) -> list[tuple[int, Action]]:
    """The order in which actions complete; fails on deadlock, on a send nobody takes and on a crossed message."""
    stages = len(programs)
    at = [0] * stages
    posted: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    taken: dict[tuple[int, bool], int] = defaultdict(int)
    order: list[tuple[int, Action]] = []
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program):
                action = program[at[stage]]
                edge = _edge(stage, action.kind, stages)
                if action.kind in _SENDS:
                    posted[edge].append(_message(stage, action, stages))
                elif action.kind in _RECEIVES:
                    if taken[edge] == len(posted[edge]):
                        break
                    assert posted[edge][taken[edge]] == _message(stage, action, stages), "crossed messages"
                    taken[edge] += 1
                order.append((stage, action))
                at[stage] += 1
                moved = True
    assert at == [len(program) for program in programs], f"deadlock at {at}"
    assert all(taken[edge] == len(sends) for edge, sends in posted.items()), "a send was never received"
    return order


@given(shape=shapes)
@example(shape=(2, 2, 2))
@example(shape=(2, 8, 2))
@example(shape=(4, 4, 2))
@example(shape=(4, 16, 2))
def test_every_stage_runs_everything_once_in_a_possible_order(shape: Shape) -> None:
    stages, micro_batches, chunks = shape
    order = _run(_programs(shape))
    everything = [(virtual, number) for virtual in range(stages * chunks) for number in range(micro_batches)]
    place: dict[tuple[Kind, int, int], int] = {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        done = [(action.chunk * stages + stage, action.micro_batch) for stage, action in order if action.kind is kind]
        assert sorted(done) == everything
    for at, (stage, action) in enumerate(order):
        place[action.kind, action.chunk * stages + stage, action.micro_batch] = at
    for virtual, number in everything:
        assert place[Kind.FORWARD, virtual, number] < place[Kind.BACKWARD, virtual, number]
        if virtual:
            assert place[Kind.FORWARD, virtual - 1, number] < place[Kind.FORWARD, virtual, number]
            assert place[Kind.BACKWARD, virtual, number] < place[Kind.BACKWARD, virtual - 1, number]


@given(shape=shapes)
@example(shape=(2, 8, 2))
@example(shape=(4, 16, 2))
def test_memory_bound(shape: Shape) -> None:
    stages, micro_batches, chunks = shape
    for stage, program in enumerate(_programs(shape)):
        alive = most = 0
        for action in program:
            alive += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            most = max(most, alive)
        assert most == min(warm_up_forwards(stage, stages, micro_batches, chunks) + 1, micro_batches * chunks)
        assert alive == 0
        if chunks == 1:
            assert most == min(stages - stage, micro_batches)
        else:
            assert most <= stages * (chunks + 1) - 1, "pipeline memory is that of pp * (1 + v) chunks, not of the batch"


@given(shape=shapes)
@example(shape=(2, 4, 2))
def test_evaluation_runs_all_forwards_and_nothing_else(shape: Shape) -> None:
    stages, micro_batches, chunks = shape
    order = _run([forward_only(stage, stages, micro_batches, chunks) for stage in range(stages)])
    assert {action.kind for _, action in order} <= {Kind.FORWARD, *_ACTIVATIONS}
    done = [(stage, action.chunk, action.micro_batch) for stage, action in order if action.kind is Kind.FORWARD]
    assert len(done) == len(set(done)) == stages * micro_batches * chunks


@given(shape=interleaved)
def test_interleaving_shrinks_the_bubble(shape: Shape) -> None:
    """With a chunk's forward and backward one time unit each, a stage idles 2 (pp - 1) units whatever v is."""
    stages, micro_batches, chunks = shape
    free, ready = [0] * stages, dict[tuple[Kind, int, int], int]()
    for stage, action in _run(_programs(shape)):
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        virtual = action.chunk * stages + stage
        before = virtual - 1 if action.kind is Kind.FORWARD else virtual + 1
        start = max(free[stage], ready.get((action.kind, before, action.micro_batch), 0))
        free[stage] = ready[action.kind, virtual, action.micro_batch] = start + 1
    assert max(free) == 2 * micro_batches * chunks + 2 * (stages - 1)


def test_the_model_sees_a_deadlock_and_crossed_messages() -> None:
    programs = _programs((2, 2, 1))
    receive = next(n for n, action in enumerate(programs[0]) if action.kind is Kind.RECEIVE_GRADIENT)
    programs[0].insert(0, programs[0].pop(receive))
    with pytest.raises(AssertionError, match="deadlock"):
        _run(programs)
    for shape in ((2, 3, 1), (2, 4, 2)):
        programs = _programs(shape)
        sends = [n for n, action in enumerate(programs[0]) if action.kind is Kind.SEND_ACTIVATION]
        first, second = sends[:2]
        programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
        with pytest.raises(AssertionError, match="crossed"):
            _run(programs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0, 1), "0 micro-batches"),
        ((0, 2, 3, 2), "micro-batches in multiples of the stages"),
        ((0, 1, 2, 2), "more than one stage"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_forward_one_backward(*arguments)
