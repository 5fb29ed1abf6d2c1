"""`megascale data`: make tokenised corpora from files, and inspect them."""

from __future__ import annotations

import json
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

from megascale_common.node.files import replace_file
from megascale_common.node.visible import visible
from megascale_trainer.data.errors import DataError
from megascale_trainer.data.indexed import IndexedDataset, bin_path, idx_path, token_dtype
from megascale_trainer.data.indexed_writer import IndexedWriter
from megascale_trainer.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer

USER_MISTAKE_EXIT_CODE = 2
DEFAULT_BPE_VOCABULARY = 8192
BATCH_BYTES = 8 << 20
BATCH_DOCUMENTS = 256

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
        typer.Option(help="bytes, bpe (trained here), or a Hugging Face tokenizers file (.json)."),
    ] = "bytes",
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary of a bpe trained here.", min=1)
    ] = DEFAULT_BPE_VOCABULARY,
    glob: Annotated[str, typer.Option(help="Which files of a folder.")] = "**/*",
    max_bytes: Annotated[
        int, typer.Option(help="Stop before this many bytes of input; 0: no limit.", min=0)
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing corpus.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenise files into a .bin/.idx corpus: one document per file, files in the order of names.

    Example: megascale data tokenize ~/texts --glob "**/*.txt" --output corpus
    """
    with _user_errors():
        files = _find(inputs, glob, max_bytes)
        if idx_path(output).exists() and not overwrite:
            raise DataError(f"{idx_path(output)}: exists already; add --overwrite to replace it")
        output.parent.mkdir(parents=True, exist_ok=True)
        with _progress(as_json) as progress:
            chosen = _tokenizer(tokenizer, vocab_size, files, progress)
            started = time.monotonic()
            with IndexedWriter(output, token_dtype(chosen.vocab_size)) as writer:
                for batch in _batches(_documents(files, progress, "tokenising")):
                    for tokens in chosen.encode(batch):
                        writer.add_document(tokens)
                elapsed_s = max(time.monotonic() - started, 1e-9)
                # Before the writer publishes the index, which makes the corpus exist.
                tokenizer_file = _publish_tokenizer(chosen, output)
        summary = {
            "prefix": str(output),
            "documents": writer.documents,
            "tokens": writer.tokens,
            "input_bytes": sum(file.size_bytes for file in files),
            "tokens_per_s": round(writer.tokens / elapsed_s),
            "tokenizer": chosen.kind,
            "tokenizer_file": tokenizer_file,
            "tokenizer_sha256": chosen.sha256,
            "vocab_size": chosen.vocab_size,
            "dtype": token_dtype(chosen.vocab_size).name,
            "bin_sha256": writer.sha256,
        }
        _print(summary, as_json)


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(help="Path prefix of a .bin/.idx pair.")],
    documents: Annotated[int, typer.Option(help="How many documents to show.", min=0)] = 3,
    tokens: Annotated[int, typer.Option(help="How many tokens of each to show.", min=1)] = 64,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes or a tokenizer file; by default the one beside the corpus, else bytes."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the counts of a corpus and the beginning of its first documents.

    Example: megascale data inspect corpus
    """
    with _user_errors():
        corpus = IndexedDataset(prefix)
        own = _tokenizer_path(prefix)
        chosen = _existing_tokenizer(tokenizer or (str(own) if own.exists() else "bytes"))
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
            _output.rule(f"document {number}: {document['tokens']} tokens")
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


def _find(inputs: list[Path], glob: str, max_bytes: int) -> list[_Input]:
    """Files to read, by name, empty ones left out, whole files only up to ``max_bytes``."""
    paths: set[Path] = set()
    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        paths.update(
            (found for found in path.glob(glob) if found.is_file()) if path.is_dir() else [path]
        )
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


def _documents(files: Iterable[_Input], progress: Progress, title: str) -> Iterator[bytes]:
    files = list(files)
    task = progress.add_task(title, total=sum(file.size_bytes for file in files))
    for file in files:
        yield file.path.read_bytes()
        progress.advance(task, file.size_bytes)


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Documents in batches of some :data:`BATCH_BYTES`, for tokenizers that use several cores."""
    batch: list[bytes] = []
    for document in documents:
        batch.append(document)
        if sum(map(len, batch)) >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _tokenizer(name: str, vocab_size: int, files: list[_Input], progress: Progress) -> Tokenizer:
    if name == "bpe":
        return BpeTokenizer.train(
            _documents(files, progress, "learning the vocabulary"), vocab_size
        )
    return _existing_tokenizer(name)


def _existing_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name.endswith(".json"):
        return BpeTokenizer.load(name)
    raise DataError(
        f"tokenizer {name!r} is not known: use bytes, bpe (tokenize only) or a path that ends in "
        ".json"
    )


def _tokenizer_path(prefix: Path) -> Path:
    return Path(f"{prefix}.tokenizer.json")


def _publish_tokenizer(tokenizer: Tokenizer, prefix: Path) -> str:
    """Store the tokenizer beside its corpus and return the file's path, empty for bytes."""
    path = _tokenizer_path(prefix)
    if not isinstance(tokenizer, BpeTokenizer):
        path.unlink(missing_ok=True)  # the tokenizer of a replaced corpus
        return ""
    replace_file(path, tokenizer.json_text)
    return str(path)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Print what is wrong in one line and exit with status 2, without a traceback."""
    try:
        yield
    except DataError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'file'}: {error.strerror or error}"
    else:
        return
    _messages.print(f"error: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
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
        shown = f"{value:,}" if isinstance(value, int) else str(value) or "-"
        # Plain lines, no table: paths and digests are there to be copied.
        typer.echo(f"{name.replace('_', ' '):<26}{shown}")


if __name__ == "__main__":
    app()
