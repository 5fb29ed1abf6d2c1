"""The audit log in the driver's memory: the newest lines of all logs, listed and followed by token.

The order is that of etcd's revisions and, within one transaction, of the logs' names, so a driver
that takes over holds the same lines in the same order as the one before. A token names the last
line that a client has received; it is valid at every driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from megascale_common.service.errors import ExpiredError
from megascale_driver.core.values.events import Audit

HELD_LINES = 50_000
TRIM_LINES = 5_000  # dropped together, so that trimming costs little per line
BATCH_LINES = 256  # read before other tasks get a turn


def canonical(lines: Iterable[Audit]) -> tuple[Audit, ...]:
    """The lines of one commit in the order that every driver uses."""
    return tuple(sorted(lines, key=_key))


class AuditLog:
    """The newest lines, oldest first."""

    def __init__(self, held: int = HELD_LINES) -> None:
        self._held = held
        self._lines: list[Audit] = []
        self._first = 0  # number of lines dropped before the first held one
        self._positions: dict[tuple[str, int], int] = {}
        self._newest: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Audit]:
        return iter(self._lines)

    def __reversed__(self) -> Iterator[Audit]:
        return reversed(self._lines)

    def load(self, lines: Iterable[Audit]) -> None:
        """Hold these lines, in the order of their commits, instead of all others."""
        self._lines = []
        self._first = 0
        self._positions = {}
        self._newest = {}
        self.extend(lines)

    def extend(self, lines: Iterable[Audit], gone: Iterable[str] = ()) -> None:
        """Add committed lines and wake the followers; the jobs in ``gone`` are deleted."""
        for log in gone:
            self._forget(log)
        for line in lines:
            self._positions[_key(line)] = self._first + len(self._lines)
            self._newest[line.log] = max(line.seq, self._newest.get(line.log, 0))
            self._lines.append(line)
        if len(self._lines) > self._held + TRIM_LINES:
            dropped = len(self._lines) - self._held
            for line in self._lines[:dropped]:
                del self._positions[_key(line)]
            del self._lines[:dropped]
            self._first += dropped
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget(self, log: str) -> None:
        """Drop the lines of a deleted job: a new job of its name begins its log again.

        Tokens that name one of them become invalid.
        """
        if log in self._newest:
            self._lines = [line for line in self._lines if line.log != log]
            self._first = 0
            self._positions = {_key(line): at for at, line in enumerate(self._lines)}
            del self._newest[log]

    def behind(self, token: str) -> list[Audit]:
        """The lines behind the one that ``token`` names; for "" all held lines.

        Raises:
            ExpiredError: the line is no longer held.
            ValueError: not a token.
        """
        return self._lines[self._position(place_of(token)) - self._first if token else 0 :]

    def follow(self, token: str, wanted: Callable[[Audit], bool]) -> AsyncIterator[Audit]:
        """Wanted lines behind ``token`` as they are added, without end; "": from now on.

        Raises:
            ExpiredError: the line is no longer held; from the iterator: the reader is too slow, and
                its next line has been dropped.
            ValueError: not a token.
        """
        last = place_of(token) if token else self._newest_key()
        if last is not None:
            self._position(last)
        return self._follow(last, wanted)

    async def _follow(
        self, last: tuple[str, int] | None, wanted: Callable[[Audit], bool]
    ) -> AsyncIterator[Audit]:
        while True:
            # taken before the lines are read, so that no addition is missed
            changed = self._changed
            # Looked up by name each time: a new term loads the log again, with other positions.
            begin = self._position(last) - self._first if last is not None else 0
            batch = self._lines[begin : begin + BATCH_LINES]
            for line in batch:
                last = _key(line)
                if wanted(line):
                    yield line
            if batch:
                await asyncio.sleep(0)
            else:
                await changed.wait()

    def _newest_key(self) -> tuple[str, int] | None:
        return _key(self._lines[-1]) if self._lines else None

    def _position(self, key: tuple[str, int]) -> int:
        """The position behind the line ``key``."""
        found = self._positions.get(key)
        if found is not None:
            return found + 1
        log, seq = key
        if 0 <= seq <= self._newest.get(log, 0) and (seq or log in self._newest or not log):
            raise ExpiredError(
                f"the line that the token names is no longer among the newest {self._held}"
            )
        raise ValueError(f"{_text(key)!r} names no line of the audit log")


def token_of(line: Audit) -> str:
    """The token that names the line."""
    return _text(_key(line))


def _key(line: Audit) -> tuple[str, int]:
    return line.log, line.seq


def _text(key: tuple[str, int]) -> str:
    return f"{key[1]}.{key[0]}"


def place_of(token: str) -> tuple[str, int]:
    """The log and the number of the line that a token names; 0: before the first line.

    Raises:
        ValueError: not a token.
    """
    number, dot, log = token.partition(".")
    if not dot or not number.isdecimal() or len(number) > 18:
        raise ValueError(f"{token!r} is not a token of this cluster")
    return log, int(number)
