"""`megascale data`: what a person does with it, and the messages when it goes wrong."""

from __future__ import annotations

import base64
import bz2
import functools
import gzip
import hashlib
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from typer.testing import CliRunner, Result

from megascale_job.corpus_record import CorpusRecord
from megascale_trainer.commands.data import app
from megascale_trainer.data import inputs
from megascale_trainer.data.indexed import DataError, IndexedDataset, identity
from megascale_trainer.data.inputs import Document
from megascale_trainer.data.tokenizer import (
    END_OF_DOCUMENT,
    BpeTokenizer,
    ByteTokenizer,
    FileTokenizer,
)

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
    given = ["--glob", "**/*.txt", "--tokenizer", "bpe", "--vocab-size", 280]
    as_json("tokenize", texts, "-o", tmp_path / "c", *given)
    as_json("tokenize", texts, "-o", tmp_path / "c", "--overwrite")
    assert as_json("inspect", tmp_path / "c")["tokenizer"] == "bytes"


def test_bytes_decode_for_people() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(["grüße".encode()])[0]) == "grüße" + END_OF_DOCUMENT
    assert tokenizer.decode(tokenizer.encode([b"\xff"])[0]) == "�" + END_OF_DOCUMENT


def trained(*texts: str, vocab_size: int = 270) -> BpeTokenizer:
    """A tokenizer that has learnt ``texts``."""
    return BpeTokenizer.train([Document("x", [text.encode()]) for text in texts], vocab_size)


def byte_level(special: Sequence[str], added: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE without merges; ``special`` tokens have the first ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *letters]
    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens([AddedToken(name, normalized=False) for name in added])
    return made


def test_a_document_cannot_forge_the_end_of_a_document() -> None:
    tokenizer = trained(*[f"some text {END_OF_DOCUMENT} more"] * 3)
    tokens = tokenizer.encode([f"x {END_OF_DOCUMENT} y".encode()])[0].tolist()
    assert tokens.count(tokens[-1]) == 1


def _truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(max_length=16)


def _padded(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=4096)


def _framed(tokenizer: Tokenizer) -> None:
    """Twice, with a token around each: what a file may ask for where special tokens are off."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
    )


def _dropping(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


@pytest.mark.parametrize("change", [_truncated, _padded, _framed, _dropping])
def test_settings_of_calls_in_a_tokenizer_file_change_no_corpus(
    tmp_path: Path, change: Callable[[Tokenizer], None]
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 100)
    tokenizer = Tokenizer.from_str(trained("the quick brown fox " * 9, vocab_size=300).json_text)
    digests = []
    for name in ("plain", "changed"):
        if name == "changed":
            change(tokenizer)
        tokenizer.save(str(tmp_path / f"{name}.json"))
        given = ["--tokenizer", tmp_path / f"{name}.json", "--end-token", END_OF_DOCUMENT]
        made = as_json("tokenize", tmp_path / "a.txt", *given, "-o", tmp_path / name)
        digests.append((made["tokens"], made["bin_sha256"]))
    assert digests[0] == digests[1]


def ends_of(folder: Path, *options: object) -> tuple[int, list[int]]:
    """Exit status, and the ids of the one document of ``folder``/a.txt by its tokenizer.json."""
    given = ["--tokenizer", folder / "tokenizer.json", *options, "--overwrite"]
    made = run("tokenize", folder / "a.txt", "-o", folder / "c", *given)
    if made.exit_code:
        return made.exit_code, []
    shown = as_json("inspect", folder / "c")["first_documents"]
    assert isinstance(shown, list)
    return 0, shown[0]["ids"]


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"eos_token": "<eos>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<eos>", "special": True}}),
        ("special_tokens_map.json", {"eos_token": "<eos>"}),
        ("config.json", {"eos_token_id": 1}),
        ("generation_config.json", {"eos_token_id": [1, 2]}),
    ],
)
def test_the_end_of_a_document_is_what_the_configuration_says(
    tmp_path: Path, file: str, values: dict[str, object]
) -> None:
    """As in Gemma, whose vocabulary has </s>, a tag of ordinary text, in front of <eos>."""
    tokenizer = byte_level(["<pad>", "<eos>", "<bos>"], ["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a <s>b</s> c <eos>")
    refused = run("tokenize", tmp_path / "a.txt", "-o", tmp_path / "c", "--tokenizer",
                  tmp_path / "tokenizer.json")  # fmt: skip
    assert refused.exit_code == 2 and "--end-token" in refused.stderr
    assert "<pad>, <eos>, <bos>" in refused.stderr, "it lists what there is"
    assert not list(tmp_path.glob("c.*"))
    status, ids = ends_of(tmp_path, "--end-token", "<eos>")
    assert (status, ids[-1], ids.count(1)) == (0, 1, 1), "an option names it, and text does not"
    (tmp_path / file).write_text(json.dumps(values))
    assert ends_of(tmp_path) == (0, ids)
    # The copy beside the corpus needs no configuration: the corpus's record says it.
    (tmp_path / file).unlink()
    again = as_json("tokenize", tmp_path / "a.txt", "-o", tmp_path / "held-out", "--tokenizer",
                    tmp_path / "c.tokenizer.json")  # fmt: skip
    assert again["end_token_id"] == 1


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        ("</s>", "text can spell the token '</s>'"),
        ("a", "text can spell the token 'a'"),
        ("<nope>", "has no token '<nope>'"),
        ("99999", "has no token 99999"),
    ],
)
def test_what_text_can_spell_is_no_end(tmp_path: Path, token: str, complaint: str) -> None:
    byte_level(["<eos>"], ["</s>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("abc")
    given = ["--tokenizer", tmp_path / "tokenizer.json", "--end-token", token]
    refused = run("tokenize", tmp_path / "a.txt", "-o", tmp_path / "c", *given)
    assert refused.exit_code == 2 and complaint in refused.stderr


def test_a_tokenizer_without_an_end_of_document_is_refused() -> None:
    tokenizer = BpeTokenizer(byte_level([]).to_str(), "toy")
    tokenizer.end_with(None)
    with pytest.raises(DataError, match=r"toy: nothing says which token ends a document"):
        tokenizer.encode([b"abc"])


def _prose(count: int, seed: int = 0) -> str:
    """Words of two to nine letters, some digits and lines, a few characters beyond ASCII."""
    random = Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyzäß世界🦙 1234567890"
    words = ["".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(2000)]
    ends = random.choices([" ", " ", ", ", "\n", "  "], k=count)
    chosen = random.choices(words, k=count)
    return "".join(f"{word}{end}" for word, end in zip(chosen, ends, strict=True))


@functools.cache
def _metaspace() -> Tokenizer:
    """As SentencePiece's models are in tokenizers files: no words, a mark in front of the text."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<eos>"], show_progress=False,
        initial_alphabet=[chr(code) for code in range(33, 127)], max_token_length=8,
    )  # fmt: skip
    made.train_from_iterator([_prose(40, seed) for seed in range(40)], trainer)
    return made


@functools.cache
def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<eos>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([_prose(200, seed) for seed in range(9)], trainer)
    return made


def _whole(tokenizer: FileTokenizer, text: str) -> list[int]:
    """The tokens of a text that is encoded at once."""
    tokens: list[int] = tokenizer.encode([text.encode()])[0].tolist()
    return tokens


@pytest.mark.parametrize("make", [lambda: None, _metaspace, _unigram], ids=["bytes", "bpe", "uni"])
@pytest.mark.parametrize(
    "text_of",
    [
        lambda: _prose(9_000),
        lambda: _prose(25_000, 1),
        lambda: "x" * 70_000 + " " + _prose(9_000),
        lambda: _prose(11_000) + "7" * 9_000 + _prose(11_000),
        lambda: _prose(11_000) + " " * 9_000 + _prose(11_000),
        lambda: "🦙" * 70_000,
    ],
    ids=["short", "long", "word", "digits", "spaces", "llamas"],
)
def test_a_document_of_any_length_has_the_tokens_of_the_whole(
    make: Callable[[], Tokenizer | None], text_of: Callable[[], str]
) -> None:
    made, text = make(), text_of()
    if made is None:
        tokenizer: FileTokenizer = trained(*[_prose(300, seed) for seed in range(4)])
    else:
        tokenizer = BpeTokenizer(made.to_str(), "toy")
        tokenizer.end_with("<eos>")
    data = text.encode()
    blocks = [data[at : at + 99_991] for at in range(0, len(data), 99_991)]
    documents = [Document("a", [b"first"]), Document("b", blocks), Document("c", [b"last"])]
    found: list[list[int]] = [[]]
    for tokens, last in tokenizer.encode_stream(documents):
        found[-1] += tokens.tolist()
        if last:
            found.append([])
    whole = [_whole(tokenizer, each) for each in ("first", text, "last")]
    assert found == [*whole, []]


# In a process of its own: VmHWM is the peak of its memory, and not that of whoever forked it.
_PEAKS = """
import re, sys
from megascale_trainer.commands.data import app
from megascale_trainer.data import inputs
inputs.BATCH_CHARS = inputs.WINDOW_CHARS
for name in ("short.txt", "long.txt"):
    app(["tokenize", name, "-o", name, *sys.argv[1:]], standalone_mode=False)
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    """The second file is five times as long: at once its tokens would take 70 MiB more."""
    text = _prose(10_000)
    (tmp_path / "t.json").write_text(trained(_prose(500), vocab_size=400).json_text)
    (tmp_path / "short.txt").write_text(text * 2)
    (tmp_path / "long.txt").write_text(text * 10)
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS, "--tokenizer", "t.json", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    short, long = (int(kilobytes) for kilobytes in done.stderr.split())
    assert long - short < 25 << 10, (short, long)


def test_a_text_that_cannot_be_divided_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of seven characters from the begin of a window on: no two windows agree."""
    monkeypatch.setattr(inputs, "MAX_UNDIVIDED_CHARS", 200_000)

    def sevens(texts: Sequence[str]) -> list[inputs.Encoded]:
        places = [[(at, at + 7) for at in range(0, len(text) - 6, 7)] for text in texts]
        return [inputs.Encoded.of([7] * len(each), each) for each in places]

    def tokens_of(chars: int) -> int:
        document = Document("b", [b"x" * chars])
        found = inputs.encode_windows(sevens, [document])
        return sum(len(tokens) for _, tokens, _ in found)

    assert tokens_of(200_000) == 200_000 // 7
    with pytest.raises(DataError, match=r"b: 2.* no place at which their tokens can be divided"):
        tokens_of(300_000)


def test_windows_are_joined_only_where_all_their_tokens_are_the_same() -> None:
    """A token depends on all characters before it: the same places, and never the same ids."""

    def counted(texts: Sequence[str]) -> list[inputs.Encoded]:
        return [
            inputs.Encoded.of(
                [at % 7 for at in range(len(text))], [(at, at + 1) for at in range(len(text))]
            )
            for text in texts
        ]

    found = inputs.encode_windows(counted, [Document("b", [b"x" * 150_000])])
    ids = [token for _, tokens, _ in found for token in tokens.tolist()]
    assert ids == [at % 7 for at in range(150_000)]


ROWS = [{"text": f"document {number}", "n": number} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _parquet_bytes() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file.getvalue()


FILES: list[tuple[str, bytes, list[str], list[str]]] = [
    ("a.txt", b"\xef\xbb\xbfgr\xc3\xbcn", [], ["grün"]),
    ("a.txt", "grün".encode("utf-16"), [], ["grün"]),
    ("a.txt", "grün".encode("utf-32"), [], ["grün"]),
    ("a.txt", "grün".encode("latin-1"), ["--encoding", "latin-1"], ["grün"]),
    ("a.txt", "grün".encode("utf-16-le"), ["--encoding", "utf-16-le"], ["grün"]),
    ("a.txt", b"gr\xfcn", ["--replace"], ["gr\ufffdn"]),
    ("a.txt.gz", gzip.compress(b"hello", mtime=0), [], ["hello"]),
    ("a", bz2.compress(b"hello"), [], ["hello"]),
    ("a", lzma.compress(b"hello"), [], ["hello"]),
    ("a.jsonl", LINES, [], [row["text"] for row in ROWS]),
    ("a", LINES, [], [row["text"] for row in ROWS]),
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0), [], [row["text"] for row in ROWS]),
    ("a.jsonl", b'{"body": "x\\u00fc"}\n\n{"body": ""}\n', ["--field", "body"], ["xü"]),
    ("a.jsonl", LINES.decode().encode("utf-16"), [], [row["text"] for row in ROWS]),
    ("a.jsonl", LINES, ["--format", "text"], [LINES.decode()]),
    ("a.json", b'{"text": "one object is text"}', [], ['{"text": "one object is text"}']),
    ("a.parquet", _parquet_bytes(), [], [row["text"] for row in ROWS]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "options", "texts"),
    FILES,
    ids=[f"{at} {file[0]}" for at, file in enumerate(FILES)],
)
def test_files_are_read_as_what_they_hold(
    tmp_path: Path, name: str, data: bytes, options: list[str], texts: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "t.json").write_text(trained("grün hello document", vocab_size=280).json_text)
    given = ["--tokenizer", tmp_path / "t.json", *options]
    made = as_json("tokenize", tmp_path / name, "-o", tmp_path / "c", *given)
    shown = as_json("inspect", tmp_path / "c", "--documents", 9, "--tokens", 999)["first_documents"]
    assert isinstance(shown, list)
    assert [each["text"] for each in shown] == [text + END_OF_DOCUMENT for text in texts]
    assert made["replaced_bytes"] == int("--replace" in options)


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        ("a.txt", b"gr\xfcn", "a.txt: is no utf-8 text: 0xfc at byte 2: give its --encoding"),
        ("a.txt", b"x" * (1 << 20) + b"\xe4", "0xe4 at byte 1,048,576"),
        ("a.txt", "hello".encode("utf-16-le"), "a.txt: has NUL bytes"),
        ("a", b"\x28\xb5\x2f\xfd....", "decompress it (zstd -d)"),
        ("a", b"PK\x03\x04....", "unpack it"),
        ("a", b"%PDF-1.7", "pdftotext"),
        ("a.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "is damaged where it is compressed"),
        ("a.gz", b"\x1f\x8bnothing", "is damaged where it is compressed"),
        ("a.bz2", b"BZh nothing", "is damaged where it is compressed"),
        ("a.jsonl", b'{"text": "x"}\nnothing\n', "a.jsonl: line 2: is no JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: has no field 'text'"),
        ("a.jsonl", b'{"text": 7}\n', "line 1: its field 'text' is no text but int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: has half a character"),
        ("a.jsonl", b'{"text": ""}\n', "no document that is not empty"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: line 1: is no JSON"),
        ("a", b"PAR1 nothing", "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_right_is_refused_with_the_remedy(
    tmp_path: Path, name: str, data: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "t.json").write_text(trained("abc").json_text)
    given = ["-o", tmp_path / "c", "--tokenizer", tmp_path / "t.json"]
    refused = run("tokenize", tmp_path / name, *given)
    assert refused.exit_code == 2 and complaint in refused.stderr, refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("c.*"))


def test_a_folder_that_has_its_own_output_is_read_the_same_again(
    texts: Path, tmp_path: Path
) -> None:
    digests = set()
    for name in ("corpus", "corpus", "deep/other"):
        made = as_json("tokenize", texts, "-o", texts / name, "--overwrite")
        digests.add(made["bin_sha256"])
        (texts / ".corpus.bin.12345.tmp").write_bytes(b"of a run that was killed")
    assert len(digests) == 1


def test_another_tokenizer_than_the_corpus_has_is_refused(texts: Path, tmp_path: Path) -> None:
    given = ["--glob", "**/*.txt", "--tokenizer", "bpe", "--vocab-size"]
    ours = as_json("tokenize", texts, "-o", tmp_path / "c", *given, 280)
    other = as_json("tokenize", texts, "-o", tmp_path / "d", *given, 290)
    refused = run("inspect", tmp_path / "c", "--tokenizer", other["tokenizer_file"])
    assert refused.exit_code == 2
    for digest in (ours["tokenizer_sha256"], other["tokenizer_sha256"]):
        assert str(digest) in refused.stderr
    wanted = ["--tokenizer-sha256", ours["tokenizer_sha256"]]
    refused = run("tokenize", texts, "-o", tmp_path / "e", *given[:3], other["tokenizer_file"],
                  *wanted)  # fmt: skip
    assert refused.exit_code == 2 and "--tokenizer-sha256" in refused.stderr
    as_json("tokenize", texts, "-o", tmp_path / "e", *given[:3], ours["tokenizer_file"], *wanted)
    record = CorpusRecord.load(tmp_path / "e")
    assert record is not None and record.tokenizer_sha256 == ours["tokenizer_sha256"]
    highest = int(IndexedDataset(tmp_path / "e")._tokens.max())
    assert (record.highest_token_id, record.identity) == (highest, identity(tmp_path / "e"))


def test_a_sentencepiece_model_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([_prose(30, seed) for seed in range(60)]), model_writer=model,
        vocab_size=700, minloglevel=2, model_type="bpe", byte_fallback=True,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    text = _prose(12_000)
    (tmp_path / "a.txt").write_text(text)
    given = ["--tokenizer", tmp_path / "tokenizer.model", "-o", tmp_path / "c"]
    made = as_json("tokenize", tmp_path / "a.txt", *given)
    own = library.SentencePieceProcessor(model_proto=model.getvalue())
    wanted = [*own.encode(text), own.eos_id()]
    assert IndexedDataset(tmp_path / "c").read(0).tolist() == wanted
    assert Path(str(made["tokenizer_file"])).read_bytes() == model.getvalue()
    assert (made["end_token_id"], made["vocab_size"]) == (own.eos_id(), own.vocab_size())
    again = as_json("tokenize", tmp_path / "a.txt", "--tokenizer", made["tokenizer_file"], "-o",
                    tmp_path / "d")  # fmt: skip
    assert again["bin_sha256"] == made["bin_sha256"]


PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"


def _ranks() -> dict[bytes, int]:
    pairs = [bytes([a, b]) for a in b"abcdefgh " for b in b"abcdefgh"]
    return {token: n for n, token in enumerate([*(bytes([n]) for n in range(256)), *pairs])}


def test_ranks_of_tiktoken_are_read(tmp_path: Path) -> None:
    library = pytest.importorskip("tiktoken")
    ranks, text = _ranks(), _prose(30_000)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "t.tiktoken").write_text("".join(lines))
    (tmp_path / "a.txt").write_text(text)
    given = ["tokenize", tmp_path / "a.txt", "-o", tmp_path / "c", "--tokenizer",
             tmp_path / "t.tiktoken"]  # fmt: skip
    refused = run(*given)
    assert refused.exit_code == 2 and "--split-pattern" in refused.stderr
    given += ["--split-pattern", PATTERN]
    refused = run(*given)
    assert refused.exit_code == 2 and "--end-token" in refused.stderr
    refused = run(*given, "--end-token", 97)
    assert refused.exit_code == 2 and "text can spell" in refused.stderr
    made = as_json(*given, "--end-token", 400)
    own = library.Encoding("t", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert IndexedDataset(tmp_path / "c").read(0).tolist() == [*own.encode_ordinary(text), 400]
    again = as_json("tokenize", tmp_path / "a.txt", "--tokenizer", made["tokenizer_file"], "-o",
                    tmp_path / "d")  # fmt: skip
    assert again["bin_sha256"] == made["bin_sha256"], "its record has the pattern and the end"
    shown = as_json("inspect", tmp_path / "d", "--tokens", 50)["first_documents"]
    assert isinstance(shown, list) and text.startswith(shown[0]["text"][:40])


@pytest.mark.parametrize("lists_special", [True, False])
def test_a_tekken_file_is_read(tmp_path: Path, lists_special: bool) -> None:
    library = pytest.importorskip("tiktoken")
    ranks, text = _ranks(), _prose(3_000) + "</s>"
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    special = [
        {"rank": n, "token_str": name, "is_control": True}
        for n, name in enumerate(["<unk>", "<s>", "</s>", "[INST]"])
    ]
    config = {"pattern": PATTERN, "default_vocab_size": 310, "default_num_special_tokens": 10}
    values = {"config": config, "vocab": entries}
    (tmp_path / "tekken.json").write_text(
        json.dumps({**values, "special_tokens": special} if lists_special else values)
    )
    (tmp_path / "a.txt").write_text(text)
    given = ["--tokenizer", tmp_path / "tekken.json", "-o", tmp_path / "c"]
    made = as_json("tokenize", tmp_path / "a.txt", *given)
    kept = {token: rank for token, rank in ranks.items() if rank < 300}
    own = library.Encoding("t", pat_str=PATTERN, mergeable_ranks=kept, special_tokens={})
    wanted = [number + 10 for number in own.encode_ordinary(text)]
    assert IndexedDataset(tmp_path / "c").read(0).tolist() == [*wanted, 2]
    assert made["vocab_size"] == 310


@pytest.mark.parametrize(
    ("library", "content"),
    [("sentencepiece", b"\n\x0e\n\x05<unk>"), ("tiktoken", b"YQ== 0\nYg== 1\n")],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, content: bytes
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "t.model").write_bytes(content)
    (tmp_path / "a.txt").write_text("abc")
    given = ["--tokenizer", tmp_path / "t.model", "--split-pattern", "x", "-o", tmp_path / "c"]
    refused = run("tokenize", tmp_path / "a.txt", *given)
    assert refused.exit_code == 2
    assert f"`{library}` library: pip install 'megascale[data]'" in refused.stderr
