"""The tokens of documents of any length, in memory that does not grow with them.

A long document is encoded in windows that overlap. Two neighbours are joined at a character where
both have a token begin, in the middle of a stretch of the overlap in which both have the very same
tokens: there neither feels its own edge any more, so the tokens are those of the whole document.
Where two windows agree nowhere (a word of thousands of letters), they are encoded as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_trainer.data.errors import DataError
from megascale_trainer.data.indexed import Tokens
from megascale_trainer.data.inputs import Document, text_blocks

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
