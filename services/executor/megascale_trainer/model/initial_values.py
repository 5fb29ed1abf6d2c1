"""Initial values that depend on the seed, the parameter's name and the global index alone.

Values 2 i and 2 i + 1 of a parameter come from output i of a counter-based generator (Philox;
Salmon et al., SC 2011) keyed by seed and name, so any rank can draw any part of any parameter, and
all layouts start from the same bits. A rank draws its own shard alone, in float32, for which numpy
has vector code for log, cos and sin.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from megascale_common.sizes.parameter_slices import ParameterSlice, ParameterTable

_OUTPUTS_PER_COUNT = 4  # 64-bit outputs that one step of Philox's counter gives
# Values drawn at a time: temporaries of half a MiB stay in the cache (twice as fast as of 4 MiB).
_CHUNK = 1 << 17
_BITS = 24  # of randomness in a uniform number: float32 holds that many exactly


def initial_values(
    piece: ParameterSlice, seed: int, start: int, stop: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values ``start:stop`` (indices into the flattened box) of a slice, float32 [stop - start]."""
    if piece.initial != "normal":
        return np.full(stop - start, 1.0 if piece.initial == "ones" else 0.0, dtype=np.float32)
    values = normal(piece.name, seed, piece.global_offset + start, piece.global_offset + stop)
    return values * np.float32(piece.std)


def normal(name: str, seed: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Standard normal values ``start:stop`` of the endless sequence of ``(seed, name)``.

    Box-Muller gives two values per output.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    first, last = start // 2, -(-stop // 2)
    skipped = first % _OUTPUTS_PER_COUNT
    generator = np.random.Philox(key=key, counter=first // _OUTPUTS_PER_COUNT)
    raw = generator.random_raw(skipped + last - first)[skipped:]
    halves = (raw.astype("<u8", copy=False).view("<u4") >> np.uint32(32 - _BITS)).astype(np.float32)
    angle = halves[0::2] * np.float32(2.0 * np.pi * 2.0**-_BITS)
    radius = np.sqrt(
        np.float32(-2.0) * np.log((halves[1::2] + np.float32(1.0)) * np.float32(2.0**-_BITS))
    )
    values = np.empty(2 * len(raw), np.float32)
    np.multiply(radius, np.cos(angle), out=values[0::2])
    np.multiply(radius, np.sin(angle), out=values[1::2])
    return values[start - 2 * first : stop - 2 * first]


def fill_shard(shard: torch.Tensor, table: ParameterTable, seed: int) -> None:
    """Write this rank's initial values into ``shard``; padding is zero.

    Args:
        shard: float32 [table.shard_elements].
    """
    shard.zero_()
    for owned, piece, start, stop in table.overlaps():
        for low in range(start, stop, _CHUNK):
            high = min(low + _CHUNK, stop)
            values = initial_values(piece, seed, low - piece.offset, high - piece.offset)
            position = owned.shard_offset + low - owned.start
            shard[position : position + high - low] = torch.from_numpy(values)
