"""Whether the network traffic of a job keeps its pace: standstill, decline, fluctuation.

The traffic of a training job repeats with its steps (MegaScale section 4.2): when it ceases while
ranks wait for each other, the network or a peer is gone; when it declines or fluctuates, somebody
should look. The evidence is the byte counters of ports in heartbeats, RDMA ports first. A job's own
windows are the baseline, so nothing is said before it was seen to communicate, and nothing at all
where no counter carries its traffic: :attr:`TrafficTrack.unseen` has the reason. Only windows in
which all ranks train count. Pure; times are the driver's, in seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from megascale_driver.analysis.progress import MIN_STEP_TIMES, p99

Source = Literal["rdma", "network"]
SOURCES: Final[tuple[Source, ...]] = ("rdma", "network")
MAD_SCALE: Final = 1.4826
_BYTES: Final[Mapping[str, Source]] = {
    "rdma_received_bytes_total": "rdma",
    "rdma_sent_bytes_total": "rdma",
    "network_received_bytes_total": "network",
    "network_sent_bytes_total": "network",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficRule:
    """Limits of the rule; rates in bytes/s of a node, both directions together."""

    # Less is what heartbeats, logs and ssh cause: that is no traffic of a job.
    least_rate: float = 1 << 20
    quiet_share: float = 0.01  # of its own baseline, up to which a node stands still
    still_floor_s: float = 30.0
    still_p99_factor: float = 3.0  # of the step times
    window_floor_s: float = 30.0
    window_steps: float = 8.0  # so that a step more or less in a window changes little
    window_max_s: float = 600.0
    learned_windows: int = 6
    decline_share: float = 0.75
    decline_windows: int = 3  # in a row
    recovered_share: float = 0.90
    fluctuation_spread: float = 0.25  # scaled MAD over median of the newest windows
    calm_spread: float = 0.15
    fluctuation_turns: int = 2  # ups and downs among them: neither a step nor one dip is any


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes through all ports of a node since boot, by source, in the heartbeat of ``at_s``."""

    at_s: float
    of: Mapping[Source, float]


@dataclass(frozen=True, slots=True)
class Look:
    """What the newest heartbeats of a job's nodes say.

    ``nodes``: None for a node without a fresh heartbeat of the attempt. ``training``: every rank is
    in a step. ``waiting``: a rank is inside a communication operation. ``step``: the lowest one.
    """

    now_s: float
    nodes: Mapping[str, Bytes | None]
    training: bool
    waiting: bool
    step: int
    step_times: Sequence[float]


@dataclass(frozen=True, slots=True)
class Standstill:
    """No byte moves while ranks wait for each other."""

    source: Source
    still_s: float
    limit_s: float
    usual: float  # bytes/s of all its nodes

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"the {self.source} traffic of all its nodes stands still for {self.still_s:.0f} s "
            f"(limit {self.limit_s:.0f} s, usually {_rate(self.usual)}) while ranks are inside "
            "communication operations"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Traffic that declined or fluctuates. ``nodes``: those concerned; empty: all of the job."""

    kind: Literal["decline", "fluctuation"]
    source: Source
    nodes: tuple[str, ...]
    sentence: str


@dataclass(slots=True)
class _Window:
    """The open window: where its nodes stood when it began."""

    began_s: float
    step: int
    first: Mapping[str, Bytes]


@dataclass(slots=True)
class _NodeTrack:
    """One node and source: rates of windows, and since when no byte moves."""

    learned: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=6))
    # The usual rate; 0 before it is known. A rate that rises for good raises it.
    baseline: float = 0.0
    quiet_since_s: float | None = None
    low_windows: int = 0
    declined: bool = False  # a decline was reported and is not over

    def add(self, rate: float, rule: TrafficRule) -> None:
        """The rate of one more window."""
        if len(self.learned) < rule.learned_windows:
            self.learned.append(rate)
        self.recent.append(rate)
        if len(self.learned) == rule.learned_windows:
            self.baseline = max(statistics.median(self.learned), statistics.median(self.recent))


class TrafficTrack:
    """One attempt of a job; :meth:`look` takes in heartbeats and returns what has changed."""

    def __init__(self, nodes: Iterable[str], rule: TrafficRule = TrafficRule()) -> None:
        self._rule = rule
        self._nodes = tuple(nodes)
        self._tracks: dict[tuple[str, Source], _NodeTrack] = {}
        self._last: dict[str, Bytes] = {}
        self._dark: set[str] = set()  # nodes whose newest heartbeat has no counters
        # The nodes whose counters carry traffic of the job, by source; and whether the rates of all
        # are known of one. Both change as a window closes, so that a look costs little.
        self._watched: dict[Source, dict[str, _NodeTrack]] = {source: {} for source in SOURCES}
        self._all_learned = False
        self._window: _Window | None = None
        self._totals: deque[float] = deque(maxlen=6)  # of the windows, all nodes together
        self._fluctuates = False
        self._calm = 0
        self._newest: Look | None = None

    @property
    def source(self) -> Source | None:
        """The counters that carry the job's traffic; None while it is not known."""
        for source in SOURCES:
            if len(self._watched[source]) >= 2:
                return source
        return None

    @property
    def unseen(self) -> str:
        """Why the traffic cannot be watched; "" while it is learned or watched."""
        if self._dark:
            return f"node {min(self._dark)} shows no counters of ports"
        if self.source is None and self._all_learned:
            return (
                "its nodes exchange less than "
                f"{_rate(self._rule.least_rate)} through the ports that they count"
            )
        return ""

    def look(self, look: Look) -> tuple[Change, ...]:
        """Take in the newest heartbeats; declines and fluctuations that begin with them."""
        self._newest = look
        fresh = {name: found for name, found in look.nodes.items() if found is not None}
        self._dark -= fresh.keys()
        self._dark |= {name for name, found in fresh.items() if not found.of}
        complete = len(fresh) == len(self._nodes) and not self._dark
        jumped = [self._quiet(name, found) for name, found in fresh.items()]
        self._last |= fresh
        if not complete or not look.training or any(jumped):
            self._window = None
            for track in self._tracks.values():
                track.quiet_since_s = None
            return ()
        window = self._window
        if window is None:
            self._window = _Window(look.now_s, look.step, fresh)
            return ()
        if look.now_s - window.began_s < self._window_s(look):
            return ()
        self._window = _Window(look.now_s, look.step, fresh)
        if look.step <= window.step:
            return ()  # no step was completed in it: that is a standstill's matter
        return self._close(window, fresh, look)

    def standstill(self, last_step_at_s: float) -> Standstill | None:
        """No traffic of any node and no step for the limit, while ranks wait inside operations."""
        look, source, rule = self._newest, self.source, self._rule
        if look is None or source is None or not (look.training and look.waiting):
            return None
        if len(look.step_times) < MIN_STEP_TIMES:
            return None
        watched = self._watched[source]
        since = [track.quiet_since_s for track in watched.values()]
        if any(one is None for one in since):
            return None
        began_s = max([last_step_at_s, *(one for one in since if one is not None)])
        newest_s = min(self._last[name].at_s for name in watched)
        limit_s = max(rule.still_floor_s, rule.still_p99_factor * p99(look.step_times))
        if newest_s - began_s < limit_s:
            return None
        usual = sum(track.baseline for track in watched.values())
        return Standstill(source, newest_s - began_s, limit_s, usual)

    def _window_s(self, look: Look) -> float:
        rule = self._rule
        pace = statistics.median(look.step_times) if look.step_times else 0.0
        return min(rule.window_max_s, max(rule.window_floor_s, rule.window_steps * pace))

    def _quiet(self, name: str, found: Bytes) -> bool:
        """Note whether bytes moved since the heartbeat before; True if a counter went backwards."""
        before = self._last.get(name)
        if before is None or found.at_s <= before.at_s:
            return False
        jumped = False
        for source, value in found.of.items():
            track = self._tracks.setdefault((name, source), _NodeTrack())
            moved = value - before.of.get(source, value)
            jumped = jumped or moved < 0
            allowed = self._rule.quiet_share * track.baseline
            if moved > allowed * (found.at_s - before.at_s) or not allowed:
                track.quiet_since_s = None
            elif track.quiet_since_s is None:
                track.quiet_since_s = before.at_s
        return jumped

    def _close(self, window: _Window, fresh: Mapping[str, Bytes], look: Look) -> tuple[Change, ...]:
        rates: dict[Source, dict[str, float]] = {source: {} for source in SOURCES}
        for name, found in fresh.items():
            first = window.first[name]
            for source, value in found.of.items():
                if source in first.of and found.at_s > first.at_s:
                    rate = (value - first.of[source]) / (found.at_s - first.at_s)
                    rates[source][name] = rate
        for source, of_nodes in rates.items():
            for name, rate in of_nodes.items():
                self._tracks.setdefault((name, source), _NodeTrack()).add(rate, self._rule)
        self._learn()
        used = self.source
        if used is None:
            return ()
        watched = self._watched[used]
        seen = {name: rate for name, rate in rates[used].items() if name in watched}
        steps = look.step - window.step
        spent_s = look.now_s - window.began_s
        changes = (
            self._decline(used, watched, seen, spent_s / steps),
            self._fluctuation(used, sum(seen.values())),
        )
        return tuple(change for change in changes if change is not None)

    def _learn(self) -> None:
        """Find out what follows from the rates, which have changed."""
        rule, known = self._rule, dict.fromkeys(SOURCES, 0)
        self._watched = {source: {} for source in SOURCES}
        for (node, source), track in self._tracks.items():
            known[source] += len(track.learned) == rule.learned_windows
            if track.baseline >= rule.least_rate:
                self._watched[source][node] = track
        self._all_learned = len(self._nodes) in known.values()

    def _decline(
        self,
        source: Source,
        watched: Mapping[str, _NodeTrack],
        rates: Mapping[str, float],
        step_s: float,
    ) -> Change | None:
        rule, new = self._rule, []
        for name, rate in rates.items():
            track = watched[name]
            share = rate / track.baseline
            track.low_windows = track.low_windows + 1 if share < rule.decline_share else 0
            if share >= rule.recovered_share:
                track.declined = False
            if track.low_windows >= rule.decline_windows and not track.declined:
                track.declined = True
                new.append(name)
        if not new:
            return None
        before = sum(watched[name].baseline for name in new)
        after = sum(rates[name] for name in new)
        every = len(new) == len(rates)
        who = "all its nodes" if every else _named(new)
        return Change(
            "decline",
            source,
            () if every else tuple(sorted(new)),
            f"the {source} traffic of {who} has declined to {after / before:.0%}: "
            f"{_rate(after)}, usually {_rate(before)}; {_size(after * step_s)} a step of "
            f"{step_s:.1f} s",
        )

    def _fluctuation(self, source: Source, total: float) -> Change | None:
        rule, totals = self._rule, self._totals
        totals.append(total)
        if len(totals) < (totals.maxlen or 0):
            return None
        median = statistics.median(totals)
        if median <= 0:
            return None
        spread = MAD_SCALE * statistics.median(abs(each - median) for each in totals) / median
        steps = [after - before for before, after in pairwise(totals)]
        ways = [step > 0 for step in steps if abs(step) > rule.calm_spread * median]
        turns = sum(a != b for a, b in pairwise(ways))
        self._calm = self._calm + 1 if spread < rule.calm_spread else 0
        if self._calm >= len(totals):  # none of the windows that fluctuated is among them
            self._fluctuates = False
        if spread < rule.fluctuation_spread or turns < rule.fluctuation_turns or self._fluctuates:
            return None
        self._fluctuates = True
        low, high = min(totals), max(totals)
        return Change(
            "fluctuation",
            source,
            (),
            f"the {source} traffic of its nodes fluctuates between {_rate(low)} and {_rate(high)} "
            f"from window to window, around {_rate(median)}",
        )


def counted(at_s: float, counters: Iterable[tuple[str, float]]) -> Bytes:
    """The bytes of a node by (name, value) of the counters in its heartbeat."""
    found: dict[Source, float] = {}
    for name, value in counters:
        if (source := _BYTES.get(name)) is not None:
            found[source] = found.get(source, 0.0) + value
    return Bytes(at_s, found)


def _named(nodes: Sequence[str]) -> str:
    names = ", ".join(sorted(nodes)[:4])
    return f"node{'s' if len(nodes) > 1 else ''} {names}" + (
        f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    )


def _rate(value: float) -> str:
    return f"{_size(value)}/s"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
