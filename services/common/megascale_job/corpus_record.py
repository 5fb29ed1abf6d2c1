"""The record next to a tokenised corpus, and the checks of data files against a job.

``PREFIX.corpus.json`` records how ``PREFIX.bin`` and ``PREFIX.idx`` were made: the tokenizer's
digest, the token that ends a document, and the highest token id. Corpora of other programs have
none. The records are compared with the job by the driver at submit, by `megascale plan`, and by the
data loaders at the start of each attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megascale_job.config import DataSource, JobConfig
from megascale_job.problems import JobProblem

RECORD_VERSION = 1
MAX_RECORD_BYTES = 1 << 16  # a record has about 500
# Suffixes of a tokenizer file next to its corpus: JSON, a SentencePiece model, tiktoken's ranks.
TOKENIZER_SUFFIXES = (".tokenizer.json", ".tokenizer.model", ".tokenizer.tiktoken")
_BLOCK_BYTES = 1 << 20
_SHOWN_DIGITS = 12  # of a digest in a message


@dataclass(frozen=True, slots=True)
class CorpusRecord:
    """Origin of a corpus.

    ``identity`` identifies its files: a record of earlier files at the same place does not count.
    """

    tokenizer_kind: str
    tokenizer_sha256: str
    end_token_id: int
    vocab_size: int
    highest_token_id: int
    documents: int
    tokens: int
    identity: str
    bin_sha256: str = ""
    split_pattern: str = ""

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"version": RECORD_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, prefix: str | Path) -> CorpusRecord | None:
        """The record next to a corpus; None if there is none.

        Raises:
            ValueError: it is damaged; the text names file and remedy.
            OSError: it cannot be read.
        """
        path = record_path(prefix)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            values = json.loads(data)
            return cls(**_checked(values))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: is damaged: {error}; restore it, or remove it where another program "
                "made the corpus"
            ) from error


def _checked(values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError("it is not a JSON object")
    if values.get("version") != RECORD_VERSION:
        raise ValueError(f"its version is {values.get('version')!r}, not {RECORD_VERSION}")
    found: dict[str, Any] = {}
    for name, field in CorpusRecord.__dataclass_fields__.items():
        value = values.get(name, field.default)
        wanted = int if field.type == "int" else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"its field {name} is {value!r}")
        found[name] = value
    return found


def record_path(prefix: str | Path) -> Path:
    """Path of the record of a corpus."""
    return Path(f"{prefix}.corpus.json")


def recorded_end(tokenizer_file: Path, sha256: str) -> tuple[int, str] | None:
    """The end-of-document token and the split pattern in the record of the tokenizer's corpus.

    None if ``tokenizer_file`` is not the copy of a tokenizer next to a corpus made with it.
    """
    for suffix in TOKENIZER_SUFFIXES:
        if tokenizer_file.name.endswith(suffix):
            prefix = tokenizer_file.with_name(tokenizer_file.name.removesuffix(suffix))
            try:
                record = CorpusRecord.load(prefix)
            except (OSError, ValueError):
                return None  # reported when the corpus is read
            if record is not None and record.tokenizer_sha256 == sha256:
                return record.end_token_id, record.split_pattern
    return None


def file_sha256(path: Path) -> str:
    """Hex digest of a file; raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def data_file_problems(config: JobConfig, *, most_sources: int = 1 << 20) -> Iterator[JobProblem]:
    """Contradictions between a job and its tokenizer file and the records of its corpora.

    A corpus without a record passes, and so does a file that this process may not read, because
    the loaders check the corpora themselves. At most the first ``most_sources`` of each list of
    sources are checked.
    """
    tokenizer = config.data.tokenizer
    digest = tokenizer.sha256.lower()
    if tokenizer.path:
        try:
            found = file_sha256(Path(tokenizer.path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            yield JobProblem(
                "trainer.data.tokenizer.path",
                f"there is no file {tokenizer.path}",
                "give the tokenizer that the corpora were made with; `megascale data tokenize` "
                "puts it next to each corpus",
            )
            return
        except OSError:
            found = digest
        if digest and found != digest:
            yield JobProblem(
                "trainer.data.tokenizer.sha256",
                f"is {digest}, and {tokenizer.path} has {found}",
                "give the file that the corpora were made with, or its digest",
            )
            return
        digest = found
    sections = [("data", config.data.sources)]
    if config.evaluates:
        sections.append(("evaluation", config.evaluation.sources))
    for section, sources in sections:
        for number, source in enumerate(sources[:most_sources]):
            field = f"trainer.{section}.sources[{number}].prefix"
            yield from _source_problems(config, field, source, digest)


def _source_problems(
    config: JobConfig, field: str, source: DataSource, digest: str
) -> Iterator[JobProblem]:
    try:
        record = CorpusRecord.load(source.prefix)
    except OSError:
        return
    except ValueError as error:
        yield JobProblem(field, str(error), "or tokenise again")
        return
    if record is None:
        return
    tokenizer = config.data.tokenizer
    other = record.tokenizer_sha256 != digest if digest else False
    if record.tokenizer_kind != tokenizer.kind or other:
        made = _named(record.tokenizer_kind, record.tokenizer_sha256, "")
        ours = _named(tokenizer.kind, digest, tokenizer.path)
        remedy = "tokenise it again with that one (megascale data tokenize --tokenizer)"
        yield JobProblem(
            field,
            f"{source.prefix} was made by {made}, and trainer.data.tokenizer is {ours}",
            f"name the tokenizer that made it, or {remedy}",
        )
    elif record.highest_token_id >= config.model.vocab_size:
        yield JobProblem(
            "trainer.model.vocab_size",
            f"{config.model.vocab_size} is too small: {source.prefix} ({field}) has token id "
            f"{record.highest_token_id}",
            f"use the size of the tokenizer that made the file, {record.vocab_size}, or more",
        )


def _named(kind: str, sha256: str, path: str) -> str:
    if kind == "bytes":
        return "the tokenizer bytes"
    where = f" {path}" if path else ""
    return f"the tokenizer{where} of SHA-256 {sha256[:_SHOWN_DIGITS] or 'unknown'}"
