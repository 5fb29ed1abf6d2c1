"""All signatures, in the order in which they are tried, and the patterns of unknown fatal lines.

The signatures are in ``signatures.toml``; docs/how-to/add-a-log-signature.md shows how to add one.
Numbered errors are in :mod:`megascale_common.node.logs.catalogue`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megascale_common.node.logs.categories import Action, Kind, Role


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of line, and how it is recognised.

    A line, in lower case, must contain one of ``literals``, which are in lower case. ``wide`` marks
    a signature that matches a vocabulary rather than one text; it does not apply to lines that
    declare themselves as information.
    """

    kind: Kind
    literals: tuple[str, ...]
    pattern: re.Pattern[str] | None  # None: a literal suffices
    unless: re.Pattern[str] | None = None  # a line that matches this is of another kind
    wide: bool = False


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the file; a pattern is one text or a list of alternatives."""

    category: str
    role: Role
    action: Action
    literals: list[str]
    pattern: str | list[str] = ""
    unless: str | list[str] = ""
    kernel: bool = False
    weak: bool = False
    wide: bool = False


def read(text: str) -> tuple[Signature, ...]:
    """The signatures in a TOML text, in its order.

    Raises:
        ValueError: it is not TOML, or a table is not a signature; the text names the table.
    """
    return tuple(_signature(name, table) for name, table in tomllib.loads(text).items())


def _signature(name: str, values: object) -> Signature:
    try:
        table = msgspec.convert(values, _Table)
        kind = Kind(
            name, table.category, table.role, table.action, kernel=table.kernel, weak=table.weak
        )
        flags = re.IGNORECASE if table.wide else re.NOFLAG
        pattern, unless = (_compiled(each, flags) for each in (table.pattern, table.unless))
    except (ValueError, re.error) as error:
        raise ValueError(f"signature {name}: {error}") from error
    literals = tuple(dict.fromkeys(literal.lower() for literal in table.literals))
    if not all(literals) or not literals:
        raise ValueError(f"signature {name}: literals: give at least one, and none that is empty")
    return Signature(kind, literals, pattern, unless, table.wide)


def _compiled(pattern: str | list[str], flags: re.RegexFlag) -> re.Pattern[str] | None:
    whole = pattern if isinstance(pattern, str) else "|".join(pattern)
    return re.compile(whole, flags) if whole else None


SIGNATURES = read(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

# A fatal line without a signature; the weak form only wraps another line.
WRAPPER = Kind("unknown-wrapper", "unknown", "root", "alert", weak=True)
FATAL = Kind("unknown-fatal", "unknown", "root", "alert")
# In lower case like all literals.
FATAL_LITERALS = ("error", "exception", "fatal", "nccl warn", "terminate called",
                  "segmentation fault", "core dumped", "corruption", "check failed", "exitcode",
                  "root cause", "assert failed", " warn ", "ncclcomminit",
                  "interface found", "panicked", "non-zero status",
                  "nccl failure", "mpi_err", "internal: ", "return code",
                  "sigsegv", "sigbus", "sigabrt", "free(): ", "malloc(): ", "double free",
                  "exited on signal", "munmap_chunk", "process received signal",
                  "smashing")  # fmt: skip
IGNORED = re.compile(
    r"NCCL INFO|^frame #\d|During handling of the above|another exception occurred"
    r"|\[Hardware Error\]|\b(?:0|no) errors?\b|stack trace: \*\*\*|^\s+File \""
    r"|(?i:\berrors?\"?[=:] ?(?:0\b|\"\"|null\b|none\b|<?nil\b))"
    r"|(?<!\w)(?<!DEBUG=)\[?(?:INFO|DEBUG)\b|\b\w+Warning:|^Exception ignored in"
    r"|\(non-fatal\)|\b[Ee]rror[ _]rate\b"
)
WRAPPERS = re.compile(
    r"terminate called|exitcode|ChildFailedError|DistBackendError|ncclInvalidUsage|Last error"
    r"|watchdog thread terminated|raised from|Root Cause|^Traceback|ncclSystemError"
    r"|unhandled system error|ncclInternalError|tasks? .*[Ee]xited|errors\.error_handler"
    r"|error_handler: \{|Connect to \S+ failed|RpcError|MPI_ERRORS_ARE_FATAL|\bAborted\b"
    r"|\bSIGABRT\b"
)
FATAL_PATTERN = re.compile(
    r"\b\w*(?:Error|Exception)\b|\b(?:ERROR|FATAL|[Ff]atal|[Ee]rror:)|NCCL WARN|terminate called"
    r"|[Ss]egmentation fault|core dumped|corruption|[Cc]heck failed|exitcode|Root Cause"
    r"|INTERNAL ASSERT FAILED|\.(?:h|cc|cu):\d+ WARN |unexpected system error"
    r"|ncclCommInit\w*\(.*\) failed|no socket interface found|panicked at|non-zero status"
    r"|NCCL failure|MPI_ERR\w*|error occurred|\bINTERNAL: .*failed"
    r"|Assertion\b.* failed|exits? with return code = ?-|\bSIG(?:SEGV|BUS|ABRT)\b"
    r"|\b(?:free|malloc|realloc|munmap_chunk)\(\): |double free or|Process received signal"
    r"|exited on signal \d"
    r"|stack smashing|NCCL error|CUDA error\b"
)
