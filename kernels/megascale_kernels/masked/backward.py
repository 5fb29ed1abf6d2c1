"""Gradients of :mod:`megascale_kernels.masked.attention`, by two kernels without atomics.

One kernel owns a block of queries and walks over the keys that they see. The other owns a block of
keys and walks over the queries that see it, for each of the query heads that share it in turn. Both
compute the weights again from the stored logarithms of their sums (FlashAttention-2,
arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels.masked.forward import (
    Kept,
    constants,
    key_runs,
    put_rows,
    rows_of,
    scores_of,
    tiles,
)


def gradients(d_out: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value from that of ``out``, [B, S, heads, d]."""
    query, key, value, first, until, out, sums = kept
    batch, sequence, heads, size = query.shape
    shared = heads // key.shape[2]
    d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
    products = torch.empty_like(sums)
    queries, keys, options = tiles(query, backward=True)
    d_out = d_out.contiguous()
    sizes = constants(query, queries, keys)
    _masked_attention_query_kernel[triton.cdiv(sequence, queries), batch * heads](
        query,
        key,
        value,
        out,
        d_out,
        first,
        sums,
        products,
        d_query,
        heads,
        shared,
        sequence,
        size**-0.5,
        *sizes,
        **options,
    )
    _masked_attention_key_kernel[triton.cdiv(sequence, keys), batch * key.shape[2]](
        query,
        key,
        value,
        d_out,
        first,
        until,
        sums,
        products,
        d_key,
        d_value,
        heads,
        shared,
        sequence,
        size**-0.5,
        *sizes,
        **options,
    )
    return d_query, d_key, d_value


@triton.jit
def _query_gradient(
    d_q: tl.tensor,
    q: tl.tensor,
    gradient: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    row: tl.tensor,
    first_key: tl.tensor,
    total: tl.tensor,
    product: tl.tensor,
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
) -> tl.tensor:
    """``d_q`` (unscaled) of a block of queries, plus the share of keys ``begin`` to ``end``."""
    for at in range(begin, end, KEYS):
        column = at + tl.arange(0, KEYS)
        keys = rows_of(k, key_stride, column, sequence, SIZE, COLUMNS)
        values = rows_of(v, key_stride, column, sequence, SIZE, COLUMNS)
        scores = scores_of(q, keys, row, column, first_key, scale, MASKED, PRECISION)
        weights = tl.exp2(scores - total[:, None])
        d_weights = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
        # The gradient of a softmax: ``product`` is the sum of weights * d_weights over all keys,
        # which equals the product of the result and its gradient.
        d_scores = weights * (d_weights - product[:, None])
        d_q = tl.dot(d_scores.to(keys.dtype), keys, d_q, input_precision=PRECISION)
    return d_q


@triton.jit
def _masked_attention_query_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    d_out: tl.tensor,
    first: tl.tensor,
    sums: tl.tensor,
    products: tl.tensor,
    d_query: tl.tensor,
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
    """The gradient of QUERIES of one head, and the products of their results and gradients."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    # The first row of this head; tensors are [B, S, heads, SIZE].
    queries_at = batch * sequence * heads * SIZE + head * SIZE
    keys_at = batch * sequence * (heads // shared) * SIZE + head // shared * SIZE
    query_row, key_row = heads * SIZE, heads // shared * SIZE
    begin = tl.program_id(0) * QUERIES
    row = begin + tl.arange(0, QUERIES)
    here = row < sequence
    first += batch * sequence
    first_key = tl.load(first + row, mask=here, other=0)
    q = rows_of(query + queries_at, query_row, row, sequence, SIZE, COLUMNS)
    result = rows_of(out + queries_at, query_row, row, sequence, SIZE, COLUMNS)
    gradient = rows_of(d_out + queries_at, query_row, row, sequence, SIZE, COLUMNS)
    product = tl.sum(result.to(tl.float32) * gradient.to(tl.float32), axis=1)
    at = tl.program_id(1).to(tl.int64) * sequence + row
    tl.store(products + at, product, mask=here)
    total = tl.load(sums + at, mask=here, other=0.0)
    k, v = key + keys_at, value + keys_at
    lowest, all_see, outer, end = key_runs(first, begin, sequence, QUERIES, KEYS)
    d_q = tl.zeros([QUERIES, COLUMNS], tl.float32)
    begins, ends = (lowest, all_see, outer), (all_see, outer, end)
    for run in tl.static_range(3):
        d_q = _query_gradient(
            d_q=d_q,
            q=q,
            gradient=gradient,
            k=k,
            v=v,
            row=row,
            first_key=first_key,
            total=total,
            product=product,
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
    put_rows(d_query + queries_at, d_q * scale, query_row, row, sequence, SIZE, COLUMNS)


@triton.jit
def _key_gradient(
    state: tl.tuple,
    keys: tl.tensor,
    values: tl.tensor,
    q: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    sums: tl.tensor,
    products: tl.tensor,
    column: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    query_stride: tl.tensor,
    sequence: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Gradients of a block of keys (unscaled) and values, plus the share of some queries."""
    d_k, d_v = state
    for at in range(begin, end, QUERIES):
        row = at + tl.arange(0, QUERIES)
        here = row < sequence
        queries = rows_of(q, query_stride, row, sequence, SIZE, COLUMNS)
        gradients = rows_of(gradient, query_stride, row, sequence, SIZE, COLUMNS)
        total = tl.load(sums + row, mask=here, other=float("inf"))  # a row outside weighs nothing
        product = tl.load(products + row, mask=here, other=0.0)
        first_key = row
        if MASKED:
            first_key = tl.load(first + row, mask=here, other=0)
        scores = scores_of(queries, keys, row, column, first_key, scale, MASKED, PRECISION)
        weights = tl.exp2(scores - total[:, None])
        d_v = tl.dot(
            tl.trans(weights).to(gradients.dtype), gradients, d_v, input_precision=PRECISION
        )
        d_weights = tl.dot(gradients, tl.trans(values), input_precision=PRECISION)
        d_scores = weights * (d_weights - product[:, None])
        d_k = tl.dot(tl.trans(d_scores).to(queries.dtype), queries, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def _masked_attention_key_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    d_out: tl.tensor,
    first: tl.tensor,
    until: tl.tensor,
    sums: tl.tensor,
    products: tl.tensor,
    d_key: tl.tensor,
    d_value: tl.tensor,
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
    """Gradients of KEYS of one key/value head, over all query heads that share it."""
    key_heads = heads // shared
    batch = (tl.program_id(1) // key_heads).to(tl.int64)
    head = (tl.program_id(1) % key_heads).to(tl.int64)
    begin = tl.program_id(0) * KEYS
    column = begin + tl.arange(0, KEYS)
    end = tl.minimum(begin + KEYS, sequence)
    query_row, key_row = heads * SIZE, key_heads * SIZE
    keys_at = batch * sequence * key_row + head * SIZE
    keys = rows_of(key + keys_at, key_row, column, sequence, SIZE, COLUMNS)
    values = rows_of(value + keys_at, key_row, column, sequence, SIZE, COLUMNS)
    first += batch * sequence
    until += batch * sequence
    # Three runs of queries: they see some of the keys, then all of them, then some again. Only the
    # outer two need a mask.
    last = tl.load(until + end - 1)
    all_see = tl.minimum(tl.cdiv(end - 1, QUERIES) * QUERIES, last)
    outer = tl.maximum(all_see, tl.load(until + begin) // QUERIES * QUERIES)
    lowest = begin // QUERIES * QUERIES
    state = tl.zeros([KEYS, COLUMNS], tl.float32), tl.zeros([KEYS, COLUMNS], tl.float32)
    for each in range(shared):
        sharing = head * shared + each
        queries_at = batch * sequence * query_row + sharing * SIZE
        q, gradient = query + queries_at, d_out + queries_at
        at = (batch * heads + sharing) * sequence
        begins, ends = (lowest, all_see, outer), (all_see, outer, last)
        for run in tl.static_range(3):
            state = _key_gradient(
                state=state,
                keys=keys,
                values=values,
                q=q,
                gradient=gradient,
                first=first,
                sums=sums + at,
                products=products + at,
                column=column,
                begin=begins[run],
                end=ends[run],
                query_stride=query_row,
                sequence=sequence,
                scale=scale,
                SIZE=SIZE,
                COLUMNS=COLUMNS,
                QUERIES=QUERIES,
                MASKED=run != 1,
                PRECISION=PRECISION,
            )
    d_k, d_v = state
    put_rows(d_key + keys_at, d_k * scale, key_row, column, sequence, SIZE, COLUMNS)
    put_rows(d_value + keys_at, d_v, key_row, column, sequence, SIZE, COLUMNS)
