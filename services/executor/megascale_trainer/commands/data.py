"""`megascale data`: makes tokenised corpora from files, and inspects them."""

from __future__ import annotations

import codecs
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megascale_job.corpus_record import (
    TOKENIZER_SUFFIXES,
    CorpusRecord,
    record_path,
)
from megascale_job.visible import counted, visible
from megascale_trainer.data.indexed import (
    MAGIC,
    DataError,
    IndexedDataset,
    IndexedWriter,
    bin_path,
    idx_path,
    token_dtype,
)
from megascale_trainer.data.inputs import FORMATS, Document, Reading, documents_of
from megascale_trainer.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)

USER_MISTAKE_EXIT_CODE = 2
DEFAULT_BPE_VOCABULARY = 8192
_CORPUS_SUFFIXES = (".bin", ".idx", ".corpus.json", *TOKENIZER_SUFFIXES)
_DRAFT = re.compile(r"\..+\.(bin|idx)\.\d+\.tmp")  # left by a writer that was killed

app = typer.Typer(
    help="Tokenised corpora: make them from text, inspect them.", no_args_is_help=True
)
_messages = Console(stderr=True)
_output = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@dataclass(frozen=True)
class _Input:
    """One file to become one document."""

    path: Path
    size_bytes: int


@app.command()
def tokenize(
    inputs: Annotated[
        list[Path], typer.Argument(help="Text files, or folders to search with --glob.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Path prefix of the .bin/.idx pair.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes, bpe (trained here), or a file: Hugging Face tokenizers or tekken.json, "
            "a SentencePiece .model, tiktoken's ranks."
        ),
    ] = "bytes",
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary of a bpe trained here.", min=1)
    ] = DEFAULT_BPE_VOCABULARY,
    end_token: Annotated[
        str,
        typer.Option(
            help="The token that ends a document, or its id. By default the one that "
            "tokenizer_config.json or config.json next to the file names, or the file itself."
        ),
    ] = "",
    split_pattern: Annotated[
        str, typer.Option(help="Regular expression that divides text for tiktoken's ranks.")
    ] = "",
    tokenizer_sha256: Annotated[
        str, typer.Option(help="Refuse a tokenizer file with another SHA-256.")
    ] = "",
    glob: Annotated[str, typer.Option(help="Pattern of the files to take from a folder.")] = "**/*",
    format: Annotated[
        str,
        typer.Option(
            help="text (as it is, one document per file), jsonl or parquet (one per row); auto "
            "looks at each file, also inside gzip, bzip2 and xz."
        ),
    ] = "auto",
    field: Annotated[
        str, typer.Option(help="Field of JSON lines, or column of Parquet, with the text.")
    ] = "text",
    encoding: Annotated[
        str, typer.Option(help="Encoding of text and JSON lines, such as latin-1; default UTF-8.")
    ] = "",
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Replace bytes that are not text by U+FFFD, and count them."
        ),
    ] = False,
    max_bytes: Annotated[
        int, typer.Option(help="Stop before this many bytes of input; 0: no limit.", min=0)
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing corpus.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenise files into a .bin/.idx corpus, in the order of their names.

    A text file is one document; JSON lines and Parquet have one document per row. A copy of the
    tokenizer is put next to the corpus, and PREFIX.corpus.json records which one it is. A held-out
    corpus for trainer.evaluation needs the same tokenizer: --tokenizer PREFIX.tokenizer.json.

    Example: megascale data tokenize ~/texts --glob "**/*.txt" --output corpus
    """
    with _user_errors():
        reading = _reading(format, field, encoding, replace)
        files = _find(inputs, glob, max_bytes, output)
        if idx_path(output).exists() and not overwrite:
            raise DataError(f"{idx_path(output)}: exists already; add --overwrite to replace it")
        output.parent.mkdir(parents=True, exist_ok=True)
        with _progress(as_json) as progress:
            training = _documents(files, reading, progress, "learning the vocabulary")
            if tokenizer == "bpe":
                chosen: Tokenizer = BpeTokenizer.train(training, vocab_size)
            else:
                chosen = _existing_tokenizer(tokenizer, end_token, split_pattern)
            _compare_digest(chosen, tokenizer, tokenizer_sha256)
            reading.raw = chosen.kind == "bytes"
            reading.replaced = 0
            started = time.monotonic()
            writer = _write(chosen, _documents(files, reading, progress, "tokenising"), output)
            elapsed_s = max(time.monotonic() - started, 1e-9)
        copy = _tokenizer_path(output, chosen)
        summary = {
            "prefix": str(output),
            "documents": writer.documents,
            "tokens": writer.tokens,
            "input_files": len(files),
            "input_bytes": sum(file.size_bytes for file in files),
            "replaced_bytes": reading.replaced,
            "tokens_per_s": round(writer.tokens / elapsed_s),
            "tokenizer": chosen.kind,
            "tokenizer_file": str(copy or ""),
            "tokenizer_sha256": chosen.sha256,
            "end_token_id": chosen.end,
            "vocab_size": chosen.vocab_size,
            "dtype": token_dtype(chosen.vocab_size).name,
            "bin_sha256": writer.sha256,
        }
        _print(summary, as_json)


def _reading(format_name: str, field: str, encoding: str, replace: bool) -> Reading:
    if format_name not in FORMATS:
        raise DataError(f"--format {format_name}: is not known: use {', '.join(FORMATS)}")
    try:
        known = codecs.lookup(encoding).name if encoding else ""
    except LookupError as error:
        raise DataError(
            f"--encoding {encoding}: is not known: use a name such as latin-1"
        ) from error
    return Reading(format_name, field, known, replace)


def _compare_digest(tokenizer: Tokenizer, name: str, wanted: str) -> None:
    if wanted and tokenizer.sha256 != wanted.lower():
        found = tokenizer.sha256 or "no file, so no SHA-256"
        raise DataError(
            f"--tokenizer-sha256 {wanted}: {name} has {found}; give the file that has it"
        )


def _write(tokenizer: Tokenizer, documents: Iterable[Document], output: Path) -> IndexedWriter:
    """Write the corpus, its tokenizer and its record: all of them, or nothing."""
    with IndexedWriter(output, token_dtype(tokenizer.vocab_size)) as writer:
        for tokens, last in tokenizer.encode_stream(documents):
            writer.append(tokens)
            if last:
                writer.end_document()
        if not writer.documents:
            raise DataError("the input files have no document that is not empty")
        # Remove the tokenizer of a corpus that is replaced: it may have another suffix.
        writer.companions |= {Path(f"{output}{suffix}"): None for suffix in TOKENIZER_SUFFIXES}
        path = _tokenizer_path(output, tokenizer)
        if path is not None and isinstance(tokenizer, FileTokenizer):
            writer.companions[path] = tokenizer.content
        writer.describe = lambda: {record_path(output): _record(tokenizer, writer).encode()}
    return writer


def _record(tokenizer: Tokenizer, writer: IndexedWriter) -> str:
    assert tokenizer.end is not None  # else nothing was encoded
    return CorpusRecord(
        tokenizer_kind=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        end_token_id=tokenizer.end,
        vocab_size=tokenizer.vocab_size,
        highest_token_id=writer.highest,
        documents=writer.documents,
        tokens=writer.tokens,
        identity=writer.identity,
        bin_sha256=writer.sha256,
        split_pattern=tokenizer.split_pattern if isinstance(tokenizer, FileTokenizer) else "",
    ).to_json()


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(help="Path prefix of a .bin/.idx pair.")],
    documents: Annotated[int, typer.Option(help="Number of documents to show.", min=0)] = 3,
    tokens: Annotated[int, typer.Option(help="Number of tokens to show of each.", min=1)] = 64,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes or a tokenizer file; by default the one next to the corpus, else bytes."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the counts of a corpus and the beginning of its first documents.

    Example: megascale data inspect corpus
    """
    with _user_errors():
        corpus = IndexedDataset(prefix)
        record = _record_of(prefix)
        chosen = _existing_tokenizer(tokenizer or _own_tokenizer(prefix))
        if record is not None and record.tokenizer_sha256 != chosen.sha256:
            raise DataError(
                f"{prefix}: was made by the tokenizer of SHA-256 {record.tokenizer_sha256}, and "
                f"{tokenizer or _own_tokenizer(prefix)} has {chosen.sha256 or 'none'}"
            )
        lengths = corpus.document_lengths
        summary: dict[str, Any] = {
            "prefix": str(prefix),
            "documents": corpus.document_count,
            "sequences": corpus.sequence_count,
            "tokens": corpus.token_count,
            "dtype": corpus.dtype.name,
            "bin_bytes": bin_path(prefix).stat().st_size,
            "shortest_document_tokens": int(lengths.min()) if len(lengths) else 0,
            "longest_document_tokens": int(lengths.max()) if len(lengths) else 0,
            "tokenizer": chosen.kind,
            "tokenizer_sha256": chosen.sha256,
            "end_token_id": record.end_token_id if record is not None else chosen.end,
            "highest_token_id": record.highest_token_id if record is not None else None,
        }
        shown = [
            _beginning(corpus, number, tokens, chosen)
            for number in range(min(documents, len(lengths)))
        ]
        if as_json:
            _print({**summary, "first_documents": shown}, as_json)
            return
        _print(summary, as_json)
        for number, document in enumerate(shown):
            _output.rule(f"document {number}: {counted(document['tokens'], 'token')}")
            _output.print(
                visible(document["text"]) if document["text"] is not None else document["ids"],
                markup=False,
            )


def _beginning(
    corpus: IndexedDataset, number: int, count: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The first tokens of a document; ``text`` is None if one is outside the vocabulary."""
    beginning = corpus.read(number, 0, count)
    ids: list[int] = beginning.tolist()
    decodable = all(0 <= token < tokenizer.vocab_size for token in ids)
    text = tokenizer.decode(beginning) if decodable else None
    return {"tokens": int(corpus.document_lengths[number]), "ids": ids, "text": text}


def _find(inputs: list[Path], glob: str, max_bytes: int, output: Path) -> list[_Input]:
    """Non-empty files to read, by name; whole files only, up to ``max_bytes`` together.

    Tokenised corpora in the folders, such as the one to write, are left out.
    """
    paths: set[Path] = set()
    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if path.is_dir():
            found = {each for each in path.glob(glob) if each.is_file()}
            paths |= found - _of_corpora(found, output)
        else:
            paths.add(path)
    files: list[_Input] = []
    room_bytes = max_bytes or None
    for path in sorted(paths):
        size_bytes = path.stat().st_size
        if room_bytes is not None:
            if size_bytes > room_bytes:
                break
            room_bytes -= size_bytes
        if size_bytes:
            files.append(_Input(path, size_bytes))
    if not files:
        limit = f" within --max-bytes {max_bytes}" if max_bytes else ""
        raise DataError(
            f"no non-empty file found{limit} in {', '.join(map(str, inputs))} with --glob {glob!r}"
        )
    return files


def _of_corpora(found: set[Path], output: Path) -> set[Path]:
    """The files of tokenised corpora among ``found``, the corpus to write included."""
    prefixes = {output.resolve()}
    for path in found:
        if path.suffix == ".idx":
            with path.open("rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    prefixes.add(path.resolve().with_suffix(""))
    theirs = {f"{prefix}{suffix}" for prefix in prefixes for suffix in _CORPUS_SUFFIXES}
    return {path for path in found if str(path.resolve()) in theirs or _DRAFT.fullmatch(path.name)}


def _documents(
    files: Iterable[_Input], reading: Reading, progress: Progress, title: str
) -> Iterator[Document]:
    files = list(files)
    task = progress.add_task(title, total=sum(file.size_bytes for file in files))
    done_bytes = 0
    for file in files:
        before_bytes = done_bytes

        def show(read_bytes: int, before_bytes: int = before_bytes) -> None:
            progress.update(task, completed=before_bytes + read_bytes)

        yield from documents_of(file.path, reading, show)
        done_bytes += file.size_bytes
        progress.update(task, completed=done_bytes)


def _existing_tokenizer(name: str, end_token: str = "", split_pattern: str = "") -> Tokenizer:
    if name == "bytes":
        if end_token or split_pattern:
            raise DataError("--end-token and --split-pattern are of tokenizer files, not of bytes")
        return ByteTokenizer()
    if not Path(name).exists() and not name.endswith((".json", ".model", ".tiktoken")):
        raise DataError(
            f"tokenizer {name!r} is not known: use bytes, bpe (tokenize only) or the path of a "
            "tokenizer file"
        )
    return load_tokenizer(name, end_token, split_pattern)


def _tokenizer_path(prefix: Path, tokenizer: Tokenizer) -> Path | None:
    """Path of the tokenizer's copy next to its corpus; None for bytes, which need no file."""
    return Path(f"{prefix}{tokenizer.suffix}") if isinstance(tokenizer, FileTokenizer) else None


def _own_tokenizer(prefix: Path) -> str:
    """The tokenizer next to a corpus, else bytes."""
    paths = [Path(f"{prefix}{suffix}") for suffix in TOKENIZER_SUFFIXES]
    return next((str(path) for path in paths if path.exists()), "bytes")


def _record_of(prefix: Path) -> CorpusRecord | None:
    try:
        return CorpusRecord.load(prefix)
    except ValueError as error:
        raise DataError(str(error)) from error


@contextmanager
def _user_errors() -> Iterator[None]:
    """Print an error in one line and exit with status 2, without a traceback."""
    try:
        yield
    except DataError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'file'}: {error.strerror or error}"
    else:
        return
    shown = f"error: {visible(problem)}"
    _messages.print(shown, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(USER_MISTAKE_EXIT_CODE)


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=_messages,
        disable=quiet or not _messages.is_terminal,
        transient=True,
    )


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    for name, value in summary.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value or "-")
        # Plain lines instead of a table, so that paths and digests can be copied.
        typer.echo(f"{name.replace('_', ' '):<26}{visible(shown)}")


if __name__ == "__main__":
    app()
