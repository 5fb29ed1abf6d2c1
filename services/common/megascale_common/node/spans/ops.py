"""The operations of spans: each record has a number, and each rank has one table of names.

Numbers belong to a rank, in the order of registration. Operations of two ranks are the same if
name, kind and group are.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple, get_args

# part: computation inside a forward or backward, in whose time it is. figure: no time but a number,
# see figure_ns.
Kind = Literal["compute", "collective", "p2p", "host", "part", "figure"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_OPS = 256
MAX_NAME_CHARS = 48


class Op(NamedTuple):
    """An operation.

    ``group`` names the communication group of a collective or transfer as the status page does
    (world, tp, dp, ...), which together with the rank determines the members; otherwise it is "".
    """

    name: str
    kind: Kind
    group: str = ""


STEP = Op("step", "host")  # from one step's begin to the next's
FORWARD = Op("forward", "compute")
BACKWARD = Op("backward", "compute")  # the input gradients only if the backward pass is split
BACKWARD_WEIGHT = Op("backward_weight", "compute")
OPTIMIZER = Op("optimizer", "compute")
DATA_WAIT = Op("data_wait", "host")
SNAPSHOT = Op("snapshot", "host")
GARBAGE = Op("garbage_collection", "host")
EVALUATION = Op("evaluation", "host")  # between two steps, but within the first one's span
# Layers with experts: the choice of experts, rows to their ranks, the experts themselves, and their
# results back. They are inside a forward or backward, which has one span of each for all layers.
ROUTER = Op("router", "part")
DISPATCH = Op("dispatch", "collective", "ep")
EXPERTS = Op("experts", "part")
COMBINE = Op("combine", "collective", "ep")
SUMMED_OPS = frozenset({ROUTER, DISPATCH, EXPERTS, COMBINE})
# Rows of the rank's experts in a step over the mean of its ep group; 1 is even.
EXPERT_SHARE = Op("expert_share", "figure")
# A hot expert of the rank in a step: ``micro_batch`` is the expert, ``seq`` its layer, and the
# figure its share of the choices times the number of experts.
HOT_EXPERT = Op("hot_expert", "figure")
_FIGURE_UNIT = 1e6


def figure_ns(value: float) -> int:
    """A figure, a finite number of at least 0, as the duration of its span: millionths."""
    return round(value * _FIGURE_UNIT)


def figure_of(duration_ns: int) -> float:
    """The inverse of :func:`figure_ns`."""
    return duration_ns / _FIGURE_UNIT


class OpRegistry:
    """The operations of one rank; an operation's number is its position."""

    def __init__(self) -> None:
        self._numbers: dict[Op, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, op: Op) -> int:
        """Number of an operation; a new one is registered.

        Raises:
            ValueError: MAX_OPS are registered, or a name is too long.
        """
        known = self._numbers.get(op)
        if known is not None:
            return known
        if len(self._numbers) == MAX_OPS:
            raise ValueError(f"a rank has at most {MAX_OPS} kinds of spans; {op} is one too many")
        if max(len(op.name), len(op.group)) > MAX_NAME_CHARS:
            raise ValueError(f"{op}: a name has at most {MAX_NAME_CHARS} characters")
        self._numbers[op] = len(self._numbers)
        return self._numbers[op]

    def ops(self) -> tuple[Op, ...]:
        """All operations, in the order of their numbers."""
        return tuple(self._numbers)


def dump(ops: tuple[Op, ...]) -> bytes:
    """Operations as JSON: a list of [name, kind, group]."""
    return json.dumps(ops, separators=(",", ":")).encode()


def load(data: bytes) -> tuple[Op, ...]:
    """The inverse of :func:`dump`.

    Raises:
        ValueError: not such a list, or more than MAX_OPS.
    """
    found = json.loads(data)
    if not isinstance(found, list) or len(found) > MAX_OPS:
        raise ValueError(f"operations are a list of at most {MAX_OPS}")
    return tuple(_op(entry) for entry in found)


def _op(entry: object) -> Op:
    match entry:
        case [str(name), str(kind), str(group)] if kind in KINDS:
            if max(len(name), len(group)) <= MAX_NAME_CHARS:
                return Op(name, kind, group)
    raise ValueError(f"an operation is [name, kind, group], got {str(entry)[:100]}")
