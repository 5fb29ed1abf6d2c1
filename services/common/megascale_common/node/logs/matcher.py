"""The streaming matcher: bytes of one log in, findings out, in bounded memory and time.

Note [Gate of the matcher]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Logs of training are megabytes of lines without trouble, so almost all lines must be ruled out
without Python code per line. The gate removes digits, so that lines which differ only in numbers
have one shape, and remembers the shapes and words that were harmless. Whole blocks are compared
with these sets at once. Only lines that contain a word of a literal are cut out, decoded and
matched against signatures. Both sets are bounded and cleared when they are full.
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

MAX_LINE_BYTES = 16_384  # the rest of a longer line is skipped
MAX_SAMPLE_CHARS = 512
MAX_FINDINGS = 256  # kinds and templates that are counted separately between two calls of `take`

_BLOCK_BYTES = 262_144  # scanned at once, so that its list of words stays small
_MAX_CLEAN_WORDS = 16_384  # words known to be in no literal
_MAX_CLEAN_SHAPES = 8_192  # lines without their digits, known to contain no word of a literal
_VARIED_BLOCKS = 16  # for so many blocks words come first, after one with mostly new shapes
_MAX_SHAPE_BYTES = 512  # the shape of a longer line is not remembered

LITERALS = tuple(
    sorted(
        {literal for signature in SIGNATURES for literal in signature.literals}
        | {*FATAL_LITERALS, *catalogue.LITERALS}
    )
)
# Words are runs of letters in lower case. Digits are left out; see Note [Gate of the matcher].
_DIGITS = b"0123456789"
_TO_SHAPE = bytes(
    ord(chr(code).lower())
    if chr(code) in string.ascii_letters
    else code
    if code == ord("\n")
    else ord(" ")
    for code in range(256)
)
_NO_DIGITS = str.maketrans("", "", _DIGITS.decode())
# Words that are frequent in ordinary lines. The gate prefers another word of the literal.
_COMMON = frozenset(
    {
        *("server", "device", "memory", "process", "processes", "port", "for", "more", "than"),
        *("to", "are", "bit", "client", "command", "files", "found", "from", "interface"),
        *("limit", "multi", "single", "worker", "link", "node", "time", "host", "input", "output"),
        *("local", "event", "file", "read", "work", "module", "not", "all", "system"),
        "gradient",
    }
)
_WHOLE = 3  # a word of at most so many letters must be a whole word of the line


def gate_word(literal: str) -> str:
    """The word of a literal that lets a line through the gate."""
    words: list[str] = _WORD.findall(literal.translate(_NO_DIGITS))
    return max(words, key=lambda word: (word not in _COMMON, len(word)))


def _any_of(words: set[str]) -> str:
    """A pattern of words, grouped by first letter, so that one comparison rules out most."""
    rests: dict[str, list[str]] = {}
    for word in sorted(words):
        rests.setdefault(word[0], []).append(word[1:])
    return "|".join(f"{first}(?:{'|'.join(each)})" for first, each in rests.items())


def _passes(words: set[str]) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern of the long words, which can be part of a line's word, and the short words."""
    short = frozenset(word for word in words if len(word) <= _WHOLE)
    return re.compile(_any_of(words - short)), short


_WORD = re.compile("[a-z]+")
# By word, the numbers of the signatures that a line with the word can match.
_GATES: dict[str, set[int]] = {}
for _number, _signature in enumerate(SIGNATURES):
    for _literal in _signature.literals:
        _GATES.setdefault(gate_word(_literal), set()).add(_number)
_TEXT_GATE, _TEXT_SHORT = _passes(set(_GATES))
_SOURCE = re.compile(r"\s+raise \w")
_PART, _SHORT = _passes({gate_word(one) for one in LITERALS})
_GATE = re.compile(_PART.pattern.encode())
_GATE_SHORT = frozenset(word.encode() for word in _SHORT)
_STARTS = frozenset(gate_word(one).encode()[: _WHOLE + 1] for one in LITERALS)


def _may_pass(word: bytes) -> bool:
    """Whether this word contains a long word of the gate; first letters rule out most words."""
    parts = [word[at : at + _WHOLE + 1] for at in range(len(word) - _WHOLE)]
    return not _STARTS.isdisjoint(parts) and _GATE.search(word) is not None


@dataclass(slots=True)
class Finding:
    """Lines of one fingerprint in one log.

    ``first`` is the ordinal of the first of them among the log's troubled lines, ``sample`` that
    line, cut. ``fingerprint`` is equal on all nodes.
    """

    kind: Kind
    fingerprint: str
    sample: str
    first: int
    count: int = 1


class Matcher:
    """Matches one log as it grows. ``feed`` takes bytes, ``take`` returns findings."""

    def __init__(self) -> None:
        self._pending = b""
        self._skipping = False
        self._ordinal = 0
        self._templates = Templates()
        self._found: dict[str, Finding] = {}
        self._clean_shapes: set[bytes] = set()
        self._clean_words: set[bytes] = set()
        self._varied = 0  # number of next blocks whose words are checked before their shapes
        self.dropped = 0  # troubled lines beyond MAX_FINDINGS fingerprints

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log; a line counts once its end is there."""
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
        """The log has ended; match a last line without an end."""
        self._scan(self._pending)
        self._pending = b""

    def take(self) -> list[Finding]:
        """Findings since the last call, in the order of their first lines."""
        found = list(self._found.values())
        self._found = {}
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
        text = block.translate(_TO_SHAPE, _DIGITS)
        suspects = None
        if self._varied:  # shapes do not repeat here, so words come first
            self._varied -= 1
            suspects = self._suspects(text)
            if not suspects:
                return
        shapes = text.split(b"\n")
        new = set(shapes) - self._clean_shapes
        if not new:
            return
        if 2 * len(new) > len(shapes):
            self._varied = _VARIED_BLOCKS
        if suspects is None:
            suspects = self._suspects(b" ".join(new))
        troubled = {shape for shape in new if not suspects.isdisjoint(shape.split())}
        self._remember(new - troubled)
        if not troubled:
            return
        for shape, line in zip(shapes, block.split(b"\n"), strict=True):
            if shape in troubled:
                whole = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r")
                kind = kind_of(whole)
                if kind is not None:
                    self._add(kind, whole)

    def _suspects(self, text: bytes) -> set[bytes]:
        """Words of this text that contain a word of the gate."""
        new = set(text.split()) - self._clean_words
        suspects = {word for word in new if word in _GATE_SHORT or _may_pass(word)}
        if len(self._clean_words) + len(new) > _MAX_CLEAN_WORDS:
            self._clean_words.clear()
        if len(new) <= _MAX_CLEAN_WORDS:
            self._clean_words.update(new - suspects)
        return suspects

    def _remember(self, shapes: set[bytes]) -> None:
        """Remember that lines of these shapes are harmless."""
        if len(self._clean_shapes) + len(shapes) > _MAX_CLEAN_SHAPES:
            self._clean_shapes.clear()
        if len(shapes) <= _MAX_CLEAN_SHAPES:
            self._clean_shapes.update(one for one in shapes if len(one) <= _MAX_SHAPE_BYTES)

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
    low = line.lower()
    if "xid" in low and (kind := catalogue.numbered(line)):
        return kind
    ignored = IGNORED.search(line) is not None
    words = set(_WORD.findall(low.translate(_NO_DIGITS)))
    for number in sorted({each for word in words for each in _asked(word)}):
        signature = SIGNATURES[number]
        if matches(signature, line, low) and not (signature.wide and ignored):
            return signature.kind
    if ignored or not FATAL_PATTERN.search(line):
        return None
    if (kind := catalogue.cuda(line)) is not None:
        return kind
    return WRAPPER if WRAPPERS.search(line) else FATAL


@lru_cache(maxsize=_MAX_CLEAN_WORDS)
def _asked(word: str) -> frozenset[int]:
    """Numbers of the signatures that a line with this word can match."""
    if word in _TEXT_SHORT:
        return frozenset(_GATES[word])
    if not _TEXT_GATE.search(word):
        return frozenset()
    long = (item for item in _GATES.items() if len(item[0]) > _WHOLE)
    return frozenset().union(*(numbers for gate, numbers in long if gate in word))


def matches(signature: Signature, line: str, low: str) -> bool:
    """Whether a line matches a signature; ``low`` is the line in lower case."""
    if not any(literal in low for literal in signature.literals):
        return False
    if signature.pattern is not None and not signature.pattern.search(line):
        return False
    return signature.unless is None or not signature.unless.search(line)
