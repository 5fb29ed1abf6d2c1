"""The writer of tokenised corpora: all of a corpus on disk, or nothing.

The format stands in :mod:`megascale_trainer.data.indexed`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megascale_job.corpus_record import record_path
from megascale_trainer.data.errors import DataError
from megascale_trainer.data.indexed import (
    HEADER,
    MAGIC,
    TOKEN_DTYPES,
    VERSION,
    Tokens,
    bin_path,
    identity_of_files,
    idx_path,
)

MAX_DOCUMENT_TOKENS = 2**31 - 1  # lengths are int32


class IndexedWriter:
    """Writes a corpus document by document, one sequence each.

    Nothing appears under the corpus's name before it is complete.

    Use it as a context manager: leaving it normally publishes ``.bin`` then ``.idx``; an exception
    discards both.

    Attributes:
        documents, tokens: counts so far.
        highest: the highest token id so far, -1 without any.
        sha256: hex digest of ``.bin``, once published.
        identity: of the corpus, once published (:func:`megascale_trainer.data.indexed.identity`).
        beside: content of files that are published with the corpus, by path; None removes one.
        describe: makes more of them once ``sha256`` and ``identity`` are known.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self._code = {known: code for code, known in TOKEN_DTYPES.items()}[np.dtype(dtype)]
        self._dtype = np.dtype(dtype)
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._temporary = [_draft(path) for path in (self._bin, self._idx)]
        self._lengths: list[int] = []
        self._open_tokens = 0  # of the document that has not ended
        self._digest = hashlib.sha256()
        self.tokens = 0
        self.highest = -1
        self.sha256 = self.identity = ""
        self.beside: dict[Path, bytes | None] = {record_path(prefix): None}
        self.describe: Callable[[], dict[Path, bytes | None]] = dict
        try:
            self._file = self._temporary[0].open("wb")
        except OSError as error:
            raise DataError(f"{self._bin}: cannot be written: {error.strerror}") from error

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add_document(self, tokens: Tokens) -> None:
        """Append one document; raises as :meth:`append` does."""
        self.append(tokens)
        self.end_document()

    def append(self, tokens: Tokens) -> None:
        """Append tokens of a document that has not ended.

        Raises:
            ValueError: a token does not fit the dtype.
            DataError: the document is longer than the format allows.
        """
        limits = np.iinfo(self._dtype)
        self._open_tokens += len(tokens)
        if self._open_tokens > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"{self._bin}: document {self.documents} has more than {MAX_DOCUMENT_TOKENS} "
                "tokens, which the format cannot hold: divide it"
            )
        if not len(tokens):
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < limits.min or highest > limits.max:
            raise ValueError(f"token ids {lowest}..{highest} do not fit {self._dtype.name}")
        data = np.ascontiguousarray(tokens, self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(tokens)
        self.highest = max(self.highest, highest)

    def end_document(self) -> None:
        """The document has ended; it may be empty."""
        self._lengths.append(self._open_tokens)
        self._open_tokens = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._file.close()
            for path in (*self._temporary, *map(_draft, self.beside)):
                path.unlink(missing_ok=True)

    def _publish(self) -> None:
        _sync(self._file)
        lengths = np.array(self._lengths, np.int64)
        offsets = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        count = len(lengths)
        with self._temporary[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
            _sync(file)
        self.sha256 = self._digest.hexdigest()
        self.identity = identity_of_files(self._temporary[1], self._temporary[0])
        self.beside |= self.describe()
        for path, content in self.beside.items():
            if content is not None:
                with _draft(path).open("wb") as file:
                    file.write(content)
                    _sync(file)
        # The index makes a corpus exist. An old index is removed first, so that a crash in between
        # never leaves it beside new tokens.
        self._idx.unlink(missing_ok=True)
        for path, content in self.beside.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _draft(path).replace(path)
        self._temporary[0].replace(self._bin)
        self._temporary[1].replace(self._idx)
        folder = os.open(self._bin.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
