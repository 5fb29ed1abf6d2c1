"""`megascale data`: what a person does with it, and the messages when it goes wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megascale_trainer.commands.data import app
from megascale_trainer.data.errors import DataError
from megascale_trainer.data.indexed import IndexedDataset
from megascale_trainer.data.tokenizer import END_OF_DOCUMENT, BpeTokenizer, ByteTokenizer

TEXTS = {
    "b.txt": "hello hello world\n",
    "a.txt": "grüße, 世界\n",
    "deep/c.txt": "def f(x): return x\n" * 20,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty.txt").touch()
    (folder / "picture.bin").write_bytes(b"\xff\x00\xfe")
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )


def as_json(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert isinstance(values, dict)
    return values


def test_bytes_keep_every_byte_in_the_order_of_the_names(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "corpus"
    summary = as_json("tokenize", texts, "--output", prefix)
    corpus = IndexedDataset(prefix)
    documents = [
        bytes(corpus.read(number)[:-1].tolist()) for number in range(corpus.document_count)
    ]
    names = ["a.txt", "b.txt", "deep/c.txt", "picture.bin"]
    assert documents == [(texts / name).read_bytes() for name in names], (
        "the empty file is left out"
    )
    assert all(corpus.read(number)[-1] == 256 for number in range(4))
    assert summary["documents"] == 4
    assert (
        summary["tokens"] == corpus.token_count == sum(len(document) + 1 for document in documents)
    )
    assert summary["vocab_size"] == 257
    assert (
        summary["bin_sha256"]
        == hashlib.sha256((tmp_path / "out" / "corpus.bin").read_bytes()).hexdigest()
    )
    assert summary["tokenizer_sha256"] == ""


def test_bpe_is_trained_saved_and_read_back(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    summary = as_json(
        "tokenize",
        texts,
        "-o",
        prefix,
        "--glob",
        "**/*.txt",
        "--tokenizer",
        "bpe",
        "--vocab-size",
        300,
    )
    file = Path(str(summary["tokenizer_file"]))
    assert summary["tokenizer_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert 257 < int(str(summary["vocab_size"])) <= 300
    inspected = as_json("inspect", prefix, "--tokens", 10_000)
    shown = inspected["first_documents"]
    assert isinstance(shown, list)
    assert [document["text"] for document in shown] == [
        TEXTS[name] + END_OF_DOCUMENT for name in ("a.txt", "b.txt", "deep/c.txt")
    ]
    again = as_json(
        "tokenize", texts, "-o", tmp_path / "again", "--glob", "**/*.txt", "--tokenizer", file
    )
    assert again["bin_sha256"] == summary["bin_sha256"], (
        "a tokenizer file gives the same tokens as its training run"
    )


def test_limits_and_globs_choose_whole_files(texts: Path, tmp_path: Path) -> None:
    size = (texts / "a.txt").stat().st_size + (texts / "b.txt").stat().st_size
    summary = as_json(
        "tokenize", texts, "-o", tmp_path / "c", "--glob", "*.txt", "--max-bytes", size
    )
    assert (summary["documents"], summary["input_bytes"]) == (2, size)
    summary = as_json("tokenize", texts, "-o", tmp_path / "d", "--max-bytes", size - 1)
    assert summary["documents"] == 1
    summary = as_json("tokenize", texts / "b.txt", texts / "b.txt", "-o", tmp_path / "e")
    assert summary["documents"] == 1, "a file named twice is one document"


def test_the_plain_output_is_for_people(texts: Path, tmp_path: Path) -> None:
    made = run("tokenize", texts, "-o", tmp_path / "c", "--glob", "*.txt")
    assert made.exit_code == 0
    assert "vocab size" in made.stdout
    seen = run("inspect", tmp_path / "c")
    assert seen.exit_code == 0
    assert "hello hello world" in seen.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tokenize", "absent", "-o", "c"], "absent: no such file or folder"),
        (["tokenize", "texts", "-o", "c", "--glob", "*.md"], "no non-empty file found"),
        (["tokenize", "texts", "-o", "c", "--max-bytes", "3"], "within --max-bytes 3"),
        (["tokenize", "texts", "-o", "texts/a.txt/c"], "texts/a.txt"),
        (["tokenize", "texts", "-o", "made"], "add --overwrite"),
        (
            ["tokenize", "texts", "-o", "c", "--tokenizer", "words"],
            "tokenizer 'words' is not known",
        ),
        (
            ["tokenize", "texts", "-o", "c", "--tokenizer", "absent.json"],
            "absent.json: cannot be read",
        ),
        (
            ["tokenize", "texts", "-o", "c", "--tokenizer", "bad.json"],
            "bad.json: not a Hugging Face tokenizers file",
        ),
        (
            ["tokenize", "texts", "-o", "c", "--tokenizer", "bpe", "--vocab-size", "10"],
            "at least 257",
        ),
        (["inspect", "absent"], "absent.idx: cannot be read"),
        (["inspect", "made", "--tokenizer", "words"], "tokenizer 'words' is not known"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    assert run("tokenize", texts / "a.txt", "-o", "made").exit_code == 0
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert not list(tmp_path.glob("c.*")), "nothing half made stays"


def test_overwriting_replaces_the_tokenizer_too(texts: Path, tmp_path: Path) -> None:
    as_json("tokenize", texts, "-o", tmp_path / "c", "--tokenizer", "bpe", "--vocab-size", 280)
    as_json("tokenize", texts, "-o", tmp_path / "c", "--overwrite")
    assert as_json("inspect", tmp_path / "c")["tokenizer"] == "bytes"


def test_bytes_decode_for_people() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(["grüße".encode()])[0]) == "grüße" + END_OF_DOCUMENT
    assert tokenizer.decode(tokenizer.encode([b"\xff"])[0]) == "�" + END_OF_DOCUMENT


def test_a_document_cannot_forge_the_end_of_a_document() -> None:
    tokenizer = BpeTokenizer.train([f"some text {END_OF_DOCUMENT} more".encode()] * 3, 270)
    tokens = tokenizer.encode([f"x {END_OF_DOCUMENT} y".encode()])[0].tolist()
    assert tokens.count(tokens[-1]) == 1


def test_a_tokenizer_without_an_end_of_document_is_refused() -> None:
    text = BpeTokenizer.train([b"abc"], 260).json_text.replace(END_OF_DOCUMENT, "<|pad|>")
    with pytest.raises(DataError, match=r"toy: names no end-of-document token"):
        BpeTokenizer(text, "toy")
