"""The streaming matcher: bytes of one log in, findings out, in bounded memory and time.

A gate comes first: the words of a whole block are compared with those of all literals at once,
and words that were found to be harmless are remembered. So a line without trouble costs no step
of its own; only lines that hold a word of a literal are cut out, decoded and matched.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from functools import lru_cache

from megascale_common.node.logs import catalogue
from megascale_common.node.logs.categories import Kind
from megascale_common.node.logs.signatures import (
    FATAL,
    FATAL_LITERALS,
    FATAL_PATTERN,
    IGNORED,
    SIGNATURES,
    WRAPPER,
    WRAPPERS,
    Signature,
)
from megascale_common.node.logs.templates import Templates

MAX_LINE_BYTES = 16_384  # of a longer line, the rest is skipped
MAX_SAMPLE_CHARS = 512
MAX_FINDINGS = 256  # kinds and templates that are counted apart between two calls of `take`

_BLOCK_BYTES = 262_144  # scanned at once, so that its list of words stays small
_MAX_CLEAN_WORDS = 16_384  # words known to be in no literal

LITERALS = tuple(
    sorted({literal for signature in SIGNATURES for literal in signature.literals}
           | {*FATAL_LITERALS, "NVRM: Xid", "SXid"})
)  # fmt: skip
# Words are runs of letters: two lines that differ in numbers have the same words.
_LETTERS = frozenset(string.ascii_letters.encode())
_TO_WORDS = bytes(code if code in _LETTERS else ord(" ") for code in range(256))
# Of words that ordinary lines are full of, a literal's other word is taken.
_COMMON = frozenset(
    {
        *("server", "device", "memory", "process", "processes", "port", "for", "more", "than"),
        *("to", "are", "bit", "client", "command", "files", "found", "from", "interface"),
        *("limit", "multi", "single", "worker"),
    }
)


def gate_word(literal: str) -> str:
    """The word of a literal, whole or in part, whose presence lets a line through the gate."""
    words: list[str] = re.findall("[A-Za-z]+", literal)
    return max(words, key=lambda word: (word.lower() not in _COMMON, len(word)))


def _any_of(words: set[str]) -> str:
    """A pattern of words, by their first letters: most of them are left out by one comparison."""
    rests: dict[str, list[str]] = {}
    for word in sorted(words):
        rests.setdefault(word[0], []).append(word[1:])
    return "|".join(f"{first}(?:{'|'.join(each)})" for first, each in rests.items())


_WORD = re.compile("[A-Za-z]+")
# The signatures that a line with this word may match, by number.
_GATES: dict[str, set[int]] = {}
for _number, _signature in enumerate(SIGNATURES):
    for _literal in _signature.literals:
        _GATES.setdefault(gate_word(_literal), set()).add(_number)
_TEXT_GATE = re.compile(_any_of(set(_GATES)))
_SOURCE = re.compile(r"\s+raise \w")
_GATE = re.compile(_any_of({gate_word(one) for one in LITERALS}).encode())


@dataclass(slots=True)
class Finding:
    """Lines of one fingerprint in one log.

    ``first`` is the ordinal of the first of them among the log's troubled lines;
    ``sample`` is that line, cut; ``fingerprint`` is equal on all nodes.
    """

    kind: Kind
    fingerprint: str
    sample: str
    first: int
    count: int = 1


class Matcher:
    """Matches one log as it grows. ``feed`` takes bytes, ``take`` returns what was found."""

    def __init__(self) -> None:
        self._pending = b""
        self._skipping = False
        self._ordinal = 0
        self._templates = Templates()
        self._found: dict[str, Finding] = {}
        self._clean: set[bytes] = set()
        self.dropped = 0  # troubled lines beyond MAX_FINDINGS fingerprints

    def feed(self, data: bytes) -> None:
        """The next bytes of the log; a line counts when its end has come."""
        if self._skipping:
            end = data.find(b"\n")
            if end < 0:
                return
            data = data[end + 1 :]
            self._skipping = False
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return
        self._scan(self._pending + data[:end])
        self._pending = b""
        self._keep(data[end + 1 :])

    def _keep(self, rest: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._pending)
        self._pending += rest[:room]
        if len(rest) > room:
            self._scan(self._pending)
            self._pending = b""
            self._skipping = True

    def close(self) -> None:
        """The log has ended: its last line needs no line end."""
        self._scan(self._pending)
        self._pending = b""

    def take(self) -> list[Finding]:
        """What was found since the last call, in order of the first line."""
        found, self._found = list(self._found.values()), {}
        return found

    def _scan(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            end = start + _BLOCK_BYTES
            if end < len(data):
                end = data.rfind(b"\n", start, end) + 1
            if end:
                self._scan_block(data[start:end])
            else:  # one line is longer than a block
                self._scan_block(data[start : start + MAX_LINE_BYTES])
                end = data.find(b"\n", start) + 1 or len(data)
            start = end

    def _scan_block(self, block: bytes) -> None:
        for start in self._troubled(block):
            end = block.find(b"\n", start)
            line = block[start : end if end >= 0 else None][:MAX_LINE_BYTES]
            text = line.decode(errors="replace").rstrip("\r")
            kind = kind_of(text)
            if kind is not None:
                self._add(kind, text)

    def _troubled(self, block: bytes) -> list[int]:
        """Offsets of the lines in a block that hold a word of the gate, ascending."""
        new = set(block.translate(_TO_WORDS).split()) - self._clean
        suspects = [word for word in new if _GATE.search(word)]
        if len(self._clean) + len(new) > _MAX_CLEAN_WORDS:
            self._clean.clear()
        if len(new) <= _MAX_CLEAN_WORDS:
            self._clean.update(new.difference(suspects))
        starts: set[int] = set()
        for word in suspects:
            at = block.find(word)
            while at >= 0:
                starts.add(block.rfind(b"\n", 0, at) + 1)
                end = block.find(b"\n", at)
                at = block.find(word, end) if end >= 0 else -1
        return sorted(starts)

    def _add(self, kind: Kind, text: str) -> None:
        unknown = kind in (FATAL, WRAPPER)
        fingerprint = f"{kind.name}: {self._templates.of(text)}" if unknown else kind.name
        known = self._found.get(fingerprint)
        self._ordinal += 1
        if known is not None:
            known.count += 1
        elif len(self._found) < MAX_FINDINGS:
            sample = text.strip()[:MAX_SAMPLE_CHARS]
            self._found[fingerprint] = Finding(kind, fingerprint, sample, self._ordinal)
        else:
            self.dropped += 1


def kind_of(line: str) -> Kind | None:
    """The kind of one line; None for a line that reports no trouble."""
    if _SOURCE.match(line):
        return None  # the next line of the traceback has the message
    if "SXid" in line and (kind := catalogue.sxid(line)):
        return kind
    if "NVRM: Xid" in line and (kind := catalogue.xid(line)):
        return kind
    for number in sorted({each for word in set(_WORD.findall(line)) for each in _asked(word)}):
        if _matches(SIGNATURES[number], line):
            return SIGNATURES[number].kind
    if IGNORED.search(line) or not FATAL_PATTERN.search(line):
        return None
    return WRAPPER if WRAPPERS.search(line) else FATAL


@lru_cache(maxsize=_MAX_CLEAN_WORDS)
def _asked(word: str) -> frozenset[int]:
    """Numbers of the signatures that a line with this word may match."""
    if not _TEXT_GATE.search(word):
        return frozenset()
    return frozenset().union(*(numbers for gate, numbers in _GATES.items() if gate in word))


def _matches(signature: Signature, line: str) -> bool:
    if not any(literal in line for literal in signature.literals):
        return False
    return signature.pattern is None or signature.pattern.search(line) is not None
