"""The indexed dataset format: bytes as Megatron's tools use them, damaged files refused by name."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.corpus import write_corpus
from tests.harness.properties import examples

from megascale_trainer.data.indexed import (
    DataError,
    IndexedDataset,
    IndexedWriter,
    bin_path,
    idx_path,
    token_dtype,
)


def index_by_hand(code: int, itemsize: int, lengths: list[int], boundaries: list[int]) -> bytes:
    """An ``.idx`` written field by field from the format's description, without product code."""
    data = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    data += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(boundaries))
    data += b"".join(struct.pack("<i", length) for length in lengths)
    offset = 0
    for length in lengths:
        data += struct.pack("<q", offset)
        offset += length * itemsize
    return data + b"".join(struct.pack("<q", boundary) for boundary in boundaries)


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_reads_what_another_writer_wrote(tmp_path: Path, code: int, letter: str) -> None:
    """Three sequences in two documents, every integer dtype of the format."""
    prefix = tmp_path / "corpus"
    tokens = [5, 6, 7, 100, 1, 2]
    bin_path(prefix).write_bytes(struct.pack(f"<6{letter}", *tokens))
    idx_path(prefix).write_bytes(index_by_hand(code, struct.calcsize(letter), [3, 1, 2], [0, 2, 3]))
    corpus = IndexedDataset(prefix)
    assert (corpus.sequence_count, corpus.document_count, corpus.token_count) == (3, 2, 6)
    assert corpus.read(0).tolist() == [5, 6, 7, 100]
    assert corpus.read(1).tolist() == [1, 2]
    assert corpus.read(0, begin=1, count=2).tolist() == [6, 7]
    assert corpus.read(1, begin=1, count=99).tolist() == [2], "a read ends with its document"


def test_writes_exactly_the_bytes_of_the_format(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 256], [], [9]])
    assert bin_path(prefix).read_bytes() == struct.pack("<4H", 1, 2, 256, 9)
    assert idx_path(prefix).read_bytes() == index_by_hand(8, 2, [3, 0, 1], [0, 1, 2, 3])


@examples(25)
@given(documents=st.lists(st.lists(st.integers(0, 70_000), max_size=20), max_size=8))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    prefix = write_corpus(tmp_path_factory.mktemp("round") / "corpus", documents, vocab_size=70_001)
    corpus = IndexedDataset(prefix)
    assert [corpus.read(number).tolist() for number in range(corpus.document_count)] == documents
    assert corpus.document_lengths.tolist() == [len(document) for document in documents]


def test_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(257) == np.uint16
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


def test_writer_reports_the_digest_of_the_tokens(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2, 3]))
    assert writer.sha256 == hashlib.sha256(bin_path(tmp_path / "corpus").read_bytes()).hexdigest()
    assert (writer.documents, writer.tokens) == (1, 3)


def test_an_interrupted_write_leaves_the_old_corpus_alone(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 3]])
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        IndexedWriter(prefix, np.dtype("<u2")) as writer,
    ):
        writer.add_document(np.array([4]))
        writer.add_document(np.array([70_000]))
    assert IndexedDataset(prefix).read(0).tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx"], "no temporary file stays"


def test_writer_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent/corpus\.bin: cannot be written"):
        IndexedWriter(tmp_path / "absent" / "corpus", np.dtype("<u2"))


def _cut(path: Path, size_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])


def _patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


# The corpus has two sequences: header 34 bytes, lengths at 34, offsets at 42, boundaries at 58, end
# at 82.
@pytest.mark.parametrize(
    ("suffix", "damage", "complaint"),
    [
        ("bin", lambda path: path.unlink(), "cannot be read"),
        ("idx", lambda path: path.unlink(), "megascale data tokenize"),
        ("bin", lambda path: _cut(path, 4), "truncated: has 4 bytes where .* announces 10"),
        ("bin", lambda path: path.write_bytes(path.read_bytes() + b"x"), "not the one indexed"),
        ("idx", lambda path: _cut(path, 80), "truncated: 80 bytes where its header announces 82"),
        ("idx", lambda path: _cut(path, 20), "truncated in its header"),
        ("idx", lambda path: _cut(path, 0), "wrong magic"),
        ("idx", lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "longer"),
        ("idx", lambda path: _patch(path, 0, b"PK\x03\x04"), "wrong magic"),
        ("idx", lambda path: _patch(path, 9, struct.pack("<Q", 2)), "version 2"),
        ("idx", lambda path: _patch(path, 17, b"\x07"), "dtype code 7"),
        ("idx", lambda path: _patch(path, 34, struct.pack("<i", -1)), "negative length"),
        (
            "idx",
            lambda path: _patch(path, 34, struct.pack("<2i", 1, 4)),
            "byte offsets do not follow",
        ),
        (
            "idx",
            lambda path: _patch(path, 58, struct.pack("<q", 1)),
            "boundaries do not run from 0 to 2",
        ),
        (
            "idx",
            lambda path: _patch(path, 66, struct.pack("<q", 9)),
            "boundaries do not run from 0 to 2",
        ),
    ],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, suffix: str, damage: object, complaint: str
) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 3], [4, 5]])
    assert callable(damage)
    damage(tmp_path / f"corpus.{suffix}")
    with pytest.raises(DataError, match=complaint) as refusal:
        IndexedDataset(prefix)
    assert str(tmp_path / f"corpus.{suffix}") in str(refusal.value)
