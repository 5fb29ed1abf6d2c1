"""Shuffled samples: the permutation, the windows of a corpus on disk, blends by tokens, skips."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.corpus import data_job, write_corpus
from tests.harness.properties import examples

from megascale_job.config import DataSkip, DataSource, JobConfig
from megascale_trainer.data.blend import Permutation, TokenBlend
from megascale_trainer.data.corpus import MappedIndex
from megascale_trainer.data.indexed import (
    HEADER,
    MAGIC,
    CorpusError,
    IndexedDataset,
    bin_path,
    idx_path,
)
from megascale_trainer.data.packing import SampleStream, sample_numbers

VOCABULARY = 1 << 30
EXPECTED = [9, 4, 7, 8, 6, 2, 0, 1, 3, 5]


@examples(200)
@given(size=st.integers(1, 3000), name=st.text(max_size=5))
def test_a_permutation_has_every_number_once(size: int, name: str) -> None:
    order = Permutation(size, name)
    assert sorted(order(index) for index in range(size)) == list(range(size))


@examples(20)
@given(size=st.integers(10**9, 1 << 62), seed=st.integers(0, 9))
def test_a_permutation_of_any_size_has_no_number_twice(size: int, seed: int) -> None:
    order = Permutation(size, f"{seed}")
    random = np.random.default_rng(seed)
    asked = set(random.integers(0, size, 500).tolist()) | {0, size - 1}
    found = {order(index) for index in asked}
    assert len(found) == len(asked)
    assert all(0 <= index < size for index in found)


def test_a_permutation_differs_by_name_and_looks_random() -> None:
    size, names = 1000, 200
    places = np.array([[Permutation(size, f"{n}")(i) for i in (0, 1, 999)] for n in range(names)])
    # means of 200 uniform places: three deviations are 61 of 1000
    assert np.abs(places.mean(axis=0) - 499.5).max() < 70
    assert all(len(set(places[:, column])) > 160 for column in range(3))
    order = Permutation(100_000, "steps")
    steps = np.diff([order(index) for index in range(2000)])
    assert len(set(steps.tolist())) > 1950, "neighbours stay together"


def test_a_permutation_is_the_one_of_earlier_releases() -> None:
    """A run that goes on under another release must get the same data: never change these."""
    assert [Permutation(10, "samples/7/0/0")(index) for index in range(10)] == EXPECTED
    assert Permutation(10**12, "samples/7/0/0")(123_456_789) == 354_235_134_217


@pytest.mark.parametrize("size", [0, -1, 1 << 63])
def test_a_permutation_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="give 1 to"):
        Permutation(size, "x")
    with pytest.raises(IndexError, match="5 is not below 5"):
        Permutation(5, "x")(5)


def _job(
    prefixes: list[Path], length: int, weights: list[float] | None = None, **data: Any
) -> JobConfig:
    sources = [
        DataSource(prefix=str(prefix), weight=weight)
        for prefix, weight in zip(prefixes, weights or [1.0] * len(prefixes), strict=True)
    ]
    job = data_job(sources, sequence_length=length, vocab_size=VOCABULARY, seed=7)
    return replace(job, data=replace(job.data, shuffle="samples", **data))


def _documents(lengths: list[int], base: int = 0) -> list[list[int]]:
    """Tokens that name document and place."""
    return [
        [base + number * 1000 + place for place in range(length)]
        for number, length in enumerate(lengths)
    ]


corpus_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@examples(60)
@given(lengths=corpus_lengths, length=st.integers(1, 12))
def test_each_token_of_an_epoch_is_an_input_once_with_its_own_target(
    lengths: list[int], length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A brute-force oracle: the tokens themselves say where they stand."""
    prefix = tmp_path_factory.mktemp("c") / "c"
    write_corpus(prefix, _documents(lengths), VOCABULARY)
    total, job = sum(lengths), _job([prefix], length)
    stream, per_epoch = SampleStream.open(job), -(-total // length)
    everything = [token for document in _documents(lengths) for token in document]
    orders = []
    for epoch in range(3):
        seen: list[int] = []
        order = []
        for number in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            sample = stream.sample(number)
            tokens = sample["tokens"].tolist()
            order.append(tokens[0])
            first = everything.index(tokens[0])
            real = min(length, total - first)
            assert tokens[:real] == everything[first : first + real]
            assert tokens[real:] == [0] * (length - real), "padding"
            seen += tokens[:real]
            start = 0
            for place in range(real):
                start = place if tokens[place] % 1000 == 0 else start
                at = first + place
                goes_on = at + 1 < total and everything[at + 1] % 1000 != 0
                assert sample["loss_weight"][place] == float(goes_on)
                if goes_on:
                    assert sample["targets"][place] == everything[at + 1]
                assert sample["document_start"][place] == start
                assert sample["position"][place] == place - start
            assert not sample["loss_weight"][real:].any()
            assert (sample["document_start"][real:] == real).all()
        assert Counter(seen) == Counter(everything)
        orders.append(order)
    if per_epoch > 6:
        assert orders[0] != orders[1] != orders[2], "epochs have orders of their own"


@examples(30)
@given(
    lengths=st.lists(corpus_lengths, min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
    numbers=st.lists(st.integers(0, 10_000), min_size=1, max_size=8),
    blend=st.sampled_from(["weights", "tokens"]),
)
def test_a_sample_does_not_depend_on_what_was_read_before(
    lengths: list[list[int]],
    weights: list[float],
    numbers: list[int],
    blend: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Resume at any sample, on any rank of any layout, equals the uninterrupted stream."""
    folder = tmp_path_factory.mktemp("c")
    prefixes = []
    for number, one in enumerate(lengths):
        prefixes.append(folder / f"{number}")
        write_corpus(prefixes[-1], _documents(one, number * 100_000), VOCABULARY)
    job = _job(prefixes, 8, weights[: len(prefixes)], blend=blend)
    used = SampleStream.open(job)
    for number in numbers:
        seen, fresh = used.sample(number), SampleStream.open(job).sample(number)
        assert all(np.array_equal(seen[name], fresh[name]) for name in seen)


def test_a_step_is_the_same_samples_at_any_dp(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", _documents([9] * 20), VOCABULARY)
    stream, found = SampleStream.open(_job([tmp_path / "c"], 6)), []
    for dp in (1, 2, 4):
        ranks = [sample_numbers(24, 8 // dp, 1, dp, rank) for rank in range(dp)]
        numbers = np.stack(ranks).transpose(1, 0, 2).ravel()
        found.append([stream.sample(int(number))["tokens"].tolist() for number in numbers])
    assert found[0] == found[1] == found[2]


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    factor=st.sampled_from([0.125, 0.5, 1.0, 2.0]),
)
def test_a_blend_by_tokens_has_every_sample_as_often_as_its_weight(
    sizes: list[int], factor: float
) -> None:
    blend = TokenBlend([factor] + [1.0] * (len(sizes) - 1), sizes, 7)
    epochs, exact = 4, [factor * sizes[0], *sizes[1:]]
    counts = [math.floor(epochs * count + 0.5) for count in exact]
    found = [blend.locate(sample) for sample in range(sum(counts))]
    assert Counter(found) == Counter(
        (source, number) for source, count in enumerate(counts) for number in range(count)
    )
    ends = [sum(math.floor(epoch * count + 0.5) for count in exact) for epoch in range(epochs)]
    for number, (source, ordinal) in enumerate(found):
        epoch = bisect_right(ends, number) - 1
        assert math.floor(epoch * exact[source] + 0.5) <= ordinal, "an epoch is not mixed with"
        assert ordinal < math.floor((epoch + 1) * exact[source] + 0.5), "another one"
    assert blend.scheme == (1 if all(count == round(count) for count in exact) else 2)


def test_a_small_weight_of_a_blend_by_tokens_is_no_whole_sample_of_each_epoch() -> None:
    blend, epochs = TokenBlend([1.0, 0.01], [100, 10], 7), 50
    found = Counter(blend.locate(sample)[0] for sample in range(epochs * 100 + epochs // 10))
    assert found == {0: epochs * 100, 1: epochs // 10}


def test_an_epoch_of_a_blend_by_tokens_has_every_token_of_all_sources_once(tmp_path: Path) -> None:
    lengths, wanted = [[5, 9, 3], [40], [2, 2]], set()
    for number, one in enumerate(lengths):
        documents = _documents(one, (number + 1) * 100_000)  # no token is 0, as padding is
        write_corpus(tmp_path / f"{number}", documents, VOCABULARY)
        wanted |= {token for document in documents for token in document}
    stream = SampleStream.open(_job([tmp_path / f"{n}" for n in range(3)], 4, blend="tokens"))
    per_epoch, orders = 5 + 10 + 1, []
    for epoch in range(2):
        numbers = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        samples = [stream.sample(number)["tokens"].tolist() for number in numbers]
        seen = Counter(token for sample in samples for token in sample if token)
        assert seen == Counter(wanted)
        orders.append(samples)
    assert orders[0] != orders[1]


def test_skips_leave_out_whole_global_batches(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", _documents([9] * 50), VOCABULARY)
    job = _job([tmp_path / "c"], 6)
    skips = (DataSkip(after_step=5, steps=2), DataSkip(after_step=2, steps=3))
    stream = SampleStream.open(job)
    skipping = SampleStream.open(replace(job, data=replace(job.data, skips=skips)))
    batch = job.training.global_batch_size
    for number in range(8 * batch):
        step = number // batch  # completed before it
        further = (3 if step >= 2 else 0) + (2 if step >= 5 else 0)
        wanted = stream.sample(number + further * batch)["tokens"]
        assert np.array_equal(skipping.sample(number)["tokens"], wanted)


def _write_index(path: Path, offsets: list[int], boundaries: list[int], last: int) -> None:
    count = len(offsets)
    lengths = [*np.diff(offsets) // 2, last]
    data = HEADER.pack(MAGIC, 1, 8, count, len(boundaries))
    data += b"".join(struct.pack("<i", length) for length in lengths)
    data += b"".join(struct.pack("<q", value) for value in [*offsets, *boundaries])
    idx_path(path).write_bytes(data)


@examples(40)
@given(lengths=corpus_lengths, begin=st.integers(0, 60), count=st.integers(1, 40))
def test_a_mapped_index_finds_what_the_checked_reader_finds(
    lengths: list[int], begin: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("c") / "c"
    write_corpus(prefix, _documents(lengths), VOCABULARY)
    mapped, checked = MappedIndex(prefix), IndexedDataset(prefix)
    assert mapped.token_count == checked.token_count
    begin, count = (
        begin % mapped.token_count,
        min(count, mapped.token_count - begin % mapped.token_count),
    )
    tokens, starts = mapped.read_range(begin, count)
    everything = [token for document in _documents(lengths) for token in document]
    assert tokens.tolist() == everything[begin : begin + count]
    opens = [at for at, token in enumerate(tokens.tolist()) if token % 1000 == 0]
    assert starts.tolist() == opens


@pytest.mark.parametrize(
    ("offsets", "boundaries"),
    [([0, 40, 20, 60], [0, 1, 2, 3, 4]), ([0, 20, 40, 60], [0, 3, 1, 2, 4]),
     ([0, 20, 40, 60], [0, 99, 2, 3, 4]), ([2, 20, 40, 60], [0, 1, 2, 3, 4]),
     ([0, -40, 20, 60], [0, 1, 2, 3, 4])],
)  # fmt: skip
def test_a_damaged_index_is_refused_where_it_is_read(
    tmp_path: Path, offsets: list[int], boundaries: list[int]
) -> None:
    _write_index(tmp_path / "c", offsets, boundaries, last=10)
    bin_path(tmp_path / "c").write_bytes(bytes(80))
    with pytest.raises(CorpusError, match=r"c\.idx: .* do not rise; tokenise again"):
        MappedIndex(tmp_path / "c").read_range(0, 40)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    _write_index(tmp_path / "c", [0, 20], [0, 1, 2], last=10)
    with pytest.raises(CorpusError, match=r"c\.bin: cannot be read"):
        MappedIndex(tmp_path / "c")
    bin_path(tmp_path / "c").write_bytes(bytes(38))
    with pytest.raises(CorpusError, match=r"c\.bin: truncated: has 38 bytes where .* 40"):
        SampleStream.open(_job([tmp_path / "c"], 4))
    _write_index(tmp_path / "c", [], [0], last=0)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [[], []])
    with pytest.raises(CorpusError, match=r"c: has no tokens; leave it out"):
        SampleStream.open(_job([tmp_path / "c"], 4))


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    """A million documents of ten tokens: of the index nothing is copied."""
    count = 1_000_000
    with idx_path(tmp_path / "c").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        np.full(count, 10, "<i4").tofile(file)
        np.arange(0, 20 * count, 20, dtype="<i8").tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)
    with bin_path(tmp_path / "c").open("wb") as file:
        file.truncate(20 * count)
    job = _job([tmp_path / "c"], 64)
    tracemalloc.start()
    stream = SampleStream.open(job)
    for number in range(0, 10**9, 10**8):
        assert len(np.unique(stream.sample(number)["document_start"])) in (7, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000, f"{peak} bytes for {count} documents"


def test_a_corpus_that_becomes_shorter_is_an_error_and_no_crash(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", _documents([9] * 20), VOCABULARY)
    stream = SampleStream.open(_job([tmp_path / "c"], 16))
    os.truncate(bin_path(tmp_path / "c"), 8)
    with pytest.raises(CorpusError, match=r"c\.bin: has become shorter"):
        for number in range(12):
            stream.sample(number)
