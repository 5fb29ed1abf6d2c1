"""How long a pipeline schedule takes in whole time units, without devices.

For drawings and tests.

The model: a computation takes its time; a transfer starts when its send is posted, its receive is
posted and the transfer before it on the same communicator has ended; posts and sends cost nothing.
A post is behind the computations before it, so a schedule that posts late shows the transfers that
it exposes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megascale_trainer.parallel.pipeline.schedule import COMPUTATIONS, Action, Kind

_ACTIVATIONS = (Kind.POST_ACTIVATION, Kind.WAIT_ACTIVATION, Kind.SEND_ACTIVATION)
_WITH_THE_NEXT = (Kind.SEND_ACTIVATION, Kind.POST_GRADIENT, Kind.WAIT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Durations:
    """Time units of a chunk's forward, of its backward, and of the transfer of one message.

    ``backward_weight``: the weight gradients' part of ``backward``, where a schedule splits it.
    """

    forward: int = 1
    backward: int = 2
    transfer: int = 0
    backward_weight: int = 1

    def of(self, kind: Kind) -> int:
        """The time of a computation."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward - self.backward_weight,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


@dataclass(frozen=True, slots=True)
class Span:
    """When a computation runs, ``end`` exclusive."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every stage computes when, from 0 on."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> int:
        """When the last computation ends."""
        return max(spans[-1].end for spans in self.stages)

    @property
    def bubble_share(self) -> float:
        """The part of the stages' time in which they compute nothing, in [0, 1)."""
        busy = sum(span.end - span.start for spans in self.stages for span in spans)
        return 1 - busy / (len(self.stages) * self.makespan)


def simulate(programs: Sequence[Sequence[Action]], durations: Durations) -> Timeline:
    """Run the programs of all stages, first stage first.

    Raises:
        ValueError: the programs wait for each other in a circle.
    """
    clock = _Clock(len(programs), durations)
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program) and clock.run(stage, program[at[stage]]):
                at[stage] += 1
                moved = True
    if at != [len(program) for program in programs]:
        raise ValueError(f"the stages wait for each other: they have done {at} actions")
    return Timeline(tuple(map(tuple, clock.spans)))


@dataclass(slots=True)
class _Channel:
    """A communicator: times of sends and of receives' posts, ends of transfers, waits so far."""

    sends: list[int] = field(default_factory=list)
    posts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    waited: int = 0


class _Clock:
    def __init__(self, stages: int, durations: Durations) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(stages)]
        self._now = [0] * stages
        self._durations = durations
        self._channels: defaultdict[tuple[int, bool], _Channel] = defaultdict(_Channel)

    def run(self, stage: int, action: Action) -> bool:
        """Do ``action``; False where it waits for what another stage has not posted yet."""
        if action.kind in COMPUTATIONS:
            takes = self._durations.of(action.kind)
            self.spans[stage].append(Span(action, self._now[stage], self._now[stage] + takes))
            self._now[stage] += takes
            return True
        low = stage if action.kind in _WITH_THE_NEXT else (stage - 1) % len(self.spans)
        channel = self._channels[low, action.kind in _ACTIVATIONS]
        if action.kind in (Kind.WAIT_ACTIVATION, Kind.WAIT_GRADIENT):
            if channel.waited == len(channel.ends):
                return False
            self._now[stage] = max(self._now[stage], channel.ends[channel.waited])
            channel.waited += 1
            return True
        sends = action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
        (channel.sends if sends else channel.posts).append(self._now[stage])
        number = len(channel.ends)
        if number < min(len(channel.sends), len(channel.posts)):
            start = max(
                channel.sends[number],
                channel.posts[number],
                channel.ends[-1] if channel.ends else 0,
            )
            channel.ends.append(start + self._durations.transfer)
        return True
