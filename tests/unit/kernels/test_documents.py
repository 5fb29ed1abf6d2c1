"""Documents as offsets: the same documents as by each token's start, for any number and lengths."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_kernels.attention import attention_mask
from megascale_kernels.documents import documents_of


@st.composite
def _starts(draw: st.DrawFn) -> torch.Tensor:
    """Where each token's document starts, int64 [B, S]."""
    batch, sequence = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    begins = draw(st.lists(st.booleans(), min_size=batch * sequence, max_size=batch * sequence))
    index = torch.arange(sequence).expand(batch, -1)
    return torch.where(torch.tensor(begins).view(batch, sequence), index, 0).cummax(1).values


@given(_starts())
def test_bounds_cut_all_tokens_into_the_documents(start: torch.Tensor) -> None:
    batch, sequence = start.shape
    documents = documents_of(start)
    bounds = documents.bounds.tolist()
    assert documents.shape == (batch, sequence)
    assert len(bounds) == documents.number + 1
    lengths = [end - begin for begin, end in pairwise(bounds)]
    assert min(lengths) > 0 and max(lengths) == documents.longest and sum(lengths) == start.numel()
    assert {row * sequence for row in range(batch)} <= set(bounds), (
        "no document crosses from one sequence to the next"
    )
    token = [row * sequence + int(first) for row in range(batch) for first in start[row].unique()]
    assert bounds[:-1] == token


@given(_starts())
def test_offsets_have_one_length_and_end_in_the_number_of_tokens(start: torch.Tensor) -> None:
    documents = documents_of(start)
    assert documents.offsets.shape == (start.numel() + 1,)
    assert documents.offsets.dtype == documents.bounds.dtype == torch.int32
    assert (documents.offsets[documents.number :] == start.numel()).all()


@given(_starts(), st.integers(0, 13))
def test_offsets_mean_what_the_starts_mean(start: torch.Tensor, window: int) -> None:
    sequence = start.shape[1]
    documents = documents_of(start)
    assert torch.equal(documents.starts().long(), start)
    query, key = torch.arange(sequence)[:, None], torch.arange(sequence)[None, :]
    seen = (key <= query) & (key >= start[:, :, None]) & (key > query - (window or sequence))
    mask = attention_mask(sequence, window=window, documents=documents)
    found = (key <= query)[None] if mask.dense is None else mask.dense[:, 0]
    assert torch.equal(found.expand_as(seen), seen)


def test_any_change_of_start_begins_a_document() -> None:
    assert documents_of(torch.tensor([[0, 0, 2, 2], [0, 1, 2, 2]])).bounds.tolist() == [
        0,
        2,
        4,
        5,
        6,
        8,
    ]
    assert documents_of(torch.zeros(2, 4, dtype=torch.int32)).bounds.tolist() == [0, 4, 8]


def test_documents_of_other_sequences_are_refused() -> None:
    documents = documents_of(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(
        ValueError, match="documents of sequences of 4 tokens cannot mask sequences of 8"
    ):
        attention_mask(8, documents=documents)
