"""An excerpt of the timeline: a few steps of the ranks of one group, on one clock (MegaScale 5.1).

It is read from a trace of these ranks, as `megascale timeline` writes it. A page holds at most
SHOWN_SPANS spans; beyond that the shortest are left out, and counted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megascale_client import InvalidRequest, Job
from megascale_dashboard import grid_view, job_view
from megascale_dashboard.page_values import Page

GROUPS = (
    "pp",
    "dp",
    "tp",
)  # the first that has more than one rank is shown unless another is named
MOST_RANKS = 16  # that a screen has rows for
MOST_STEPS = 10  # a group of 16 ranks has some thousand spans in them
SHOWN_SPANS = 20_000
SHOWN_ARROWS = 4_000
MAX_TRACE_BYTES = 64 << 20  # unpacked
_WHOLE = "step"  # the span around all others of a step
PATH = "critical path"
_BUSY, _WAITING = "compute", ("collective", "p2p")
Trace = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of a page; ``group`` "": the first that has several ranks."""

    rank: int = 0
    group: str = ""
    steps: int = 1
    first_step: int = 0  # 0: so that they are the newest
    beside: int = 0  # an earlier step to compare with; 0: none

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Wanted:
        """From the parameters of a URL.

        Raises:
            InvalidRequest: one of them is no number, or out of range.
        """
        numbers = {}
        for name, least, most in (
            ("rank", 0, 1 << 24),
            ("steps", 1, MOST_STEPS),
            ("step", 0, 1 << 40),
            ("beside", 0, 1 << 40),
        ):
            text = given.get(name) or str(least)
            if not text.isdecimal() or not least <= int(text) <= most:
                raise InvalidRequest(f"{name}: {text!r} is not a number from {least} to {most}")
            numbers[name] = int(text)
        group = given.get("group", "")
        if group not in ("", *GROUPS):
            raise InvalidRequest(f"group: {group!r} is none; give one of {', '.join(GROUPS)}")
        shown = numbers["rank"], group, numbers["steps"], numbers["step"], numbers["beside"]
        return cls(*shown)


def members(job: Job, wanted: Wanted) -> tuple[str, list[int], list[int]]:
    """The group's name, all its ranks, and those that are shown: around the requested rank.

    Raises:
        InvalidRequest: the job has no such rank.
    """
    sizes = job_view.layout(job)
    world = grid_view.world_size(sizes)
    if wanted.rank >= world:
        raise InvalidRequest(f"rank: the job has no rank {wanted.rank}; give 0 to {world - 1}")
    group = wanted.group or next((axis for axis in GROUPS if sizes[axis] > 1), GROUPS[0])
    line = grid_view.line(sizes, wanted.rank, group)
    first = max(0, min(line.index(wanted.rank) - MOST_RANKS // 2, len(line) - MOST_RANKS))
    return group, line, line[first : first + MOST_RANKS]


def unpacked(data: bytes) -> Trace:
    """The trace of a .json.gz.

    Raises:
        InvalidRequest: it is too large for a page.
    """
    # With a limit: a small .json.gz can unpack to more than this process has memory for.
    unpacker = zlib.decompressobj(wbits=31)
    text = unpacker.decompress(data, MAX_TRACE_BYTES)
    if unpacker.unconsumed_tail:
        raise InvalidRequest("steps: they have too many spans for a page; give fewer")
    found: Trace = json.loads(text)
    return found


def timeline(job: Job, wanted: Wanted, data: bytes, other: bytes | None = None) -> Page:
    """The rows, one for each rank with its lanes, and the columns of their spans.

    ``data`` is the .json.gz of a trace of these ranks, ``other`` that of an earlier step to compare
    with. ``path`` has the critical path among them, as [row, time, length, name].

    Times are whole microseconds since the first span. ``computes`` and ``waits`` are parts of the
    excerpt, 0 to 1; the rest of the time the rank is idle.
    """
    group, line, shown = members(job, wanted)
    trace = unpacked(data)
    events = trace["traceEvents"]
    rows = {rank: index for index, rank in enumerate(shown)}
    mine = [each for each in events if each["ph"] == "X" and each["pid"] in rows]
    steps = _steps(mine)
    spans = [each for each in mine if each["name"] != _WHOLE]
    kept = sorted(spans, key=lambda each: -each["dur"])[:SHOWN_SPANS]
    kept.sort(key=lambda each: (rows[each["pid"]], each["ts"]))
    kinds = sorted({(each["tid"], each["cat"]) for each in spans})
    columns, names = _columns(kept, rows)
    compared = None
    if other is not None:
        compared = compare_steps(mine, unpacked(other)["traceEvents"], rows)
    return {
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "rank": wanted.rank,
        "group": group,
        "axes": job_view.layout(job),
        "members": len(line),
        "rows": list(_rows(shown, events, spans, steps)),
        "lanes": [kind for _, kind in kinds],
        "names": names,
        "spans": columns,
        "arrows": _arrows(events, rows),
        "steps": steps,
        "path": _path(events, rows),
        "path_sentences": [
            str(text) for name, text in trace["otherData"].items() if name.startswith(PATH)
        ],
        "beside": compared,
        "left_out": len(spans) - len(kept),
        "command": f"megascale timeline {job.spec.name} --steps {wanted.steps} "
        f"--first-step {steps[0]['step'] if steps else 0} --open",
    }


def compare_steps(spans: Sequence[Trace], others: Iterable[Trace], rows: Mapping[int, int]) -> Page:
    """Each operation of these ranks now and in another step, the most grown first.

    In milliseconds for each step and rank: the mean over the ranks, and the rank with most growth.
    """
    other = [each for each in others if each["ph"] == "X" and each["pid"] in rows]
    here, there = _by_operation(spans), _by_operation(other)
    found: list[Page] = []
    for name in here.keys() | there.keys():
        now, then = here.get(name, {}), there.get(name, {})
        grown = {rank: now.get(rank, 0.0) - then.get(rank, 0.0) for rank in rows}
        most = max(grown, key=lambda rank: grown[rank])
        now_ms, then_ms = (sum(each.values()) / len(rows) for each in (now, then))
        found.append(
            {
                "name": name,
                "now_ms": round(now_ms, 3),
                "then_ms": round(then_ms, 3),
                "grown_ms": round(now_ms - then_ms, 3),
                "most_rank": most,
                "most_ms": round(grown[most], 3),
            }
        )
    found.sort(key=lambda each: (-each["grown_ms"], each["name"]))
    return {"step": min((each["args"]["step"] for each in other), default=0), "operations": found}


def _by_operation(spans: Iterable[Trace]) -> dict[str, dict[int, float]]:
    """Milliseconds in each operation, by rank, for each step."""
    found: dict[str, dict[int, float]] = {}
    steps: dict[int, set[int]] = {}
    for each in spans:
        rank = each["pid"]
        of_ranks = found.setdefault(each["name"], {})
        of_ranks[rank] = of_ranks.get(rank, 0.0) + each["dur"] / 1000
        steps.setdefault(rank, set()).add(each["args"]["step"])
    for of_ranks in found.values():
        for rank in of_ranks:
            of_ranks[rank] /= len(steps[rank])
    return found


def _path(events: Iterable[Trace], rows: Mapping[int, int]) -> list[list[Any]]:
    """[row, time, length, name] of each piece of the critical path on a rank that is shown."""
    return [
        [rows[rank], round(each["ts"]), max(1, round(each["dur"])), each["name"]]
        for each, _ in zip(
            (each for each in events if each["ph"] == "X" and each["cat"] == PATH),
            range(SHOWN_SPANS),
            strict=False,
        )
        if (rank := each["args"]["rank"]) in rows
    ]


def _steps(spans: Iterable[Trace]) -> list[Page]:
    """Each step from its begin on the first of these ranks to its end on the last."""
    found: dict[int, tuple[float, float]] = {}
    for each in spans:
        begin, end = each["ts"], each["ts"] + each["dur"]
        known = found.get(each["args"]["step"], (begin, end))
        found[each["args"]["step"]] = (min(known[0], begin), max(known[1], end))
    return [
        {"step": step, "at_us": round(begin), "for_us": round(end - begin)}
        for step, (begin, end) in sorted(found.items())
    ]


def _columns(kept: Iterable[Trace], rows: Mapping[int, int]) -> tuple[Page, list[str]]:
    names: dict[str, int] = {}
    columns: dict[str, list[int]] = {
        column: [] for column in ("row", "lane", "at_us", "for_us", "name", "step", "batch")
    }
    lanes = {tid: lane for lane, tid in enumerate(sorted({each["tid"] for each in kept}))}
    for each in kept:
        shown = each["args"]
        columns["row"].append(rows[each["pid"]])
        columns["lane"].append(lanes[each["tid"]])
        columns["at_us"].append(round(each["ts"]))
        columns["for_us"].append(max(1, round(each["dur"])))
        columns["name"].append(names.setdefault(each["name"], len(names)))
        columns["step"].append(shown["step"])
        columns["batch"].append(shown.get("micro-batch", -1))
    return dict(columns), list(names)


def _rows(
    shown: Sequence[int], events: Iterable[Trace], spans: Sequence[Trace], steps: Sequence[Page]
) -> Iterable[Page]:
    titles = {
        each["pid"]: str(each["args"]["name"]) for each in events if each["name"] == "process_name"
    }
    extent_us = max((each["at_us"] + each["for_us"] for each in steps), default=0)
    extent_us -= min((each["at_us"] for each in steps), default=0)
    by_rank: dict[int, list[Trace]] = {rank: [] for rank in shown}
    for each in spans:
        by_rank[each["pid"]].append(each)
    for rank in shown:
        mine = by_rank[rank]
        where, _, clock = titles.get(rank, "").partition(" (")
        longest = max(mine, key=lambda each: float(each["dur"]), default=None)
        yield {
            "rank": rank,
            "node": where.rpartition(" ")[2],
            "clock": clock.rstrip(")"),
            "computes": _part(mine, (_BUSY,), extent_us),
            "waits": _part(mine, _WAITING, extent_us),
            "longest": longest["name"] if longest is not None else "",
            "longest_us": round(longest["dur"]) if longest is not None else 0,
        }


def _part(spans: Iterable[Trace], kinds: Sequence[str], extent_us: float) -> float | None:
    """Part of the time in which at least one span of these kinds is in progress."""
    if not extent_us:
        return None
    # Spans of several lanes overlap: only what lies behind `until` is new.
    covered = until = 0.0
    for begin, end in sorted(
        (each["ts"], each["ts"] + each["dur"]) for each in spans if each["cat"] in kinds
    ):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return round(covered / extent_us, 4)


def _arrows(events: Iterable[Trace], rows: Mapping[int, int]) -> list[list[Any]]:
    """[row, time, row, time, name] from a span to the span of another rank that waits for it."""
    ends: dict[int, dict[str, Trace]] = {}
    for each in events:
        if each["ph"] in ("s", "f") and each["pid"] in rows:
            ends.setdefault(each["id"], {})[each["ph"]] = each
    joined = (each for each in ends.values() if len(each) == 2)
    return [
        [
            *(rows[each["s"]["pid"]], round(each["s"]["ts"])),
            *(rows[each["f"]["pid"]], round(each["f"]["ts"]), each["s"]["name"]),
        ]
        for each, _ in zip(joined, range(SHOWN_ARROWS), strict=False)
    ]
