"""Blend and packing: what every sample holds, and that only its number and the data decide it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.corpus import data_job
from tests.harness.properties import examples

from megascale_job.config import DataSource
from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.blend import Blend, parts_of
from megascale_trainer.data.indexed import CorpusError, DataError
from megascale_trainer.data.packing import SampleStream, sample_numbers

UNBOUNDED_VOCABULARY = 1 << 30
EXPECTED_TREE = [2, 1, 2, 0, 2, 1, 2, 2, 1, 2, 0, 2, 1, 2]
EXPECTED_ORDER = [0, 3, 4, 2, 7, 5, 9, 1, 8, 6]  # seed 7, source 0, epoch 0, ten documents


@dataclass
class InMemory:
    """A corpus whose tokens name document and place: document * 1000 + place (+ a base)."""

    lengths: list[int]
    base: int = 0
    prefix: str = "memory"
    document_lengths: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.document_lengths = np.array(self.lengths, np.int64)

    def read(self, document: int, begin: int, count: int) -> npt.NDArray[np.int64]:
        end = min(begin + count, self.lengths[document])
        return self.base + document * 1000 + np.arange(begin, end)


def stream_of(
    corpora: list[InMemory],
    weights: list[float] | None = None,
    sequence_length: int = 8,
    seed: int = 7,
    document_attention: bool = True,
) -> SampleStream:
    sources = [
        DataSource(prefix="memory", weight=weight) for weight in weights or [1.0] * len(corpora)
    ]
    job = data_job(
        sources,
        sequence_length=sequence_length,
        vocab_size=UNBOUNDED_VOCABULARY,
        seed=seed,
        document_attention=document_attention,
    )
    return SampleStream(job, corpora)


corpus_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@examples(60)
@given(lengths=corpus_lengths, sequence_length=st.integers(1, 12), seed=st.integers(0, 5))
def test_each_token_of_an_epoch_is_an_input_once_and_documents_stay_whole(
    lengths: list[int], sequence_length: int, seed: int
) -> None:
    stream = stream_of([InMemory(lengths)], sequence_length=sequence_length, seed=seed)
    total, epochs = sum(lengths), 3
    samples = [stream.sample(number) for number in range(-(-epochs * total // sequence_length))]
    inputs = np.concatenate([sample["tokens"] for sample in samples])
    everything = {
        document * 1000 + place
        for document, length in enumerate(lengths)
        for place in range(length)
    }
    for epoch in range(epochs):
        tokens = inputs[epoch * total : (epoch + 1) * total].tolist()
        assert set(tokens) == everything
        assert len(tokens) == len(everything)
        follows = np.diff(tokens) == 1
        opens = np.array(tokens[1:]) % 1000 == 0
        assert (follows != opens).all(), (
            "inside an epoch a token continues its document or opens the next"
        )


@examples(60)
@given(lengths=corpus_lengths, sequence_length=st.integers(1, 12), number=st.integers(0, 400))
def test_targets_weights_and_positions_follow_from_the_tokens(
    lengths: list[int], sequence_length: int, number: int
) -> None:
    """A brute-force oracle: the tokens themselves say where a document starts."""
    corpora = [InMemory(lengths)]
    sample = stream_of(corpora, sequence_length=sequence_length).sample(number)
    following = stream_of(corpora, sequence_length=sequence_length).sample(number + 1)
    tokens, targets = sample["tokens"].tolist(), sample["targets"].tolist()
    assert targets == [*tokens[1:], int(following["tokens"][0])]
    start = 0
    for place in range(sequence_length):
        opens = tokens[place] % 1000 == 0
        start = place if opens else start
        assert sample["document_start"][place] == start
        assert sample["position"][place] == place - start
        assert sample["loss_weight"][place] == (0.0 if targets[place] % 1000 == 0 else 1.0)
    assert {name: values.dtype.name for name, values in sample.items()} == {
        "tokens": "int64",
        "targets": "int64",
        "loss_weight": "float32",
        "position": "int64",
        "document_start": "int32",
    }


@examples(60)
@given(
    lengths=corpus_lengths,
    sequence_length=st.integers(1, 12),
    rows=st.integers(1, 4),
    number=st.integers(0, 99),
)
def test_a_micro_batch_holds_its_packed_documents_cut_where_a_sequence_ends(
    lengths: list[int], sequence_length: int, rows: int, number: int
) -> None:
    stream = stream_of([InMemory(lengths)], sequence_length=sequence_length)
    samples = [stream.sample(number + row) for row in range(rows)]
    batch = MicroBatch.from_numpy(
        {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    )
    tokens = batch.tokens.flatten().tolist()
    opens = [n for n, token in enumerate(tokens) if n % sequence_length == 0 or token % 1000 == 0]
    assert batch.documents.bounds.tolist() == [*opens, len(tokens)]


def test_without_document_attention_positions_run_through() -> None:
    sample = stream_of([InMemory([3, 3, 3])], document_attention=False).sample(0)
    assert sample["position"].tolist() == list(range(8))
    assert sample["document_start"].tolist() == [0] * 8
    assert sample["loss_weight"].tolist() == [1, 1, 0, 1, 1, 0, 1, 1]


def test_the_order_of_documents_changes_with_epoch_seed_and_source() -> None:
    lengths = [5] * 40

    def first_tokens(stream: SampleStream, begin: int) -> tuple[int, ...]:
        return tuple(int(stream.sample(number)["tokens"][0]) for number in range(begin, begin + 40))

    orders = {
        first_tokens(stream_of([InMemory(lengths)], sequence_length=5), 0),
        first_tokens(stream_of([InMemory(lengths)], sequence_length=5), 40),
        first_tokens(stream_of([InMemory(lengths)], sequence_length=5, seed=8), 0),
        first_tokens(
            stream_of([InMemory(lengths), InMemory(lengths)], [1, 1], sequence_length=5), 0
        ),
    }
    assert len(orders) == 4


def test_the_order_of_documents_is_the_one_of_earlier_releases() -> None:
    """A run resumed under another release or numpy must get the same data: never change these."""
    stream = stream_of([InMemory([4] * 10)], sequence_length=4)
    assert [
        int(stream.sample(number)["tokens"][0]) // 1000 for number in range(10)
    ] == EXPECTED_ORDER


@examples(30)
@given(
    lengths=st.lists(corpus_lengths, min_size=1, max_size=3),
    reads=st.lists(st.integers(0, 200), min_size=1, max_size=8),
)
def test_a_sample_does_not_depend_on_what_was_read_before(
    lengths: list[list[int]], reads: list[int]
) -> None:
    """Resume at any sample equals the uninterrupted stream."""
    corpora = [InMemory(one, base=number * 100_000) for number, one in enumerate(lengths)]
    weights = [float(number + 1) for number in range(len(corpora))]
    used = stream_of(corpora, weights)
    for number in reads:
        seen, fresh = used.sample(number), stream_of(corpora, weights).sample(number)
        assert all(np.array_equal(seen[name], fresh[name]) for name in seen)


@examples(60)
@given(
    first=st.integers(0, 10**12),
    rows=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    dp=st.integers(1, 6),
)
def test_a_global_batch_is_the_same_samples_in_the_same_order_at_any_dp(
    first: int, rows: int, micro_batches: int, dp: int
) -> None:
    ranks = np.stack([sample_numbers(first, micro_batches, rows, dp, rank) for rank in range(dp)])
    by_rule = ranks.transpose(1, 0, 2).ravel()  # micro-batch, rank, row
    assert by_rule.tolist() == list(range(first, first + rows * micro_batches * dp))


weight_lists = st.lists(
    st.one_of(st.integers(1, 50), st.floats(0.01, 100, allow_nan=False)), min_size=1, max_size=5
)


@examples(40)
@given(weights=weight_lists)
def test_a_blend_is_never_far_ahead_and_numbers_each_source_without_gaps(
    weights: list[float],
) -> None:
    blend = Blend(weights)
    shares = [part / blend.period for part in blend.parts]
    counts: Counter[int] = Counter()
    for sample in range(min(2 * blend.period + 3, 2000)):
        source, ordinal = blend.locate(sample)
        assert ordinal == counts[source]
        counts[source] += 1
        ahead = counts[source] - shares[source] * (sample + 1)
        assert ahead < (1 if blend.scheme == 1 else 1.7)
    far = 10**9 * blend.period
    assert [blend.locate(far + sample)[0] for sample in range(20)] == [
        blend.locate(sample)[0] for sample in range(20)
    ]


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1], [1]),
        ([0.7, 0.3], [7, 3]),
        ([1, 2], [1, 2]),
        ([0.5, 0.5], [1, 1]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
    ],
)
def test_weights_written_as_decimals_are_met_exactly(
    weights: list[float], parts: list[int]
) -> None:
    assert parts_of(weights) == parts


@pytest.mark.parametrize(
    "weights",
    [
        [1e-9, 0.333333333, 0.666666666],
        [2.0**power for power in range(40)],
        [round(1.618**power, 6) for power in range(40)],
        [1.0 + number * 1e-5 for number in range(100)],
        np.round(np.random.default_rng(0).lognormal(20, 1.5, size=1000)).tolist(),
        np.round(np.random.default_rng(1).lognormal(20, 3.0, size=10_000)).tolist(),
    ],
    ids=["parts of a billion", "doubling", "golden", "nearly equal", "1,000", "10,000"],
)
def test_fine_weights_and_many_sources_have_their_shares_in_every_prefix(
    weights: list[float],
) -> None:
    blend, samples = Blend(weights), 20_000
    shares, counts = np.array(weights) / sum(weights), np.zeros(len(weights))
    for sample in range(samples):
        source, ordinal = blend.locate(sample)
        assert ordinal == counts[source], "a source's samples have no gap and no repetition"
        counts[source] += 1
        if sample % 500 == 0:
            assert np.abs(counts - shares * (sample + 1)).max() < 1.1
    assert np.abs(counts - shares * samples).max() < 1.1
    far = 10**6 * blend.period + 17
    assert blend.locate(far)[0] == blend.locate(17)[0], "and any sample is found at once"


def test_a_blend_of_100_000_sources_has_their_shares() -> None:
    weights = np.round(np.random.default_rng(0).lognormal(20, 1.5, size=100_000)).tolist()
    blend = Blend(weights)
    largest = max(range(len(weights)), key=weights.__getitem__)
    share = weights[largest] / sum(weights)
    for sample in range(0, 10**9, 10**9 // 200):
        source, ordinal = blend.locate(sample)
        assert abs(ordinal - weights[source] / sum(weights) * sample) < 1.1
    found = sum(blend.locate(sample)[0] == largest for sample in range(20_000))
    assert abs(found - share * 20_000) < 1.1


def test_the_order_of_a_blend_is_the_one_of_earlier_releases() -> None:
    """What a stored position means: never change these without another scheme number."""
    table, tree = Blend([0.7, 0.3]), Blend([1.00001, 2.00002, 4.00003])
    assert [table.locate(sample)[0] for sample in range(10)] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert [tree.locate(sample)[0] for sample in range(14)] == EXPECTED_TREE
    assert (table.scheme, tree.scheme) == (1, 2)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_refused_by_field(weight: float) -> None:
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.weight"):
        stream_of([InMemory([3]), InMemory([3])], [1.0, weight])


def test_no_sources_and_empty_sources_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        stream_of([])
    with pytest.raises(DataError, match="memory: has no tokens"):
        stream_of([InMemory([0, 0])])


def test_a_token_outside_the_vocabulary_is_refused_by_source() -> None:
    job = data_job([DataSource(prefix="memory")], sequence_length=4, vocab_size=3)
    with pytest.raises(DataError, match=r"model\.vocab_size: 3 .* of memory has token id 4"):
        SampleStream(job, [InMemory([9])]).sample(0)


def test_a_negative_token_is_a_fault_of_the_file() -> None:
    job = data_job([DataSource(prefix="memory")], sequence_length=4, vocab_size=30)
    with pytest.raises(CorpusError, match=r"memory has the negative token id -5.*tokenise again"):
        SampleStream(job, [InMemory([9], base=-5)]).sample(0)
