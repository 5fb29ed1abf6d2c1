"""Layout of a rank's training state in a snapshot slot: the contract of trainer and daemon.

A slot is one flat range of bytes. Each :class:`ShardPiece` names the part of a logical parameter
(and its optimizer state) at an offset, so that the daemon can write standard files, and any later
layout can find what it needs. Values are in the host's byte order (little-endian) and C order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The state of every optimizer: float32 parameters. Further states are named by the optimizer.
MASTER = "master"
_STATE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A contiguous piece of one parameter's state in a slot.

    ``start``/``stop`` bound the tensor-parallel box inside ``global_shape`` (one entry per
    dimension); ``flat_start``/``flat_stop`` bound the piece inside that box, flattened in C order
    (data-parallel sharding cuts flat buffers). ``primary`` is true on the one rank that writes this
    piece to storage; replicas only keep it.
    """

    name: str
    state: str
    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    flat_start: int
    flat_stop: int
    slot_offset_bytes: int
    primary: bool

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the tensor-parallel box."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece in the slot."""
        return (self.flat_stop - self.flat_start) * DTYPE_BYTES[self.dtype]

    def check(self) -> None:
        """Raise ValueError if the piece contradicts itself."""
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
            )
        if not is_state_name(self.state):
            raise ValueError(
                f"{self.name}: {self.state!r} is not the name of an optimizer state: "
                "use a-z, 0-9 and '_', a letter first"
            )
        inside = all(
            0 <= low <= high <= size
            for low, high, size in zip(self.start, self.stop, self.global_shape, strict=True)
        )
        if not inside or not 0 <= self.flat_start <= self.flat_stop <= math.prod(self.box_shape):
            raise ValueError(f"{self.name}: piece lies outside its parameter: {self}")


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """All pieces of one rank. ``slot_bytes`` is the size of their slot."""

    pieces: tuple[ShardPiece, ...]
    slot_bytes: int

    def digest(self) -> str:
        """SHA-256 of the layout; with equal digests slots can be exchanged byte for byte."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"slot_bytes": self.slot_bytes, "pieces": [asdict(piece) for piece in self.pieces]}


def is_state_name(name: str) -> bool:
    """Whether this can name an optimizer state: a-z, 0-9 and '_', a letter first, up to 63."""
    return _STATE_NAME.fullmatch(name) is not None


def layout_from_dict(values: Mapping[str, Any]) -> ShardLayout:
    """The inverse of :meth:`ShardLayout.to_dict`.

    Raises:
        ValueError: a piece contradicts itself or lies outside the slot.
    """
    pieces = tuple(_piece(item) for item in values["pieces"])
    layout = ShardLayout(pieces, int(values["slot_bytes"]))
    for piece in pieces:
        piece.check()
        if (
            piece.slot_offset_bytes < 0
            or piece.slot_offset_bytes + piece.size_bytes > layout.slot_bytes
        ):
            raise ValueError(
                f"{piece.name}: piece lies outside the slot of {layout.slot_bytes} bytes"
            )
    return layout


def _piece(item: Mapping[str, Any]) -> ShardPiece:
    values = dict(item)
    for key in ("global_shape", "start", "stop"):
        values[key] = tuple(int(v) for v in values[key])
    return ShardPiece(**values)
