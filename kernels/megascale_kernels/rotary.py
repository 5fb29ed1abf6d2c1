"""From the input GEMM's columns to the heads of attention, with rotary position embedding.

Rotary embedding (Su et al., arXiv 2104.09864) in its half-split form: pair i is (x[i], x[i + d/2]).
Before it, q and k may be normalised (Henry et al., arXiv 2010.04245): every head, as in Qwen 3, or
all heads of a token together, as in OLMoE (arXiv 2409.02060).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megascale_kernels.norm import norm
from megascale_kernels.parameter import Parameter

NormedOver = Literal["heads", "projection"]


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: ``query`` of q, ``key_value`` each of k and v, ``size`` (d) wide."""

    query: int
    key_value: int
    size: int

    @property
    def width(self) -> int:
        """The number of columns of q, k and v together."""
        return (self.query + 2 * self.key_value) * self.size


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every token's angles, times the table's scale; float32 [S, B, 1, d/2].

    Both are contiguous.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the RMSNorm of q and of that of k.

    ``over`` heads: of every head, weights [d]. ``over`` projection: of all heads of a token
    together, weights [heads * d].
    """

    query: Parameter
    key: Parameter
    epsilon: float
    over: NormedOver = "heads"


def rotary_frequencies(head_size: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta^(-2i/d) for i below d/2, float64 [d/2], in radians per position.

    Raises:
        ValueError: ``head_size`` d is odd.
    """
    if head_size % 2:
        raise ValueError(
            f"rotary embedding needs an even head size, got {head_size}:"
            " change hidden_size, heads or head_dim"
        )
    pair = torch.arange(head_size // 2, device=device, dtype=torch.float64)
    return theta ** (-2.0 * pair / head_size)


def llama3_frequencies(
    frequencies: torch.Tensor,
    factor: float,
    low_factor: float,
    high_factor: float,
    original_length: int,
) -> torch.Tensor:
    """Frequencies for longer sequences, as in Llama 3.1.

    Wavelengths above ``original_length / low_factor`` tokens grow by ``factor``, those below
    ``original_length / high_factor`` stay. In between the two are mixed, with shares that are
    linear in the number of turns in a sequence of ``original_length``.
    """
    turns = original_length * frequencies / (2.0 * math.pi)
    kept = ((turns - low_factor) / (high_factor - low_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def yarn_frequencies(
    frequencies: torch.Tensor,
    theta: float,
    factor: float,
    fast: float,
    slow: float,
    original_length: int,
) -> torch.Tensor:
    """Frequencies for longer sequences by YaRN (Peng et al., arXiv 2309.00071).

    Those that turn more than ``fast`` times in ``original_length`` tokens stay, those that turn
    less than ``slow`` times are divided by ``factor``. In between the two are mixed, with shares
    that are linear in the number of the pair. Both bounds are rounded outwards to whole pairs, as
    in the authors' code.

    Args:
        frequencies: float64 [d/2], those of ``theta``.
        theta: base of ``frequencies``.
        factor: how much longer sequences are.
        fast: turns, above ``slow``.
        slow: turns, at most those of the first pair in ``original_length`` tokens.
        original_length: tokens.
    """
    size = 2 * len(frequencies)

    def pair(turns: float) -> float:
        length = math.log(original_length / (2.0 * math.pi)) - math.log(turns)
        return size * length / (2.0 * math.log(theta))

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), size - 1)
    number = torch.arange(size // 2, device=frequencies.device, dtype=torch.float64)
    divided = ((number - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return divided * frequencies / factor + (1.0 - divided) * frequencies


def rotary_table(
    position: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0
) -> RotaryTable:
    """Angles position * frequency.

    Args:
        position: integer [B, S].
        frequencies: float64 [d/2]: at position 100,000 a float32 angle is off by 0.004 rad.
        scale: multiplies cos and sin, and so what they rotate.
    """
    angle = position.t().contiguous()[:, :, None, None].double() * frequencies
    return RotaryTable(angle.cos().mul_(scale).float(), angle.sin().mul_(scale).float())


def split_heads(
    inputs: torch.Tensor,
    heads: Heads,
    table: RotaryTable | None,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of attention, [B, heads, S, d] each.

    Args:
        inputs: [S, B, heads.width]: the columns of q, then k, then v.
        table: q and k are rotated by it; None: no rotation.
        norms: q and k are normalised by it before that; None: they are not.
    """
    apart = inputs.reshape(*inputs.shape[:2], -1, heads.size)
    q, k, v = apart.tensor_split((heads.query, heads.query + heads.key_value), dim=2)
    if norms is not None:
        normed = norm_heads if norms.over == "heads" else norm_projection
        q, k = normed(q, norms.query, norms.epsilon), normed(k, norms.key, norms.epsilon)
    if table is not None:
        q, k = apply_rotary(q, table), apply_rotary(k, table)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def norm_heads(x: torch.Tensor, weight: Parameter, epsilon: float) -> torch.Tensor:
    """RMSNorm of ``x`` [..., d] over d by ``weight`` [d]; computed in float32, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normed * weight.tracked().to(wide.dtype)).to(x.dtype)


def norm_projection(x: torch.Tensor, weight: Parameter, epsilon: float) -> torch.Tensor:
    """RMSNorm of ``x`` [..., heads, d] over both by ``weight`` [heads * d]."""
    _, normed = norm(x.flatten(-2), None, weight, None, "rmsnorm", epsilon)
    return normed.view(x.shape)


def apply_rotary(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Rotate ``x`` [S, B, heads, d]; computed in float32, returned in the dtype of ``x``."""
    # The products with float32 angles are float32; bf16 would round between the steps.
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * table.cos - second * table.sin, second * table.cos + first * table.sin),
        dim=-1,
    )
    return rotated.to(x.dtype)
