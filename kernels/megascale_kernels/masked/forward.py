"""The forward kernel of attention inside documents and windows, and helpers of both directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_HEAD_SIZE = 512  # one block holds a head's columns
_LOG2_E = tl.constexpr(1.4426950408889634)


class Kept(NamedTuple):
    """The tensors that a forward keeps for its backward.

    They are the arguments of :func:`megascale_kernels.masked.attention.masked_attention`, its
    result ``out``, and ``sums``, float32 [B, heads, S]: the logarithms to the base 2 of the sums of
    weights.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    first: torch.Tensor
    until: torch.Tensor
    out: torch.Tensor
    sums: torch.Tensor


def results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``sums`` of :class:`Kept`, from its first tensors."""
    batch, sequence, heads, _ = query.shape
    out = torch.empty_like(query)
    sums = torch.empty(batch, heads, sequence, dtype=torch.float32, device=query.device)
    queries, keys, options = tiles(query, backward=False)
    _masked_attention_kernel[triton.cdiv(sequence, queries), batch * heads](
        query,
        key,
        value,
        first,
        out,
        sums,
        heads,
        heads // key.shape[2],
        sequence,
        query.shape[3] ** -0.5,
        *constants(query, queries, keys),
        **options,
    )
    return out, sums


def tiles(query: torch.Tensor, *, backward: bool) -> tuple[int, int, dict[str, int]]:
    """Queries and keys of a tile that fits Hopper's shared memory, and the launch options."""
    row_bytes = _columns(query) * query.element_size()
    if query.dtype is torch.float32:  # three times the products, so smaller tiles
        row_bytes *= 2
    if row_bytes <= 128:
        return (64, 64, _options(4, 2)) if backward else (128, 64, _options(4, 3))
    if row_bytes <= 256:
        return (64, 64, _options(8, 2)) if backward else (128, 64, _options(8, 3))
    if row_bytes <= 512:
        return (32, 32, _options(4, 1)) if backward else (64, 32, _options(4, 2))
    if row_bytes <= 1024:
        return (32, 32, _options(8, 1)) if backward else (32, 32, _options(4, 1))
    return 16, 16, _options(4, 1)


def _options(warps: int, stages: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": stages}


def _columns(query: torch.Tensor) -> int:
    return max(int(triton.next_power_of_2(query.shape[3])), 16)  # a product's least depth


def constants(query: torch.Tensor, queries: int, keys: int) -> tuple[int, int, int, int, str]:
    """SIZE, COLUMNS, QUERIES, KEYS and PRECISION.

    A product of float32 consists of three TF32 products, exact to about 2^-21, or of one if torch
    is set to use TF32.
    """
    fast = torch.backends.cuda.matmul.allow_tf32
    return query.shape[3], _columns(query), queries, keys, "tf32" if fast else "tf32x3"


@triton.jit
def rows_of(
    x: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    sequence: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """[rows, COLUMNS] of one head at ``x``; 0 outside."""
    column = tl.arange(0, COLUMNS)
    here = (row[:, None] < sequence) & (column[None, :] < SIZE)
    return tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=here, other=0.0)


@triton.jit
def put_rows(
    x: tl.tensor,
    value: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    sequence: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store [rows, COLUMNS] of one head at ``x``."""
    column = tl.arange(0, COLUMNS)
    here = (row[:, None] < sequence) & (column[None, :] < SIZE)
    at = x + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=here)


@triton.jit
def key_runs(
    first: tl.tensor,
    begin: tl.tensor,
    sequence: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four bounds of the three runs of keys that a block of queries sees.

    All queries of the block see the keys of the middle run, which needs no mask.
    """
    end = tl.minimum(begin + QUERIES, sequence)
    lowest = tl.load(first + begin) // KEYS * KEYS
    all_see = tl.minimum(tl.cdiv(tl.load(first + end - 1), KEYS) * KEYS, end)
    return lowest, all_see, tl.maximum(all_see, (begin + 1) // KEYS * KEYS), end


@triton.jit
def scores_of(
    q: tl.tensor,
    k: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    first_key: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """[queries, keys] of scaled products, to the base 2; -inf where a key is not seen."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
    if MASKED:
        seen = (column[None, :] <= row[:, None]) & (column[None, :] >= first_key[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend(
    state: tl.tuple,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    row: tl.tensor,
    first_key: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key_stride: tl.tensor,
    sequence: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running maximum, sum and result of some queries, after keys ``begin`` to ``end``."""
    highest, total, result = state
    for at in range(begin, end, KEYS):
        column = at + tl.arange(0, KEYS)
        keys = rows_of(k, key_stride, column, sequence, SIZE, COLUMNS)
        scores = scores_of(q, keys, row, column, first_key, scale, MASKED, PRECISION)
        new = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that has seen no key yet has the maximum -inf, and -inf minus -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        # The sums so far are relative to the old maximum: they are rescaled to the new one.
        kept = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        values = rows_of(v, key_stride, column, sequence, SIZE, COLUMNS)
        total = total * kept + tl.sum(weights, axis=1)
        result = tl.dot(
            weights.to(values.dtype), values, result * kept[:, None], input_precision=PRECISION
        )
        highest = new
    return highest, total, result


@triton.jit
def _masked_attention_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    first: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    heads: tl.tensor,
    shared: tl.tensor,
    sequence: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """QUERIES of one head: their results, and the logarithms (base 2) of their sums."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    # The first row of this head; tensors are [B, S, heads, SIZE].
    queries_at = batch * sequence * heads * SIZE + head * SIZE
    keys_at = batch * sequence * (heads // shared) * SIZE + head // shared * SIZE
    query_row, key_row = heads * SIZE, heads // shared * SIZE
    begin = tl.program_id(0) * QUERIES
    row = begin + tl.arange(0, QUERIES)
    first += batch * sequence
    first_key = tl.load(first + row, mask=row < sequence, other=0)
    q = rows_of(query + queries_at, query_row, row, sequence, SIZE, COLUMNS)
    k, v = key + keys_at, value + keys_at
    lowest, all_see, outer, end = key_runs(first, begin, sequence, QUERIES, KEYS)
    state = (
        tl.full([QUERIES], float("-inf"), tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES, COLUMNS], tl.float32),
    )
    begins, ends = (lowest, all_see, outer), (all_see, outer, end)
    for run in tl.static_range(3):
        state = _attend(
            state=state,
            q=q,
            k=k,
            v=v,
            row=row,
            first_key=first_key,
            begin=begins[run],
            end=ends[run],
            key_stride=key_row,
            sequence=sequence,
            scale=scale,
            SIZE=SIZE,
            COLUMNS=COLUMNS,
            KEYS=KEYS,
            MASKED=run != 1,
            PRECISION=PRECISION,
        )
    highest, total, result = state
    put_rows(out + queries_at, result / total[:, None], query_row, row, sequence, SIZE, COLUMNS)
    tl.store(
        sums + tl.program_id(1).to(tl.int64) * sequence + row,
        highest + tl.log2(total),
        mask=row < sequence,
    )
