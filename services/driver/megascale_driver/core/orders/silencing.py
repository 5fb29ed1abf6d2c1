"""Alerts that are kept quiet for a time, by order of an operator.

A silence is about one node (``nodes/NAME``), one job (``jobs/NAME``, with all lines of its log), or
one reason of the audit log. It holds back alerts alone: what is decided and written stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.cluster import Silence
from megascale_driver.core.values.events import Audit, SilenceRequested
from megascale_job.visible import counted

MAX_SILENCES: Final = 256  # every alert asks them
MAX_SILENCE_S: Final = 30 * 86_400.0


def order(draft: Draft, event: SilenceRequested) -> None:
    """Begin, change or end a silence; those that have ended by themselves go."""
    for subject in [s for s, each in draft.silences.items() if each.until_s <= draft.now_s]:
        del draft.silences[subject]
    known = draft.silences.get(event.subject)
    if event.duration_s <= 0:
        if known is not None:
            del draft.silences[event.subject]
            draft.log(
                "SILENCE_ENDED",
                f"alerts of {event.subject} are sent again: {event.reason}",
                subject=_place(event.subject),
                actor=event.actor,
                outcome=f"it would have ended in {_duration(known.until_s - draft.now_s)}",
            )
        return
    if known is None and len(draft.silences) >= MAX_SILENCES:
        draft.refuse(
            "TOO_MANY_SILENCES",
            f"subject: {MAX_SILENCES} silences are in force, which is the limit: end one "
            "(`megascale silence` lists them, `megascale silence SUBJECT --end` ends one)",
        )
        return
    until_s = draft.now_s + event.duration_s
    draft.silences[event.subject] = Silence(event.subject, until_s, event.reason, event.actor)
    draft.log(
        "ALERTS_SILENCED",
        f"nobody is alerted of {event.subject}: {event.reason}",
        subject=_place(event.subject),
        actor=event.actor,
        outcome=f"for {_duration(event.duration_s)}; decisions and this log go on as before",
    )


def silenced(silences: Mapping[str, Silence], line: Audit, now_s: float) -> bool:
    """Whether somebody wants to hear nothing of this line."""
    if not silences:
        return False
    keys = (line.reason, line.subject, f"jobs/{line.log}")
    return any((each := silences.get(key)) is not None and each.until_s > now_s for key in keys)


def _place(subject: str) -> str:
    """The subject of the line in the audit log: a reason is about the cluster."""
    return subject if "/" in subject else "cluster"


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 72 else counted(round(hours / 24), "day")
