"""Initial values that depend on the seed, the parameter's name and the global index alone.

Values 2 i and 2 i + 1 of a parameter come from output i of a counter-based generator (Philox;
Salmon et al., SC 2011) keyed by seed and name, so any rank can draw any part of any parameter, and
all layouts start from the same bits. A rank draws only its own shard, in float32: on a CPU with
numpy, which has vector code for log, cos and sin, and on a GPU with torch, 25 times as fast. The
random bits are the same on both; log, cos and sin can differ in the last place.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch

from megascale_job.sizes.parameter_table import ParameterSlice, ParameterTable

_OUTPUTS_PER_COUNT = 4  # 64-bit outputs that one step of Philox's counter gives
# Values drawn at a time: temporaries of half a MiB stay in the cache (twice as fast as 4 MiB).
_CHUNK = 1 << 17
_BITS = 24  # random bits of a uniform number: as many as float32 holds exactly
_DEVICE_CHUNK = 1 << 24  # values that a device draws at a time, with temporaries of some 0.5 GiB
# Philox4x64-10: the multipliers, and the numbers added to the keys after each round.
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


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
    key = _key(name, seed)
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


def normal_on(device: torch.device, name: str, seed: int, start: int, stop: int) -> torch.Tensor:
    """:func:`normal` drawn by a device: float32 [stop - start]."""
    first, last = start // 2, -(-stop // 2)
    counters = range(first // _OUTPUTS_PER_COUNT, -(-last // _OUTPUTS_PER_COUNT))
    raw = _philox(device, _key(name, seed), counters)[first % _OUTPUTS_PER_COUNT :]
    raw = raw[: last - first]
    angle = _upper_bits(raw & _LOW) * (2.0 * math.pi * 2.0**-_BITS)
    radius = ((_upper_bits(_shifted(raw, 32)) + 1.0) * 2.0**-_BITS).log_().mul_(-2.0).sqrt_()
    values = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()
    return values[start - 2 * first : stop - 2 * first]


def fill_shard(shard: torch.Tensor, table: ParameterTable, seed: int) -> None:
    """Write this rank's initial values into ``shard``; padding is zero.

    Args:
        shard: float32 [table.shard_elements].
    """
    shard.zero_()
    for owned, piece, first, stop in table.overlaps():
        position = owned.shard_offset + first - owned.start
        target, start = shard[position : position + stop - first], first - piece.offset
        step = _CHUNK if shard.device.type == "cpu" else _DEVICE_CHUNK
        for low in range(0, len(target), step):
            _fill(target[low : low + step], piece, seed, start + low)


def _fill(target: torch.Tensor, piece: ParameterSlice, seed: int, start: int) -> None:
    stop = start + len(target)
    if target.device.type == "cpu" or piece.initial != "normal":
        target.copy_(torch.from_numpy(initial_values(piece, seed, start, stop)))
        return
    offset = piece.global_offset
    values = normal_on(target.device, piece.name, seed, offset + start, offset + stop)
    torch.mul(values, piece.std, out=target)


def _key(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


def _philox(device: torch.device, key: int, counters: range) -> torch.Tensor:
    """Outputs of Philox4x64-10 for ``counters``, counted as numpy does: int64 [4 len(counters)].

    torch has no unsigned arithmetic: an int64 holds the same 64 bits, and products and sums of both
    types wrap around alike.
    """
    keys = [key & (2**64 - 1), key >> 64]
    # numpy increments the counter before it draws.
    first = torch.arange(counters.start + 1, counters.stop + 1, dtype=torch.int64, device=device)
    words = [first, *(torch.zeros_like(first) for _ in range(3))]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(words[place], factor)
            for place, factor in zip((0, 2), _MULTIPLIERS, strict=True)
        )
        words = [
            high_1 ^ words[1] ^ _signed(keys[0]),
            low_1,
            high_0 ^ words[3] ^ _signed(keys[1]),
            low_0,
        ]
        keys = [(k + step) % 2**64 for k, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(words, dim=1).flatten()


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 64 bits of an unsigned product, computed from 32-bit halves."""
    low, high = word & _LOW, _shifted(word, 32)
    factor_low, factor_high = factor & _LOW, factor >> 32
    middle = high * factor_low + _shifted(low * factor_low, 32)
    other = low * factor_high + (middle & _LOW)
    upper = high * factor_high + _shifted(middle, 32) + _shifted(other, 32)
    return upper, word * _signed(factor)


def _shifted(word: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right as unsigned numbers."""
    return (word >> places) & ((1 << (64 - places)) - 1)


def _upper_bits(halves: torch.Tensor) -> torch.Tensor:
    """The upper ``_BITS`` of 32-bit numbers, in float32, which holds them exactly."""
    return (halves >> (32 - _BITS)).to(torch.float32)


def _signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number
