"""1F1B, interleaved 1F1B and zero bubble as pure lists of actions.

Sources: Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241 (ZB-H1).

A stage fills the pipeline with forwards, then runs one forward and one backward in turn, then the
remaining backwards. With V chunks (virtual stages) per stage, groups of ``stages`` micro-batches
visit chunk 0, then chunk 1 and so on; chunk c of the last stage sends to chunk c + 1 of the first,
so the edges of the pipeline form a ring. Zero bubble: Note [Zero bubble].

Sends are posted as soon as their data exists and waited for later: a send that waited for its
partner would close a circle with the partner's own send. A receive is a post, after which data can
arrive, and a wait, right before the computation that needs the data. A device runs its part of a
post only after all computation that was enqueued before. Without ``overlap`` a stage posts where it
waits, and the transfer is exposed. With ``overlap`` it posts one computation earlier, in warm-up,
steady state and cool-down (MegaScale, arXiv 2402.15627, section 3.2), at the price of one more
message in memory. Posting even earlier gains nothing unless a transfer is longer than a
computation.

Every directed edge of the ring has a communicator per payload, even if two edges join the same two
ranks (two stages). Both ends of an edge run through the same chunks and micro-batches in the same
order, so that the k-th send meets the k-th receive.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megascale_job.visible import counted

# Note [Zero bubble]
# ~~~~~~~~~~~~~~~~~~
# A backward computes two things with different deadlines. The stage before waits for the gradient
# of the input, so that is computed and sent at once. Nothing needs the gradients of the weights
# before the end of the step, so they can fill times in which the stage would wait: the bubble. A
# split backward is BACKWARD_INPUT, and later BACKWARD_WEIGHT (see Note [Delayed weight gradients]).
#
# Postponing costs memory: the micro-batch's activations and gradients are held until its weight
# gradients have run. In 1F1B the first stage has the most micro-batches in flight and the last
# stage the fewest. So a stage postpones only as many weight gradients as it has fewer micro-batches
# in flight than the first stage: no stage holds more than the first one does in 1F1B (ZB-H1). While
# the pipeline fills, the first gradients travel through it sooner, and at the end the postponed
# weight gradients are left to fill the waits of the cool-down.


class Kind(enum.Enum):
    """An action of a stage. Sends and posts return at once; waits return with the post's data."""

    POST_ACTIVATION = "post_activation"
    WAIT_ACTIVATION = "wait_activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send_activation"
    POST_GRADIENT = "post_gradient"
    WAIT_GRADIENT = "wait_gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_GRADIENT = "send_gradient"


POSTS = frozenset({Kind.POST_ACTIVATION, Kind.POST_GRADIENT})
COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
_LAST_USES = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})  # they free a forward's activations


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a stage's program, for one micro-batch and model chunk (0: no interleaving)."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One stage of a pipeline: ``stage`` out of ``stages``, each with ``virtual`` model chunks."""

    stage: int
    stages: int
    micro_batches: int
    virtual: int = 1

    @property
    def total(self) -> int:
        """Forwards (of one chunk each) of the stage in a step, and as many backwards."""
        return self.micro_batches * self.virtual


def most_in_flight(program: Sequence[Action], chunk: int) -> int:
    """The largest number of micro-batches of ``chunk`` between forward and the end of backward."""
    held = most = 0
    for action in program:
        if action.chunk == chunk:
            held += (action.kind is Kind.FORWARD) - (action.kind in _LAST_USES)
            most = max(most, held)
    return most


def split_chunks(program: Sequence[Action]) -> set[int]:
    """The chunks whose backwards ``program`` splits: all backwards of a chunk, or none."""
    return {action.chunk for action in program if action.kind is Kind.BACKWARD_INPUT}


def one_forward_one_backward(shape: PipelineShape, *, overlap: bool = False) -> list[Action]:
    """The program of a stage.

    At most :func:`warm_up_forwards` + 1 pairs of micro-batch and chunk are alive at once, and with
    ``overlap`` one posted message.

    Raises:
        ValueError: no micro-batch, a stage that does not exist, or virtual stages that do not fit
            the other numbers.
    """
    line = _Line(shape)
    total, warm_up = shape.total, warm_up_forwards(shape)
    return _one_in_turn(line.forward, line.backward, total, warm_up, overlap)


def zero_bubble(shape: PipelineShape, *, overlap: bool = False) -> list[Action]:
    """:func:`one_forward_one_backward` with split backwards: Note [Zero bubble].

    A backward's weight gradients run :func:`postponed` backwards later, or after the last backward,
    in the same order. No stage has more pairs of micro-batch and chunk between forward and weight
    gradients than the first stage has alive in 1F1B. A backward whose gradient goes to no other
    stage stays whole.
    """
    line = _Line(shape)
    total, warm_up = shape.total, warm_up_forwards(shape)
    later = postponed(shape)

    def backward(number: int) -> list[Action]:
        if not later and line.backward_ends_here(number):
            return line.backward(number)
        weights = line.backward_weight(number - later) if number >= later else []
        return line.backward(number, Kind.BACKWARD_INPUT) + weights

    program = _one_in_turn(line.forward, backward, total, warm_up, overlap)
    return program + [
        action for number in range(total - later, total) for action in line.backward_weight(number)
    ]


def postponed(shape: PipelineShape) -> int:
    """By how many backwards a stage postpones weight gradients in :func:`zero_bubble`."""
    return warm_up_forwards(replace(shape, stage=0)) - warm_up_forwards(shape)


SCHEDULES = {"1f1b": one_forward_one_backward, "zero_bubble": zero_bubble}


def forward_only(shape: PipelineShape, *, overlap: bool = False) -> list[Action]:
    """The forwards of a stage and their messages, for evaluation.

    Arguments and errors are those of :func:`one_forward_one_backward`.
    """
    line = _Line(shape)
    return _joined([line.forward(number) for number in range(shape.total)], overlap, held=None)


def warm_up_forwards(shape: PipelineShape) -> int:
    """Forwards (of one chunk each) before the first backward."""
    after = shape.stages - shape.stage - 1
    fill = after if shape.virtual == 1 else 2 * after + (shape.virtual - 1) * shape.stages
    return min(fill, shape.total)


def _one_in_turn(
    forward: Callable[[int], list[Action]],
    backward: Callable[[int], list[Action]],
    total: int,
    warm_up: int,
    overlap: bool,
) -> list[Action]:
    """``total`` forwards and backwards: ``warm_up`` forwards, both in turn, remaining backwards."""
    turns: list[list[Action]] = []
    for number in range(total):
        turns += [forward(number)]
        if number >= warm_up:
            turns += [backward(number - warm_up)]
    for number in range(total - warm_up, total):
        turns += [backward(number)]
    # Without a steady state the first gradient may be the answer to the very last forward. Posting
    # its receive before that forward would gain nothing. And if the host waits for its device
    # during that forward (a kernel loaded at its first use, memory given back to CUDA), it would
    # wait for ever: the device would wait in a receive for data that only that forward brings
    # about.
    return _joined(turns, overlap, held=total if warm_up == total else None)


def _joined(turns: list[list[Action]], overlap: bool, held: int | None) -> list[Action]:
    """The program of ``turns``, a forward or a backward each.

    ``overlap`` moves the posts of every turn but ``held`` ahead of the forward or backward before.
    """
    program: list[Action] = []
    last = 0  # index of the last turn's computation in the program
    for number, turn in enumerate(turns):
        posts = sum(action.kind in POSTS for action in turn)
        at = last if overlap and number != held else len(program)
        program[at:at] = turn[:posts]
        rest = turn[posts:]
        last = len(program) + next(
            at for at, action in enumerate(rest) if action.kind in COMPUTATIONS
        )
        program += rest
    return program


class _Line:
    """The numbered forwards and backwards of one stage, each with its messages."""

    def __init__(self, shape: PipelineShape) -> None:
        stage, stages = shape.stage, shape.stages
        micro_batches, chunks = shape.micro_batches, shape.virtual
        if micro_batches < 1 or chunks < 1 or not 0 <= stage < stages:
            raise ValueError(
                f"stage {stage} of {stages} with {counted(chunks, 'chunk')} and "
                f"{counted(micro_batches, 'micro-batch')}: there is nothing to schedule"
            )
        if chunks > 1 and (stages == 1 or micro_batches % stages):
            raise ValueError(
                f"{counted(chunks, 'chunk')} per stage need more than one stage, and "
                "micro-batches in "
                f"multiples of the stages: got {counted(stages, 'stage')} and "
                f"{counted(micro_batches, 'micro-batch')}"
            )
        self._stage = stage
        self._stages = stages
        self._chunks = chunks

    def forward(self, number: int) -> list[Action]:
        """Forward ``number`` of the stage."""
        micro_batch, chunk = self._place(number)
        kinds = [] if self._opens(chunk) else [Kind.POST_ACTIVATION, Kind.WAIT_ACTIVATION]
        kinds += [Kind.FORWARD]
        kinds += [] if self._closes(chunk) else [Kind.SEND_ACTIVATION]
        return [Action(kind, micro_batch, chunk) for kind in kinds]

    def backward(self, number: int, kind: Kind = Kind.BACKWARD) -> list[Action]:
        """Backward ``number`` of the stage: the same places, last chunk first."""
        micro_batch, chunk = self._backward_place(number)
        kinds = [] if self._closes(chunk) else [Kind.POST_GRADIENT, Kind.WAIT_GRADIENT]
        kinds += [kind]
        kinds += [] if self._opens(chunk) else [Kind.SEND_GRADIENT]
        return [Action(kind, micro_batch, chunk) for kind in kinds]

    def backward_weight(self, number: int) -> list[Action]:
        """The weight gradients of backward ``number``."""
        return [Action(Kind.BACKWARD_WEIGHT, *self._backward_place(number))]

    def backward_ends_here(self, number: int) -> bool:
        """True if the gradient of backward ``number`` goes to no other stage."""
        return self._opens(self._backward_place(number)[1])

    def _place(self, number: int) -> tuple[int, int]:
        """Micro-batch and chunk: groups of ``stages`` micro-batches visit chunk after chunk."""
        if self._chunks == 1:
            return number, 0
        group, inside = divmod(number, self._stages * self._chunks)
        return group * self._stages + inside % self._stages, inside // self._stages

    def _backward_place(self, number: int) -> tuple[int, int]:
        micro_batch, chunk = self._place(number)
        return micro_batch, self._chunks - 1 - chunk

    def _opens(self, chunk: int) -> bool:
        return self._stage == 0 and chunk == 0

    def _closes(self, chunk: int) -> bool:
        return self._stage == self._stages - 1 and chunk == self._chunks - 1
