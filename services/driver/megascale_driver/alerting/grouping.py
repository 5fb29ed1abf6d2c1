"""Lines of one root cause as one alert. Pure: it is told the time.

Lines of the same job and attempt within a few seconds are one cause: a dead node, the exits of its
workers, the spare. The first of them opens a group; what follows within COLLECT_S goes into the
same alert. Afterwards the group keeps quiet for REPEAT_S, unless a more urgent line comes; what it
kept quiet about is counted in its next alert.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from megascale_driver.core.orders.silencing import silenced
from megascale_driver.core.values.cluster import Silence
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.reasons import SEVERITIES, Severity, rank_of, severity_of

COLLECT_S: Final = 5.0
REPEAT_S: Final = 600.0
MAX_LINES: Final = 20  # of an alert; more are counted
MAX_GROUPS: Final = 1024  # the one that was heard of longest ago is forgotten

Root = tuple[str, int]  # job and attempt, or the subject of a line that is no job's and 0


@dataclass(frozen=True, slots=True)
class Alert:
    """One message: the lines of one cause, the most urgent severity among them.

    ``more`` lines of the cause are left out, or were kept quiet since its last alert.
    """

    severity: Severity
    job: str
    attempt: int
    lines: tuple[Audit, ...]
    more: int = 0

    @property
    def title(self) -> str:
        """The most urgent line, the earliest of them."""
        chosen = max(self.lines, key=_urgency)
        return f"{chosen.reason}: {chosen.message}"


def _urgency(line: Audit) -> int:
    severity = severity_of(line.reason)
    return -1 if severity is None else rank_of(severity)


@dataclass(slots=True)
class _Group:
    lines: list[Audit] = field(default_factory=list)
    more: int = 0
    due_s: float = 0.0  # 0: nothing waits
    quiet_until_s: float = 0.0
    sent: int = -1  # the urgency of its last alert


class Groups:
    """Collects lines that are at least as urgent as ``least`` and not of ``silenced`` reasons."""

    def __init__(self, least: Severity = "warning", silenced: Sequence[str] = ()) -> None:
        self._least, self._silenced = rank_of(least), frozenset(silenced)
        self._groups: OrderedDict[Root, _Group] = OrderedDict()
        self.held_back = 0  # lines that would have alerted, and that an operator has silenced

    def add(self, line: Audit, now_s: float, silences: Mapping[str, Silence] | None = None) -> None:
        """Take in a committed line; ``silences`` are the orders of operators."""
        urgency = _urgency(line)
        if urgency < self._least or line.reason in self._silenced:
            return
        if silenced(silences or {}, line, now_s):
            self.held_back += 1
            return
        root = (line.log, line.attempt) if line.log else (line.subject, 0)
        group = self._groups.setdefault(root, _Group())
        self._groups.move_to_end(root)
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        if not group.due_s and now_s < group.quiet_until_s and urgency <= group.sent:
            group.more += 1
            return
        if len(group.lines) < MAX_LINES:
            group.lines.append(line)
        else:
            group.more += 1
        group.due_s = group.due_s or now_s + COLLECT_S

    def due(self, now_s: float) -> list[Alert]:
        """The alerts whose time has come."""
        found = []
        for (name, attempt), group in self._groups.items():
            if not group.due_s or now_s < group.due_s:
                continue
            urgency = max(map(_urgency, group.lines))
            job = name if attempt or group.lines[0].log else ""
            found.append(Alert(SEVERITIES[urgency], job, attempt, tuple(group.lines), group.more))
            group.lines, group.more, group.due_s = [], 0, 0.0
            group.quiet_until_s, group.sent = now_s + REPEAT_S, urgency
        return found

    def next_s(self) -> float | None:
        """When the next alert is due; None: nothing waits."""
        return min((group.due_s for group in self._groups.values() if group.due_s), default=None)
