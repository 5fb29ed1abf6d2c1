"""Pipeline schedules simulated in whole time units, and drawn as text and SVG: a row per stage.

The model: a computation takes its time; a transfer starts when its send is posted, its receive is
posted and the transfer before it on the same communicator has ended; posts and sends cost nothing.
A post is behind the computations before it, so a schedule that posts late shows the transfers that
it exposes. No device is needed.
"""

from __future__ import annotations

import colorsys
import string
from collections import defaultdict
from collections.abc import Iterator, Sequence
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


_IDLE = "."
_TICK_UNITS = 5
# Of the picture, in pixels.
_ROW, _GAP, _LEFT, _TOP, _LEGEND = 26, 4, 70, 64, 130
_BOX = 24  # of the shortest computation
_TICK = 40  # between two numbers of the axis, at least
_LIGHTNESS = {
    Kind.FORWARD: 0.78,
    Kind.BACKWARD: 0.55,
    Kind.BACKWARD_INPUT: 0.55,
    Kind.BACKWARD_WEIGHT: 0.4,
}


def as_text(timeline: Timeline, width: int = 120) -> str:
    """Lines of about ``width`` characters at most; a longer schedule continues in further blocks.

    A forward is the number of its micro-batch, a backward has it in brackets (of a split one the
    weight gradients in angle brackets), and with several chunks a letter names the chunk. A time
    unit is as wide as the numbers need.
    """
    chunks = _chunks(timeline)
    spans = [span for row in timeline.stages for span in row]
    unit = max(-(-len(_framed(span.action, chunks)) // (span.end - span.start)) for span in spans)
    names = [f"stage {stage}" for stage in range(len(timeline.stages))]
    margin = max(map(len, names)) + 1
    rows = [_row_text(row, timeline.makespan, unit, chunks) for row in timeline.stages]
    axis = "".join(f"{at:<{_TICK_UNITS * unit}}" for at in range(0, timeline.makespan, _TICK_UNITS))
    block = max((width - margin) // (_TICK_UNITS * unit), 1) * _TICK_UNITS * unit
    blocks = []
    for start in range(0, timeline.makespan * unit, block):
        part = slice(start, start + block)
        lines = [
            " " * margin + axis[part],
            *(f"{name:<{margin}}{row[part]}" for name, row in zip(names, rows, strict=True)),
        ]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def as_svg(timeline: Timeline, title: str) -> str:
    """An SVG document: a colour per chunk, an axis in time units, a legend.

    Forwards are light, backwards dark, weight gradients apart from them darker.
    """
    chunks, rows = _chunks(timeline), len(timeline.stages)
    unit = max(_BOX // min(span.end - span.start for row in timeline.stages for span in row), 2)
    bottom = _TOP + rows * (_ROW + _GAP)
    width = max(
        _LEFT + timeline.makespan * unit + _GAP,
        _LEFT + (chunks * len(_kinds(timeline)) + 1) * _LEGEND,
        8 * len(title),
    )
    share = (
        f"makespan {timeline.makespan} time units, "
        f"bubble {timeline.bubble_share:.1%} of the stages' time"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 80}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        _label(8, 22, title, "start", 14),
        _label(8, 42, share, "start", 12),
    ]
    for stage, row in enumerate(timeline.stages):
        top = _TOP + stage * (_ROW + _GAP)
        parts += [
            _label(8, top + 17, f"stage {stage}", "start"),
            _box(_LEFT, top, timeline.makespan * unit, "#eeeeee"),
        ]
        for span in row:
            left, wide = _LEFT + span.start * unit, (span.end - span.start) * unit
            text = str(span.action.micro_batch)
            parts.append(
                _box(left, top, wide, _colour(span.action.kind, span.action.chunk, chunks), "white")
            )
            parts += [_label(left + wide // 2, top + 17, text)] if 7 * len(text) <= wide else []
    parts += [
        *_axis(timeline.makespan, unit, bottom),
        *_legend(_kinds(timeline), chunks, bottom + 46),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of its computations, in one order."""
    found = {span.action.kind for row in timeline.stages for span in row}
    return [kind for kind in Kind if kind in found]


def _chunks(timeline: Timeline) -> int:
    return 1 + max(span.action.chunk for row in timeline.stages for span in row)


def _framed(action: Action, chunks: int) -> str:
    """The text of a computation; what stands between the two ends of a backward may be widened."""
    letter = string.ascii_lowercase[action.chunk % 26] if chunks > 1 else ""
    text = f"{action.micro_batch}{letter}"
    if action.kind is Kind.BACKWARD_WEIGHT:
        return f"<{text}>"
    return f"{text} " if action.kind is Kind.FORWARD else f"[{text}]"


def _row_text(row: tuple[Span, ...], makespan: int, unit: int, chunks: int) -> str:
    idle = f"{_IDLE:<{unit}}"
    parts, at = [], 0
    for span in row:
        framed, wide = _framed(span.action, chunks), (span.end - span.start) * unit
        parts += [idle * (span.start - at), f"{framed[:-1]:<{wide - 1}}{framed[-1]}"]
        at = span.end
    return "".join([*parts, idle * (makespan - at)])


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    shade = colorsys.hls_to_rgb((0.58 + chunk / chunks) % 1, _LIGHTNESS[kind], 0.65)
    return "#" + "".join(f"{round(255 * value):02x}" for value in shade)


def _axis(makespan: int, unit: int, top: int) -> Iterator[str]:
    step = next(
        size * 10**power
        for power in range(10)
        for size in (1, 2, 5)
        if size * 10**power * unit >= _TICK
    )
    yield f'<path d="M{_LEFT} {top}h{makespan * unit}" stroke="black"/>'
    for at in range(0, makespan + 1, step):
        yield f'<path d="M{_LEFT + at * unit} {top}v5" stroke="black"/>'
        yield _label(_LEFT + at * unit, top + 17, str(at))
    yield _label(8, top + 17, "time units", "start")


def _legend(kinds: Sequence[Kind], chunks: int, top: int) -> Iterator[str]:
    left = _LEFT
    for chunk in range(chunks):
        for kind in kinds:
            name = (f"chunk {chunk} " if chunks > 1 else "") + kind.value.replace("_", " ")
            yield _box(left, top, 18, _colour(kind, chunk, chunks))
            yield _label(left + 24, top + 17, name, "start")
            left += _LEGEND
    yield _box(left, top, 18, "#eeeeee") + _label(left + 24, top + 17, "idle", "start")


def _box(left: int, top: int, width: int, fill: str, stroke: str = "none") -> str:
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{_ROW}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def _label(left: int, top: int, text: str, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
