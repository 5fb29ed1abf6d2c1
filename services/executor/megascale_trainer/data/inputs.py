"""Documents of input files, and their tokens, in memory that does not grow with a file's size.

A file is recognised by its content: text, JSON lines or Parquet, each also compressed by gzip,
bzip2 or xz. Text is one document per file, the others have one per row. A file that is recognised
but cannot be read is refused with the remedy; nothing is guessed.

A long document is encoded in windows that overlap. Two neighbours are joined at a character where a
token begins in both, in the middle of a stretch of the overlap in which both have exactly the same
tokens: there neither window is affected by its own edge, so the tokens are those of the whole
document. Windows that agree nowhere (a word of thousands of letters) are encoded as one.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.indexed import MAGIC, DataError, Tokens

FORMATS = ("auto", "text", "jsonl", "parquet")
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # from which a file is recognised
MAX_LINE_CHARS = 64 << 20  # of JSON lines: a row is read whole
PARQUET_ROWS = 64  # that are read together
_COMPRESSED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_REFUSED = {
    b"\x28\xb5\x2f\xfd": "is compressed by zstd, which is not read here: decompress it (zstd -d)",
    b"PK\x03\x04": "is a zip archive, which is not read here: unpack it",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive, which is not read here: unpack it",
    b"%PDF-": "is a PDF, which is not read here: take its text out (pdftotext)",
    MAGIC[:7]: "is the index of a tokenised corpus: leave it out with --glob",
}
_MARKS = (  # the longer ones first: UTF-16's begins UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ROWS_SUFFIXES = (".jsonl", ".ndjson")
_AS_IT_IS = "--format text takes a file as it is"


@dataclass(slots=True)
class Reading:
    """How input files are read.

    Attributes:
        format: one of :data:`FORMATS`; text takes a file as it is.
        field: of JSON lines and columns of Parquet, that has the text.
        encoding: of text and JSON lines; empty: UTF-8, or what a mark at the begin says.
        replace: whether what is no text becomes a replacement character, else it is refused.
        raw: whether a file of bytes that are no text is taken as well.
        replaced: how often that was done.
    """

    format: str = "auto"
    field: str = "text"
    encoding: str = ""
    replace: bool = False
    raw: bool = False
    replaced: int = 0

    def on_error(self, error: UnicodeError) -> tuple[str, int]:
        """The handler of codecs: counts and replaces, or raises."""
        if not self.replace or not isinstance(error, UnicodeDecodeError):
            raise error
        self.replaced += 1
        return "\ufffd", error.end


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its bytes, UTF-8 where it is text, block after block."""

    name: str
    blocks: Iterable[bytes]
    reading: Reading = field(default_factory=Reading)


def documents_of(
    path: Path, reading: Reading, progress: Callable[[int], None] = lambda read: None
) -> Iterator[Document]:
    """The documents of a file; ``progress`` gets how many of its bytes were read so far.

    Raises:
        DataError: it cannot be read as what it is; names the file and the remedy.
    """
    with path.open("rb") as raw:
        opened = _decompressed(raw, reading)
        for document in _whole(path, _documents(path, opened, reading)):
            blocks = _counted(_whole(path, document.blocks), raw, progress)
            yield Document(document.name, blocks, reading)


_T = TypeVar("_T")


def _whole(path: Path, parts: Iterable[_T]) -> Iterator[_T]:
    """``parts`` of a file that may be compressed; raises DataError where it is damaged."""
    try:
        yield from parts
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(
            f"{path}: is damaged where it is compressed: {error}; restore it, or leave it out"
        ) from error


def _counted(
    blocks: Iterable[bytes], raw: IO[bytes], progress: Callable[[int], None]
) -> Iterator[bytes]:
    for block in blocks:
        yield block
        progress(raw.tell())


def _decompressed(raw: IO[bytes], reading: Reading) -> IO[bytes]:
    head = raw.read(8)
    raw.seek(0)
    if reading.format == "text":
        return raw
    for magic, opened in _COMPRESSED.items():
        if head.startswith(magic):
            return io.BufferedReader(opened(raw))
    return raw


def _documents(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Document]:
    head = _head(file)
    kind = reading.format
    if kind == "auto":
        for magic, problem in _REFUSED.items():
            if head.startswith(magic):
                raise DataError(f"{path}: {problem} ({_AS_IT_IS})")
        kind = "text"
        if head.startswith(b"PAR1"):
            kind = "parquet"
        elif _has_rows(path, head, file):
            kind = "jsonl"
    if kind == "parquet":
        yield from _parquet(path, file, reading)
    elif kind == "jsonl":
        yield from _json_lines(path, file, reading, _encoding(head, reading))
    else:
        yield Document(str(path), _text(path, file, head, reading))


def _head(file: IO[bytes]) -> bytes:
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return head


def _encoding(head: bytes, reading: Reading) -> str:
    if reading.encoding or reading.format == "text":
        return reading.encoding or "utf-8"
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


def _has_rows(path: Path, head: bytes, file: IO[bytes]) -> bool:
    """Whether a file has JSON objects line by line; its name decides where it has one line."""
    if any(suffix in _ROWS_SUFFIXES for suffix in path.suffixes[-2:]):
        return True
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        return False
    rows: list[bytes] = []
    while len(rows) < 2 and (line := file.readline(MAX_LINE_CHARS)):
        if line.strip():
            rows.append(line.removeprefix(codecs.BOM_UTF8))
            if not _is_object(rows[-1]):
                break
    file.seek(0)
    return len(rows) == 2 and _is_object(rows[1])


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(path: Path, file: IO[bytes], reading: Reading, encoding: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(path, _decoded(path, _read(file), reading, encoding)), 1):
        if not line.strip():
            continue
        name = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: is no JSON: {error}; correct it ({_AS_IT_IS})") from error
        yield from _row(name, row, reading)


def _lines(path: Path, texts: Iterable[str]) -> Iterator[str]:
    parts: list[str] = []
    length = 0
    for text in texts:
        *ended, rest = text.split("\n")
        for line in ended:
            yield "".join([*parts, line])
            parts, length = [], 0
        parts.append(rest)
        length += len(rest)
        if length > MAX_LINE_CHARS:
            raise DataError(
                f"{path}: has a line of more than {MAX_LINE_CHARS >> 20} Mi characters, and begins "
                f"as JSON lines do: divide it ({_AS_IT_IS})"
            )
    yield "".join(parts)


def _read(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _parquet(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"{path}: is Parquet, which needs the `pyarrow` library: pip install 'megascale[data]'"
        ) from error
    try:
        table = ParquetFile(file)
        columns = table.schema_arrow.names
        if reading.field not in columns:
            raise _without_field(str(path), columns, reading)
        number = 0
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[reading.field]):
            for value in batch.column(0):
                number += 1
                row = {reading.field: value.as_py()}
                yield from _row(f"{path}: row {number}", row, reading)
    except ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; restore it") from error


def _row(name: str, row: Any, reading: Reading) -> Iterator[Document]:
    if not isinstance(row, dict) or reading.field not in row:
        names = list(row) if isinstance(row, dict) else []
        raise _without_field(name, names, reading)
    text = row[reading.field]
    if not isinstance(text, str):
        raise DataError(
            f"{name}: its field {reading.field!r} is no text but {type(text).__name__}: name "
            f"another one with --field ({_AS_IT_IS})"
        )
    try:
        data = text.encode("utf-8", "replace" if reading.replace else "strict")
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: has half a character: {error}; --replace takes it") from error
    if data:
        yield Document(name, [data], reading)


def _without_field(name: str, names: list[str], reading: Reading) -> DataError:
    known = ", ".join(map(repr, names[:8])) or "none"
    return DataError(
        f"{name}: has no field {reading.field!r}, in which the text would be; its fields: {known}: "
        f"name one with --field ({_AS_IT_IS})"
    )


def _text(path: Path, file: IO[bytes], head: bytes, reading: Reading) -> Iterator[bytes]:
    """The file's bytes; as UTF-8 where they have another encoding."""
    encoding = _encoding(head, reading)
    if encoding == "utf-8":
        # Most files with a NUL are no text; ASCII in UTF-16 without a mark is valid UTF-8, too.
        if not reading.raw and not reading.replace and b"\x00" in head:
            raise DataError(
                f"{path}: has NUL bytes, so it is no UTF-8 text: give its --encoding (utf-16-le, "
                "utf-16-be), leave it out with --glob, or --replace takes it"
            )
        yield from _read(file)
        return
    for text in _decoded(path, _read(file), reading, encoding):
        yield text.encode()


def text_blocks(document: Document) -> Iterator[str]:
    """The text of a document whose blocks are UTF-8; raises DataError where they are not."""
    yield from _decoded(document.name, document.blocks, document.reading, "utf-8")


def texts_of(documents: Iterable[Document]) -> Iterator[str]:
    """The texts of documents in pieces that end with a line where they can."""
    for document in documents:
        rest = ""
        for block in text_blocks(document):
            rest += block
            if len(rest) >= BLOCK_BYTES:
                end = rest.rfind("\n") + 1 or rest.rfind(" ") or len(rest)
                yield rest[:end]
                rest = rest[end:]
        yield rest


def _decoded(
    name: object, blocks: Iterable[bytes], reading: Reading, encoding: str
) -> Iterator[str]:
    handler = f"megascale-{id(reading)}"
    codecs.register_error(handler, reading.on_error)
    decoder = codecs.getincrementaldecoder(encoding)(handler)
    read = begin = 0  # ``begin`` is of what the decoder gets, with what it has kept
    try:
        for block in blocks:
            begin = read - len(decoder.getstate()[0])
            read += len(block)
            yield decoder.decode(block)
        begin = read - len(decoder.getstate()[0])
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        wrong = error.object[error.start : error.start + 1].hex()
        raise DataError(
            f"{name}: is no {encoding} text: 0x{wrong} at byte {begin + error.start:,}: give its "
            "--encoding (latin-1, cp1252, gb18030), leave it out with --glob, or --replace puts a "
            "mark in place of such bytes"
        ) from error


WINDOW_CHARS = 1 << 16
OVERLAP_CHARS = 1 << 12
EDGE_CHARS = 1 << 10  # of the overlap, at both ends: a window's tokens may differ there
BATCH_CHARS = 1 << 20  # that are encoded together, some 200 bytes of memory a character
BATCH_WINDOWS = 256
# Text that agrees nowhere is encoded as one up to here, in about a gigabyte of memory.
MAX_UNDIVIDED_CHARS = 4 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, and the characters at which each begins and ends."""

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ids: Any, offsets: Sequence[tuple[int, int]]) -> Encoded:
        """From lists as the libraries return them."""
        places = np.array(offsets, np.int64).reshape(-1, 2)
        return cls(np.array(ids, np.int32), places[:, 0], places[:, 1])


EncodeTexts = Callable[[Sequence[str]], list[Encoded]]


@dataclass(frozen=True, slots=True)
class _Window:
    name: str
    text: str
    begin: int  # of the document's characters
    last: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


@dataclass(frozen=True, slots=True)
class _Held:
    """A window whose tokens up to ``done`` are delivered; the rest waits for the next window."""

    window: _Window
    found: Encoded
    done: int


def encode_windows(
    encode: EncodeTexts, documents: Iterable[Document]
) -> Iterator[tuple[str, Tokens, bool]]:
    """Pieces of the documents' tokens: the document's name, the tokens, whether it ends there.

    Raises:
        DataError: a document is no text, or cannot be divided.
    """
    held: _Held | None = None
    for batch in _batches(_windows(documents)):
        for window, found in zip(batch, encode([each.text for each in batch]), strict=True):
            current = _Held(window, found, 0)
            if held is not None:
                joint = _joint(held, window, found)
                if joint is None:
                    current = _together(held, window, encode)
                else:
                    yield window.name, held.found.ids[held.done : joint[0]], False
                    current = _Held(window, found, joint[1])
            held = None if window.last else current
            if window.last:
                yield window.name, current.found.ids[current.done :], True


def _together(held: _Held, window: _Window, encode: EncodeTexts) -> _Held:
    """Two windows as one, of which the tokens that ``held`` has delivered are delivered."""
    merged = _merged(held.window, window)
    found = encode([merged.text])[0]
    done = 0
    if held.done:
        done = int(np.searchsorted(found.starts, held.found.starts[held.done]))
        if not np.array_equal(found.ids[:done], held.found.ids[: held.done]):
            raise _undividable(merged)
    return _Held(merged, found, done)


def _joint(held: _Held, window: _Window, found: Encoded) -> tuple[int, int] | None:
    """Token numbers, in the window before and in this one, at which the second takes over."""
    low, high = window.begin + EDGE_CHARS, held.window.end - EDGE_CHARS
    before = _between(held.found, held.window.begin, low, high)
    after = _between(found, window.begin, low, high)
    count = len(before)
    if count < 2 or count != len(after):
        return None
    same = (
        np.array_equal(held.found.ids[before], found.ids[after])
        and np.array_equal(
            held.found.starts[before] + held.window.begin, found.starts[after] + window.begin
        )
        and np.array_equal(
            held.found.ends[before] + held.window.begin, found.ends[after] + window.begin
        )
    )
    if not same:
        return None
    starts, ends = found.starts[after], found.ends[after]
    # A character of several tokens is not divided.
    clean = np.flatnonzero((ends[:-1] <= starts[1:]) & (starts[:-1] < starts[1:])) + 1
    if not len(clean):
        return None
    chosen = int(clean[np.abs(clean - count // 2).argmin()])
    at = int(before[chosen])
    return (at, int(after[chosen])) if at >= held.done else None


def _between(found: Encoded, begin: int, low: int, high: int) -> npt.NDArray[np.int64]:
    """Numbers of the tokens that lie between two characters of the document."""
    return np.flatnonzero((found.starts + begin >= low) & (found.ends + begin <= high))


def _merged(before: _Window, after: _Window) -> _Window:
    text = before.text[: after.begin - before.begin] + after.text
    merged = _Window(before.name, text, before.begin, after.last)
    if len(text) > MAX_UNDIVIDED_CHARS:
        raise _undividable(merged)
    return merged


def _undividable(window: _Window) -> DataError:
    return DataError(
        f"{window.name}: {len(window.text):,} characters from character {window.begin:,} on have "
        "no place at which their tokens can be divided; leave the file out, or divide it"
    )


def _windows(documents: Iterable[Document]) -> Iterator[_Window]:
    for document in documents:
        text, begin = "", 0
        for block in text_blocks(document):
            text += block
            while len(text) > WINDOW_CHARS:
                yield _Window(document.name, text[:WINDOW_CHARS], begin, last=False)
                text = text[WINDOW_CHARS - OVERLAP_CHARS :]
                begin += WINDOW_CHARS - OVERLAP_CHARS
        yield _Window(document.name, text, begin, last=True)


def _batches(windows: Iterable[_Window]) -> Iterator[list[_Window]]:
    """Windows together, for tokenizers that use several cores."""
    batch: list[_Window] = []
    chars = 0
    for window in windows:
        batch.append(window)
        chars += len(window.text)
        if chars >= BATCH_CHARS or len(batch) == BATCH_WINDOWS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
