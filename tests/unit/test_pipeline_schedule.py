"""Schedules do not deadlock, deliver in order and keep their memory bounds.

1F1B and zero bubble, each plain and interleaved.

Communicators are in-order, untagged and unbuffered. All stages' programs run against a model of
them: every directed edge of the ring has one communicator per kind; on it the k-th send pairs with
the k-th receive, and data moves only when both are posted. A wait blocks its stage. In the harder
models more blocks: if all operations of a device pass through one queue, an operation also blocks
the queue until the one before it on its communicator has ended; and a computation may make its
stage wait for its whole device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megascale_trainer.parallel.pipeline.drawing import Durations, simulate
from megascale_trainer.parallel.pipeline.schedule import (
    Action,
    Kind,
    PipelineShape,
    forward_only,
    most_in_flight,
    one_forward_one_backward,
    postponed,
    warm_up_forwards,
    zero_bubble,
)

_ACTIVATIONS = (Kind.SEND_ACTIVATION, Kind.POST_ACTIVATION, Kind.WAIT_ACTIVATION)
_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
_POSTS = (Kind.POST_ACTIVATION, Kind.POST_GRADIENT)
_WAITS = (Kind.WAIT_ACTIVATION, Kind.WAIT_GRADIENT)
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_COMPUTATIONS = (Kind.FORWARD, *_BACKWARDS, Kind.BACKWARD_WEIGHT)
Shape = tuple[int, int, int]  # stages, micro-batches, chunks
Edge = tuple[int, bool]
Generator = Callable[..., list[Action]]

plain = st.tuples(st.integers(1, 9), st.integers(1, 20), st.just(1))
interleaved = st.builds(
    lambda stages, rounds, chunks: (stages, stages * rounds, chunks),
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(2, 5),
)
shapes = plain | interleaved
trainings = st.sampled_from([one_forward_one_backward, zero_bubble])
generators = trainings | st.just(forward_only)


def _programs(
    shape: Shape, overlap: bool, generator: Generator = one_forward_one_backward
) -> list[list[Action]]:
    stages, micro_batches, chunks = shape
    return [
        generator(PipelineShape(stage, stages, micro_batches, chunks), overlap=overlap)
        for stage in range(stages)
    ]


def _edge(stage: int, kind: Kind, stages: int) -> Edge:
    """The communicator of an action: (stage where its ring edge starts, is it for activations).

    Two stages have two edges between them, 0 to 1 and 1 to 0; each has its own communicators.
    """
    from_here = kind in (Kind.SEND_ACTIVATION, Kind.POST_GRADIENT, Kind.WAIT_GRADIENT)
    return (stage if from_here else (stage - 1) % stages), kind in _ACTIVATIONS


def _message(stage: int, action: Action, stages: int) -> tuple[int, int]:
    """What a transfer carries: micro-batch and virtual stage whose forward the edge follows."""
    virtual = action.chunk * stages + stage
    before = action.kind in (Kind.POST_ACTIVATION, Kind.WAIT_ACTIVATION, Kind.SEND_GRADIENT)
    return action.micro_batch, virtual - 1 if before else virtual


class _Model:
    """Communicators and the stages on them.

    Args:
        one_queue: a device has a single queue. The operation at its head waits for the one before
            it on its communicator, and those behind it wait too. An operation that was launched,
            such as a receive that polls for its partner, blocks nothing.
        device_waits: computations (stage and index in its program) that start once everything
            posted by their stage has ended.
    """

    def __init__(
        self,
        programs: list[list[Action]],
        one_queue: bool = False,
        device_waits: Collection[tuple[int, int]] = (),
    ) -> None:
        self._programs, self._one_queue, self._device_waits = programs, one_queue, device_waits
        self._sent: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        self._posted: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        self._waited: dict[Edge, int] = defaultdict(int)
        # For each stage: how many sends and receives it has posted on each communicator.
        self._last: list[dict[tuple[Edge, bool], int]] = [{} for _ in programs]

    def run(self) -> list[tuple[int, Action]]:
        """The order in which actions pass.

        Raises:
            AssertionError: a deadlock, a send without its receive, or crossed messages.
        """
        at = [0] * len(self._programs)
        order: list[tuple[int, Action]] = []
        moved = True
        while moved:
            moved = False
            for stage, program in enumerate(self._programs):
                while at[stage] < len(program) and self._passes(
                    stage, at[stage], program[at[stage]]
                ):
                    order.append((stage, program[at[stage]]))
                    at[stage] += 1
                    moved = True
        assert at == [len(program) for program in self._programs], f"deadlock at {at}"
        assert self._sent == self._posted, "a send without its receive"
        assert all(self._waited[edge] == len(posted) for edge, posted in self._posted.items()), (
            "never waited for"
        )
        return order

    def _passes(self, stage: int, place: int, action: Action) -> bool:
        edge, stages = _edge(stage, action.kind, len(self._programs)), len(self._programs)
        if action.kind in _COMPUTATIONS:
            ended = (number <= self._ended(edge) for (edge, _), number in self._last[stage].items())
            return (stage, place) not in self._device_waits or all(ended)
        if action.kind in _WAITS:
            if self._waited[edge] >= self._ended(edge):
                return False
            mine = self._posted[edge][self._waited[edge]]
            assert mine == _message(stage, action, stages), (
                "the wait is for another message than the post"
            )
            self._waited[edge] += 1
            return True
        messages = (self._sent if action.kind in _SENDS else self._posted)[edge]
        if self._one_queue and self._ended(edge) < len(messages):
            return False
        messages.append(_message(stage, action, stages))
        self._last[stage][edge, action.kind in _SENDS] = len(messages)
        return True

    def _ended(self, edge: Edge) -> int:
        """Number of transfers of a communicator with both ends posted, which end by themselves."""
        sent, posted = self._sent[edge], self._posted[edge]
        number = min(len(sent), len(posted))
        assert sent[:number] == posted[:number], "crossed messages"
        return number


@given(shape=shapes, overlap=st.booleans(), generator=trainings)
@example(shape=(2, 2, 2), overlap=True, generator=one_forward_one_backward)
@example(shape=(2, 8, 2), overlap=True, generator=zero_bubble)
@example(shape=(4, 4, 2), overlap=True, generator=one_forward_one_backward)
@example(shape=(4, 16, 2), overlap=True, generator=zero_bubble)
def test_every_stage_runs_everything_once_in_a_possible_order(
    shape: Shape, overlap: bool, generator: Generator
) -> None:
    stages, micro_batches, chunks = shape
    order = _Model(_programs(shape, overlap, generator)).run()
    everything = [
        (virtual, number) for virtual in range(stages * chunks) for number in range(micro_batches)
    ]
    forward, backward, weights = (
        {
            (action.chunk * stages + stage, action.micro_batch): at
            for at, (stage, action) in enumerate(order)
            if action.kind in kinds
        }
        for kinds in ((Kind.FORWARD,), _BACKWARDS, _WEIGHTS)
    )
    for kinds in ((Kind.FORWARD,), _BACKWARDS, _WEIGHTS):
        assert sum(action.kind in kinds for _, action in order) == len(everything)
    assert sorted(forward) == sorted(backward) == sorted(weights) == everything
    for virtual, number in everything:
        assert forward[virtual, number] < backward[virtual, number] <= weights[virtual, number]
        if virtual:
            assert forward[virtual - 1, number] < forward[virtual, number]
            assert backward[virtual, number] < backward[virtual - 1, number]


@given(shape=shapes)
@example(shape=(4, 16, 2))
@example(shape=(8, 3, 1))
def test_split_backwards_keep_the_order_of_1f1b_and_the_memory_of_its_first_stage(
    shape: Shape,
) -> None:
    """So every sum of gradients has the same order, and a chunk is split always or never."""
    _, micro_batches, chunks = shape
    whole, split = (
        _programs(shape, True, each) for each in (one_forward_one_backward, zero_bubble)
    )
    most_alive = warm_up_forwards(PipelineShape(0, *shape)) + 1
    for stage, (before, after) in enumerate(zip(whole, split, strict=True)):
        order = [(one.micro_batch, one.chunk) for one in before if one.kind is Kind.BACKWARD]
        for kinds in (_BACKWARDS, _WEIGHTS):
            assert [(one.micro_batch, one.chunk) for one in after if one.kind in kinds] == order
        for chunk in range(chunks):
            kinds = {action.kind for action in after if action.chunk == chunk}
            opens = stage == 0 and chunk == 0
            assert (Kind.BACKWARD in kinds) is opens and (Kind.BACKWARD_INPUT in kinds) is not opens
        alive = waiting = most_waiting = 0
        for action in after:
            alive += (action.kind is Kind.FORWARD) - (action.kind in _WEIGHTS)
            waiting += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHT)
            most_waiting = max(most_waiting, waiting)
            assert alive <= min(most_alive, micro_batches * chunks)
        assert alive == waiting == 0
        later = postponed(PipelineShape(stage, *shape))
        assert most_waiting == min(later + (stage > 0 or chunks > 1), micro_batches * chunks)


@given(shape=shapes, overlap=st.booleans(), generator=generators)
@example(shape=(2, 8, 2), overlap=True, generator=one_forward_one_backward)
@example(shape=(4, 16, 2), overlap=True, generator=one_forward_one_backward)
def test_one_hardware_queue_per_device_is_enough(
    shape: Shape, overlap: bool, generator: Generator
) -> None:
    _Model(_programs(shape, overlap, generator), one_queue=True).run()


@given(shape=shapes, overlap=st.booleans(), generator=generators, data=st.data())
@example(shape=(3, 3, 2), overlap=True, generator=one_forward_one_backward, data=None)
def test_a_stage_may_wait_for_its_device_in_any_one_computation(
    shape: Shape, overlap: bool, generator: Generator, data: st.DataObject | None
) -> None:
    """As when memory is returned to CUDA: no transfer in flight needs a later post of the stage."""
    programs = _programs(shape, overlap, generator)
    places = [
        (stage, at)
        for stage, program in enumerate(programs)
        for at, action in enumerate(program)
        if action.kind in _COMPUTATIONS
    ]
    for place in places if data is None else [data.draw(st.sampled_from(places))]:
        _Model(programs, device_waits=[place]).run()


@given(shape=shapes, overlap=st.booleans(), generator=generators)
@example(shape=(2, 1, 1), overlap=True, generator=one_forward_one_backward)
def test_all_stages_may_wait_for_their_devices_in_their_first_computations(
    shape: Shape, overlap: bool, generator: Generator
) -> None:
    """CUDA loads a kernel at its first use, and may wait for the device then."""
    programs = _programs(shape, overlap, generator)
    first = {
        (stage, next(at for at, action in enumerate(program) if action.kind is kind))
        for stage, program in enumerate(programs)
        for kind in {action.kind for action in program} & {*_COMPUTATIONS}
    }
    _Model(programs, device_waits=first).run()


@given(shape=shapes, generator=generators)
@example(shape=(2, 8, 2), generator=one_forward_one_backward)
@example(shape=(4, 16, 2), generator=one_forward_one_backward)
def test_overlap_moves_posts_and_nothing_else(shape: Shape, generator: Generator) -> None:
    """At most one computation ahead and in order; plain, a stage posts where it waits."""
    for direct, ahead in zip(
        _programs(shape, False, generator), _programs(shape, True, generator), strict=True
    ):
        for kinds in (_POSTS, [kind for kind in Kind if kind not in _POSTS]):
            assert [action for action in direct if action.kind in kinds] == [
                action for action in ahead if action.kind in kinds
            ]
        for program, most in ((direct, 0), (ahead, 1)):
            flying = passed = 0
            for action in program:
                flying += (action.kind in _POSTS) - (action.kind in _WAITS)
                # The two parts of a split backward are one.
                computes = action.kind in (Kind.FORWARD, *_BACKWARDS)
                passed = passed + computes if flying else 0
                assert flying <= 1 and passed <= most


@given(shape=shapes)
@example(shape=(2, 8, 2))
@example(shape=(4, 16, 2))
def test_memory_bound(shape: Shape) -> None:
    """Activations: the same with overlap. Receive buffers (post to backward): at most one more."""
    stages, micro_batches, chunks = shape
    for stage in range(stages):
        peaks = []
        for overlap in (False, True):
            alive = buffers = most_buffers = most = 0
            received: dict[tuple[int, int], int] = defaultdict(int)
            for action in one_forward_one_backward(PipelineShape(stage, *shape), overlap=overlap):
                place = action.micro_batch, action.chunk
                received[place] += action.kind in _POSTS
                buffers += (action.kind in _POSTS) - (
                    received[place] if action.kind is Kind.BACKWARD else 0
                )
                alive += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
                most, most_buffers = max(most, alive), max(most_buffers, buffers)
            peaks.append(most_buffers)
            assert most == min(
                warm_up_forwards(PipelineShape(stage, stages, micro_batches, chunks)) + 1,
                micro_batches * chunks,
            )
            assert alive == buffers == 0
            if chunks == 1:
                assert most == min(stages - stage, micro_batches)
            else:
                assert most <= stages * (chunks + 1) - 1, (
                    "memory is that of pp * (1 + v) chunks, not of the batch"
                )
        assert peaks[0] <= peaks[1] <= peaks[0] + 1


@given(shape=shapes, overlap=st.booleans())
@example(shape=(2, 4, 2), overlap=True)
def test_evaluation_runs_all_forwards_and_nothing_else(shape: Shape, overlap: bool) -> None:
    stages, micro_batches, chunks = shape
    order = _Model(_programs(shape, overlap, forward_only)).run()
    assert {action.kind for _, action in order} <= {Kind.FORWARD, *_ACTIVATIONS}
    done = [
        (stage, action.chunk, action.micro_batch)
        for stage, action in order
        if action.kind is Kind.FORWARD
    ]
    assert len(done) == len(set(done)) == stages * micro_batches * chunks


@given(shape=shapes, overlap=st.booleans())
def test_interleaving_shrinks_the_bubble(shape: Shape, overlap: bool) -> None:
    """If a chunk's forward and backward take one unit each, a stage idles 2 (pp - 1), for any v."""
    stages, micro_batches, chunks = shape
    timeline = simulate(_programs(shape, overlap), Durations(forward=1, backward=1))
    assert timeline.makespan == 2 * micro_batches * chunks + 2 * (stages - 1)


@given(
    stages=st.integers(2, 9),
    more=st.integers(0, 12),
    weights=st.integers(1, 6),
    forward=st.integers(0, 5),
    inputs=st.integers(0, 5),
)
@example(stages=4, more=12, weights=10, forward=3, inputs=7)
def test_split_backwards_leave_the_bubble_of_the_formula(
    stages: int, more: int, weights: int, forward: int, inputs: int
) -> None:
    """Qi et al., arXiv 2401.10241, section 2.3: (p - 1) (F + B - W), where W is the shortest."""
    forward, inputs, number = forward + weights, inputs + weights, stages + more
    durations = Durations(forward, inputs + weights, 0, weights)
    timeline = simulate(_programs((stages, number, 1), False, zero_bubble), durations)
    work = number * (forward + inputs + weights)
    assert timeline.makespan == work + (stages - 1) * (forward + inputs - weights)


def test_the_bubbles_of_the_page_are_those_of_the_schedule() -> None:
    page = Path(__file__).parents[2] / "docs" / "training.md"
    rows = [
        [cell.strip().removesuffix(" %") for cell in line.strip("|").split("|")]
        for line in page.read_text().split("## Pipeline bubbles")[1].split("\n## ")[0].splitlines()
        if line.startswith("| ") and "%" in line
    ]
    assert len(rows) == 6
    for sizes, *shown in rows:
        stages, chunks, number = map(int, sizes.split(", "))
        shape = stages, number, chunks
        found = []
        for generator, durations in (
            (one_forward_one_backward, Durations(10, 20)),
            (zero_bubble, Durations(10, 20, 0, 10)),
            (zero_bubble, Durations(13, 27, 0, 10)),
        ):
            timeline = simulate(_programs(shape, True, generator), durations)
            work = number * chunks * (durations.forward + durations.backward)
            found.append(timeline.makespan / work - 1)
        assert [float(cell) / 100 for cell in shown] == pytest.approx(found, abs=0.0006), sizes


@given(shape=shapes, overlap=st.booleans(), transfer=st.integers(0, 2), weights=st.integers(1, 4))
@example(shape=(2, 16, 2), overlap=True, transfer=0, weights=4)
@example(shape=(4, 16, 2), overlap=True, transfer=0, weights=4)
def test_splitting_is_never_slower_and_faster_where_there_is_a_bubble(
    shape: Shape, overlap: bool, transfer: int, weights: int
) -> None:
    durations = Durations(4, 4 + weights, transfer, weights)
    whole, split = (
        simulate(_programs(shape, overlap, each), durations).makespan
        for each in (one_forward_one_backward, zero_bubble)
    )
    assert split < whole if shape[0] > 1 else split == whole


times = st.builds(
    lambda transfer, forward, backward: Durations(
        transfer + forward, transfer + backward, transfer
    ),
    st.integers(1, 5),
    st.integers(0, 10),
    st.integers(0, 10),
)


@given(shape=shapes, durations=times)
@example(shape=(2, 8, 2), durations=Durations(4, 8, 1))
@example(shape=(4, 16, 2), durations=Durations(4, 8, 1))
def test_overlap_is_faster(shape: Shape, durations: Durations) -> None:
    """If a transfer is not longer than a computation.

    Two stages of plain 1F1B take turns in any case, because a micro-batch is always in transit
    between them; there overlap gains only with an even number of micro-batches.
    """
    stages, micro_batches, _ = shape
    direct, ahead = (
        simulate(_programs(shape, overlap), durations).makespan for overlap in (False, True)
    )
    gains = stages > 1 and micro_batches > 1 and (shape[::2] != (2, 1) or micro_batches % 2 == 0)
    assert ahead < direct if gains else ahead == direct


@given(shape=shapes, durations=times)
def test_nothing_is_gained_by_posting_further_ahead(shape: Shape, durations: Durations) -> None:
    programs = _programs(shape, overlap=True)
    at_once = [
        sorted(program, key=lambda action: action.kind not in _POSTS) for program in programs
    ]
    assert simulate(programs, durations).makespan == simulate(at_once, durations).makespan


@given(shape=interleaved, durations=times)
def test_interleaved_and_overlapped_only_filling_and_draining_expose_transfers(
    shape: Shape, durations: Durations
) -> None:
    """As many as a path through the model and back has, for any number of micro-batches."""
    stages, micro_batches, chunks = shape
    timeline = simulate(_programs(shape, overlap=True), durations)
    computing = (micro_batches * chunks + stages - 1) * (durations.forward + durations.backward)
    assert timeline.makespan == computing + 2 * (stages * chunks - 1) * durations.transfer


def test_the_model_detects_a_deadlock_and_crossed_messages() -> None:
    programs = _programs((2, 2, 1), overlap=False)
    wait = next(n for n, action in enumerate(programs[0]) if action.kind is Kind.WAIT_GRADIENT)
    programs[0][:0] = [programs[0].pop(wait - 1), programs[0].pop(wait - 1)]
    with pytest.raises(AssertionError, match="deadlock"):
        _Model(programs).run()
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(programs, Durations())
    for shape in ((2, 3, 1), (2, 4, 2)):
        programs = _programs(shape, overlap=True)
        sends = [n for n, action in enumerate(programs[0]) if action.kind is Kind.SEND_ACTIVATION]
        first, second = sends[:2]
        programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
        with pytest.raises(AssertionError, match="crossed"):
            _Model(programs).run()


def test_the_harder_models_detect_more() -> None:
    """Two posts ahead block a single queue; an early post of an answer blocks a waiting host.

    So do the posts of two hosts that wait at once.
    """
    at_once = [
        sorted(program, key=lambda action: action.kind not in _POSTS)
        for program in _programs((3, 2, 1), True)
    ]
    _Model(at_once).run()
    with pytest.raises(AssertionError, match="deadlock"):
        _Model(at_once, one_queue=True).run()
    ahead = _programs((2, 3, 1), overlap=True)
    forward, backward = (
        next(
            at for at, action in enumerate(ahead[stage]) if (action.kind, action.micro_batch) == of
        )
        for stage, of in ((0, (Kind.FORWARD, 2)), (1, (Kind.BACKWARD, 1)))
    )
    for place in ((0, forward), (1, backward)):
        _Model(ahead, device_waits=[place]).run()
    # Both at once, as two ranks that load kernels for a new kind of batch: why they rehearse.
    with pytest.raises(AssertionError, match="deadlock"):
        _Model(ahead, device_waits=[(0, forward), (1, backward)]).run()
    echo = _programs((2, 1, 1), overlap=True)
    echo[0].sort(key=lambda action: action.kind is not Kind.POST_GRADIENT)
    _Model(echo).run()
    with pytest.raises(AssertionError, match="deadlock"):
        _Model(echo, device_waits=[(0, 1)]).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0, 1), "0 micro-batches"),
        ((0, 2, 3, 2), "micro-batches in multiples of the stages"),
        ((0, 1, 2, 2), "more than one stage"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    arguments: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one_forward_one_backward(PipelineShape(*arguments))


@given(shape=shapes, overlap=st.booleans())
def test_chunks_in_flight_fit_the_warm_up(shape: Shape, overlap: bool) -> None:
    stages, micro_batches, chunks = shape
    for program in _programs(shape, overlap, zero_bubble):
        most = [most_in_flight(program, chunk) for chunk in range(chunks)]
        assert all(1 <= held <= warm_up_forwards(PipelineShape(0, *shape)) + 1 for held in most)
        if chunks == 1:
            assert most == [min(stages, micro_batches)]
    for stage, program in enumerate(_programs(shape, overlap)):
        most = [most_in_flight(program, chunk) for chunk in range(chunks)]
        if chunks == 1:
            assert most == [min(stages - stage, micro_batches)]
        # No chunk has more than all have together, and each of them has one at some time.
        assert all(1 <= held <= warm_up_forwards(PipelineShape(stage, *shape)) + 1 for held in most)
