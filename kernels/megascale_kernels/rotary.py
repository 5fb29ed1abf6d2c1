"""From the input GEMM's columns to the heads of attention, with rotary position embedding.

Rotary embedding (Su et al., arXiv 2104.09864) in its half-split form: pair i is (x[i], x[i + d/2]).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: ``query`` of q, ``key_value`` each of k and v, ``size`` (d) wide."""

    query: int
    key_value: int
    size: int

    @property
    def width(self) -> int:
        """Columns of q, k and v beside each other."""
        return (self.query + 2 * self.key_value) * self.size


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of every token's angles, float32 [S, B, 1, d/2], contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_table(position: torch.Tensor, head_size: int, theta: float) -> RotaryTable:
    """Angles position * theta^(-2i/d) for i below d/2.

    Args:
        position: integer [B, S].
        head_size: d, even.

    Raises:
        ValueError: ``head_size`` is odd.
    """
    if head_size % 2:
        raise ValueError(
            f"rotary embedding needs an even head size, got {head_size}:"
            " change hidden_size or heads"
        )
    # float64: at position 100,000 a float32 angle is off by 0.004 rad.
    pair = torch.arange(head_size // 2, device=position.device, dtype=torch.float64)
    angle = position.t().contiguous()[:, :, None, None].double() * theta ** (
        -2.0 * pair / head_size
    )
    return RotaryTable(angle.cos().float(), angle.sin().float())


def split_heads(
    inputs: torch.Tensor, heads: Heads, table: RotaryTable | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of attention, [B, heads, S, d] each.

    Args:
        inputs: [S, B, heads.width]: the columns of q, then k, then v.
        table: q and k are rotated by it; None: no rotation.
    """
    apart = inputs.reshape(*inputs.shape[:2], -1, heads.size)
    q, k, v = apart.tensor_split((heads.query, heads.query + heads.key_value), dim=2)
    if table is not None:
        q, k = apply_rotary(q, table), apply_rotary(k, table)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def apply_rotary(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Rotate ``x`` [S, B, heads, d]; computed in float32, returned in the dtype of ``x``."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * table.cos - second * table.sin, second * table.cos + first * table.sin),
        dim=-1,
    )
    return rotated.to(x.dtype)
