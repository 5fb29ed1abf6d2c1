"""The cause of a falling MFU: a decision tree over two windows of steps (MegaScale section 6.3).

The work of a step is always the same, so the MFU falls when the step takes longer. Candidates:

1. Computation takes longer. On one node only: a slow host, or a throttled one if its counters show
   that. On all ranks alike: clock or power. Time that a rank's share of the rows explains is no
   part of it (Note [Hot experts] in :mod:`megascale_driver.analysis.spans.routing`) but routing.
2. The last rank to enter a collective spends longer in it: the network.
3. Ranks enter collectives later because of a pause of the host: data wait, garbage collection,
   snapshot.

The candidate that explains the largest part of the growth is named; among nearly equal parts the
first in this order. If no candidate explains enough, no cause is named.

:func:`step_series` splits the time of each step. A pause of the host counts with the longest one of
any rank in the step, since the other ranks wait for it in the next collective. Computation is
without the waits and garbage collections inside it. A collective counts with the time of the last
rank to enter; the other ranks' time above that is their wait for it.

Counters of hosts and devices show throttling and trouble on the network. Their names are those that
agents report (megascale_executor.counters, docs/diagnostics.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import DATA_WAIT, EVALUATION, GARBAGE, SNAPSHOT, STEP
from megascale_driver.analysis.hot_experts import REMEDY
from megascale_driver.analysis.spans.routing import expert_shares, routing_ns
from megascale_driver.analysis.spans.table import SpanTable, collectives, own_ns, without_waits
from megascale_job.visible import agreed, counted

LEAST_THROTTLED = 0.1  # rise of the share of time that is throttled
LEAST_CLOCK_FALL = 0.03
_CLOCK, _THROTTLED = "gpu_sm_clock_hertz", "gpu_throttled"
_TROUBLE = (
    "error",
    "drop",
    "pause",
    "congestion",
    "retransmitted",
    "out_of_sequence",
    "timeout",
    "flap",
    "link_downed",
    "send_waits",
    "not_ready",
)


@dataclass(frozen=True, slots=True)
class CounterChange:
    """Mean of a counter in the window before and in the window after.

    For a counter whose name ends in _total: the mean rise per second.
    """

    node: str
    name: str
    target: str
    before: float
    after: float

    @classmethod
    def of(cls, entry: Any) -> CounterChange:
        """Read {"node", "name", "target", "before", "after"}.

        Raises:
            ValueError: the entry has another form, or a value is not finite.
        """
        try:
            before, after = float(entry["before"]), float(entry["after"])
            texts = [str(entry[key]) for key in ("node", "name", "target")]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"counters: {type(error).__name__}: {error}") from error
        if not (math.isfinite(before) and math.isfinite(after)):
            raise ValueError(f"counters: {texts[1]} of {texts[0]} is not finite")
        return cls(texts[0], texts[1], texts[2], before, after)


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The windows before and after ``split_ns`` on one node, in Unix ns on its clock."""

    first_ns: int
    split_ns: int
    last_ns: int


def windows_of(table: SpanTable, split: int) -> Mapping[str, StepWindows]:
    """By node: the times at which the first step and step ``split`` began and the last ended."""
    steps = table.of_op(STEP.name)
    ends = steps.start_ns + steps.duration_ns
    names = np.array(table.nodes)
    found: dict[str, StepWindows] = {}
    for node in dict.fromkeys(table.nodes):
        own = names[steps.rank] == node
        later = own & (steps.step >= split)
        if later.any():
            found[node] = StepWindows(
                int(steps.start_ns[own].min()),
                int(steps.start_ns[later].min()),
                int(ends[own].max()),
            )
    return found


def knows_clocks(counters: Sequence[CounterChange]) -> bool:
    """True if there are counters of the devices' clocks."""
    return any(change.name in (_CLOCK, _THROTTLED) for change in counters)


def throttled(counters: Sequence[CounterChange]) -> list[tuple[str, str]]:
    """Nodes whose devices were throttled more than before, each with a clause; the worst first."""
    found: list[tuple[float, str, str]] = []
    for change in counters:
        if change.name == _THROTTLED and change.after - change.before >= LEAST_THROTTLED:
            device, _, reason = change.target.rpartition(":")
            fact = (
                f"{device} is held back ({reason}) {100 * change.after:.0f} % of the time, "
                f"before {100 * change.before:.0f} %"
            )
            found.append((change.after - change.before, change.node, fact))
        elif change.name == _CLOCK and change.before > 0:
            fall = 1 - change.after / change.before
            if fall >= LEAST_CLOCK_FALL:
                fact = (
                    f"the clock of {change.target} is {change.after / 1e6:.0f} MHz instead of "
                    f"{change.before / 1e6:.0f}"
                )
                found.append((fall, change.node, fact))
    return [(node, fact) for _, node, fact in sorted(found, reverse=True)]


def network_trouble(counters: Sequence[CounterChange]) -> str:
    """A clause about the counter of network trouble that rose most; "" if none rose."""
    rises = [
        (change.after - change.before, change)
        for change in counters
        if change.name.startswith(("network_", "rdma_", "tcp_", "pfc_", "link_"))
        and any(word in change.name for word in _TROUBLE)
        and change.after > max(2 * change.before, 0)
    ]
    if not rises:
        return ""
    worst = max(rises, key=lambda rise: rise[0])[1]
    where = f"{worst.node} {worst.target}".rstrip()
    return f"{worst.name} of {where} rises by {worst.after:.3g} a second, before {worst.before:.3g}"


Floats = npt.NDArray[np.float64]
_NO_PAUSES = (STEP.name, EVALUATION.name)


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """Milliseconds of each whole step of a window: arrays [steps], or [ranks, steps] by rank.

    By rank: ``compute_ms``, NaN where a rank has no computation in a step; and ``routing_ms``, the
    time that its rows of experts add to that of the other ranks, which ``compute_ms`` leaves out.
    ``shares`` [ranks]: rows of each rank's experts; empty for a dense model. ``pauses_ms``,
    ``pause_counts`` and ``paused_rank`` have one entry per operation of the host, ``network_ms``
    and ``lateness_ms`` one per collective "name group".
    """

    steps: npt.NDArray[np.int64]
    step_ms: Floats
    compute_ms: Floats
    routing_ms: Floats
    shares: Floats
    pauses_ms: dict[str, Floats]
    pause_counts: dict[str, Floats]
    paused_rank: dict[str, int]
    network_ms: dict[str, Floats]
    lateness_ms: dict[str, Floats]
    unmeasured_ms: Floats


def step_series(table: SpanTable) -> StepSeries:
    """The series of a table, without steps that fewer than half of the ranks have ended."""
    whole = table.of_op(STEP.name)
    numbers, ended = np.unique(whole.step, return_counts=True)
    ranks = max(len(np.unique(whole.rank)), 1)
    steps = numbers[2 * ended >= ranks].astype(np.int64)
    table = table.where(np.isin(table.step, steps))
    shape = (len(table.nodes), len(steps))
    own_ms = own_ns(table) / 1e6
    whole_ms = _sums(table, table.is_op(STEP.name), table.duration_ns / 1e6, steps, shape)
    # An evaluation does not belong to the step or its MFU.
    whole_ms -= _sums(table, table.is_op(EVALUATION.name), table.duration_ns / 1e6, steps, shape)
    computing = table.is_kind("compute")
    shares = expert_shares(table)
    routed_ms = routing_ns(without_waits(table)) / 1e6 if len(shares) else np.zeros(len(table))
    compute_ms = _sums(table, computing, own_ms - routed_ms, steps, shape)
    present = _sums(table, computing, np.ones(len(table)), steps, shape)
    pauses, counts, worst = _pauses_of_ranks(table, own_ms, steps, shape)
    network, lateness = _waits(table, steps)
    pausing = table.is_kind("host") & ~table.is_op(*_NO_PAUSES, GARBAGE.name)
    measured = _sums(table, pausing, own_ms, steps, shape)
    for kind in ("compute", "collective", "p2p"):
        measured = measured + _sums(table, table.is_kind(kind), own_ms, steps, shape)
    return StepSeries(
        steps=steps,
        step_ms=_median_of_ranks(whole_ms),
        compute_ms=np.where(present > 0, compute_ms, np.nan),
        routing_ms=_sums(table, computing, routed_ms, steps, shape),
        shares=shares,
        pauses_ms=pauses,
        pause_counts=counts,
        paused_rank=worst,
        network_ms=network,
        lateness_ms=lateness,
        unmeasured_ms=_median_of_ranks(np.where(whole_ms > 0, whole_ms - measured, np.nan)),
    )


def _sums(
    table: SpanTable,
    chosen: npt.NDArray[np.bool_],
    values: Floats,
    steps: npt.NDArray[np.int64],
    shape: tuple[int, int],
) -> Floats:
    """Sums of ``values`` over the chosen spans, by rank and step; of shape ``shape``."""
    column = np.searchsorted(steps, table.step[chosen])
    flat = table.rank[chosen].astype(np.int64) * shape[1] + column
    sums: Floats = np.bincount(flat, values[chosen], shape[0] * shape[1]).astype(np.float64)
    return sums.reshape(shape)


def _median_of_ranks(by_rank: Floats) -> Floats:
    """Median of each step over the ranks with a value above 0."""
    if not by_rank.size:
        return np.zeros(by_rank.shape[1])
    return np.nan_to_num(known_median(np.where(by_rank == 0, np.nan, by_rank)))


def known_median(values: Floats) -> Floats:
    """Median of the finite values in each column; NaN if there are none."""
    median: Any = np.ma.median  # numpy types it only from 2.4 on
    return np.asarray(median(np.ma.masked_invalid(values), axis=0).filled(np.nan), np.float64)


def _pauses_of_ranks(
    table: SpanTable, own_ms: Floats, steps: npt.NDArray[np.int64], shape: tuple[int, int]
) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, int]]:
    pauses: dict[str, Floats] = {}
    counts: dict[str, Floats] = {}
    worst: dict[str, int] = {}
    for number, op in enumerate(table.ops):
        if op.kind != "host" or op.name in _NO_PAUSES or not len(steps):
            continue
        chosen = table.op == number
        spent = _sums(table, chosen, own_ms, steps, shape)
        times = _sums(table, chosen, np.ones(len(table)), steps, shape)
        # The longest pause of any rank: the other ranks wait for that one.
        pauses[op.name], counts[op.name] = spent.max(axis=0), times.sum(axis=0)
        worst[op.name] = int(spent.sum(axis=1).argmax())
    return pauses, counts, worst


def _waits(
    table: SpanTable, steps: npt.NDArray[np.int64]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Per collective: the time of the last rank to enter, and how much longer the first waited.

    Groups with the same name work in parallel, so the slowest of them counts in each step.
    """
    found = collectives(table)
    network: dict[str, Floats] = {}
    lateness: dict[str, Floats] = {}
    column = np.searchsorted(steps, found.step)
    for number in np.unique(found.op):
        op, own = table.ops[number], found.op == number
        shape = (int(found.group[own].max()) + 1, len(steps))
        flat = found.group[own] * shape[1] + column[own]
        shortest, longest = found.shortest_ns[own] / 1e6, found.longest_ns[own] / 1e6
        name = f"{op.name} {op.group}"
        for into, values in ((network, shortest), (lateness, longest - shortest)):
            sums = np.bincount(flat, values, shape[0] * shape[1]).reshape(shape)
            into[name] = sums.max(axis=0).astype(np.float64)
    return network, lateness


Cause = Literal[
    "none",
    "unknown",
    "data_wait",
    "garbage_collection",
    "slow_host",
    "network_wait",
    "throttle",
    "checkpoint",
    "routing",
]
_PAUSES: dict[str, tuple[Cause, str]] = {
    DATA_WAIT.name: ("data_wait", "the wait for data"),
    GARBAGE.name: ("garbage_collection", "garbage collection"),
    SNAPSHOT.name: ("checkpoint", "the checkpoint's snapshot"),
}
_MAD_TO_DEVIATION, _MEDIAN_ERROR = 1.4826, 1.2533  # of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclineRule:
    """Conditions for naming a cause.

    Steps take longer if their mean grew by ``least_growth`` and ``least_z`` standard errors. A
    cause must explain ``least_share`` of that. Computation counts if it grew by ``least_ratio``
    and ``least_z``. Pauses come in bursts, so they need only ``least_pause_z``, and three in the
    window after.
    """

    least_growth: float = 0.03
    least_z: float = 3.0
    least_share: float = 0.4
    least_ratio: float = 1.03
    least_pause_z: float = 1.5
    least_steps: int = 8
    equal_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Decline:
    """The answer: ``cause``, and one ``sentence`` with the deciding numbers.

    ``node`` and ``rank``: where the cause shows most, if it is in one place. ``shares``: the part
    of the growth, 0 to 1, that each candidate explains; together they can exceed 1.
    """

    cause: Cause
    sentence: str
    step_before_ms: float
    step_after_ms: float
    node: str = ""
    rank: int = -1
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Candidate:
    cause: Cause
    explained_ms: float
    detail: str
    node: str = ""
    rank: int = -1


@dataclass(frozen=True, slots=True)
class _Windows:
    before: StepSeries
    after: StepSeries
    table: SpanTable
    counters: Sequence[CounterChange]
    rule: DeclineRule


def why(
    before: SpanTable,
    after: SpanTable,
    counters: Sequence[CounterChange] = (),
    rule: DeclineRule = DeclineRule(),
) -> Decline:
    """Compare the steps of two windows of the same job."""
    two = _Windows(step_series(before), step_series(after), before, counters, rule)
    old, new = _mean(two.before.step_ms), _mean(two.after.step_ms)
    least = min(len(two.before.steps), len(two.after.steps))
    if least < rule.least_steps or old <= 0:
        reason = (
            f"{counted(least, 'whole step')} in a window {agreed(least, 'are')} too few: "
            f"{rule.least_steps} are needed"
        )
        return Decline("unknown", reason, old, new)
    grown = new - old
    candidates = [*_computation(two), *_routing(two), *_network(two), *_pauses(two)]
    # Growth of the mean or of the median is enough, because one long step hides a growth of the
    # mean. So is a candidate: one term can differ by more than chance although whole steps do not.
    by_mean = _z(two.before.step_ms, two.after.step_ms)
    by_median = _median_z(two.before.step_ms, two.after.step_ms)
    sure = max(by_mean, by_median) >= rule.least_z
    if grown < rule.least_growth * old or not (sure or candidates):
        sentence = (
            f"the MFU did not fall: a step takes {new:.1f} ms, before {old:.1f} ms, which is "
            "within what steps differ by"
        )
        return Decline("none", sentence, old, new)
    shares: dict[str, float] = {one.cause: min(one.explained_ms / grown, 1.0) for one in candidates}
    fell = (
        f"the MFU fell by {100 * (1 - old / new):.1f} %: a step takes {new:.1f} ms instead of "
        f"{old:.1f} ms; "
    )
    named = [one for one in candidates if shares[one.cause] >= rule.least_share]
    if not named:
        return Decline("unknown", fell + _undecided(two, candidates), old, new, shares=shares)
    most = max(shares[one.cause] for one in named)
    chosen = next(one for one in named if shares[one.cause] >= most - rule.equal_share)
    explained = f" ({min(chosen.explained_ms, grown):.1f} ms of the {grown:.1f} ms)"
    return Decline(
        chosen.cause, fell + chosen.detail + explained, old, new, chosen.node, chosen.rank, shares
    )


def compared(
    table: SpanTable,
    split: int = 0,
    counters: Callable[[int], Sequence[CounterChange]] = lambda split: (),
) -> tuple[int, Decline]:
    """The first step of the slower window, and why its steps take longer than those before.

    Args:
        split: that step; 0: the step from which steps take longer is found first. Windows that are
            chosen where steps differ most often differ by chance, so then they must differ more.
        counters: gives the changes of counters for the step that splits the windows.

    Raises:
        ValueError: too few whole steps for two windows.
    """
    rule = DeclineRule()
    # A split that was searched for is where the windows differ most by construction, so even equal
    # steps would pass the usual limit now and then.
    if not split:
        split, rule = split_step(table, rule), replace(rule, least_z=5.0)
    first, last = int(table.step.min()), int(table.step.max())
    before, after = table.of_steps(first, split - 1), table.of_steps(split, last)
    return split, why(before, after, counters(split), rule)


def split_step(table: SpanTable, rule: DeclineRule = DeclineRule()) -> int:
    """The step from which steps take longer: the split where two means fit best (least squares).

    Raises:
        ValueError: too few whole steps for two windows.
    """
    series = step_series(table)
    # At least a tenth of the steps on each side: a few slow steps at the end are no new pace.
    count, least = len(series.steps), max(rule.least_steps, len(series.steps) // 10)
    if count < 2 * least:
        raise ValueError(
            f"{counted(count, 'whole step')} {agreed(count, 'are')} too few: "
            f"{2 * rule.least_steps} are needed"
        )
    places = range(least, count - least + 1)
    gains = []
    for place in places:
        grown = _mean(series.step_ms[place:]) - _mean(series.step_ms[:place])
        # The reduction of the sum of squares by two means instead of one, up to a constant factor;
        # 0 where steps became faster.
        gains.append(place * (count - place) * max(grown, 0.0) ** 2)
    return int(series.steps[places[int(np.argmax(gains))]])


def _computation(two: _Windows) -> list[_Candidate]:
    """At most one candidate: the computation of one node, or of all ranks."""
    old, new, rule = two.before.compute_ms, two.after.compute_ms, two.rule
    # Only ranks that were measured in most steps of both windows can be compared.
    known = np.flatnonzero(_counts(old) & _counts(new))
    if not len(known):
        return []
    grown_by = {int(rank): _ratio(old[rank], new[rank]) for rank in known}
    explained = {
        rank: _scale(two, rank) * (np.nanmean(new[rank]) - np.nanmean(old[rank]))
        for rank in grown_by
    }
    slow = [rank for rank in grown_by if _slower_than_others(two, rank, list(grown_by))]
    hot = throttled(two.counters)
    if slow:
        rank = max(slow, key=lambda rank: explained[rank])
        node = two.table.nodes[rank]
        others = float(np.median([grown_by[r] for r in grown_by if two.table.nodes[r] != node]))
        detail = (
            f"computation on rank {rank} of node {node} takes {grown_by[rank]:.2f} times as long "
            f"as before, that of the other nodes {others:.2f} times"
        )
        facts = [fact for place, fact in hot if place == node]
        if facts:
            return [_Candidate("throttle", explained[rank], f"{detail}: {facts[0]}", node, rank)]
        return [_Candidate("slow_host", explained[rank], f"{detail}: a slow host", node, rank)]
    # No single node explains it: compare the median rank, which one slow rank cannot move.
    every = float(np.median(list(grown_by.values())))
    sure = _median_z(known_median(old[known]), known_median(new[known])) >= rule.least_z
    if every < rule.least_ratio or not sure:
        return []
    detail = f"computation takes {every:.2f} times as long as before on all ranks alike"
    lost_ms = float(np.median(list(explained.values())))
    if hot:
        node, fact = hot[0]
        return [_Candidate("throttle", lost_ms, f"{detail}: on node {node} {fact}", node)]
    if knows_clocks(two.counters):
        stable = f"{detail}, though no device's clock fell"
        return [_Candidate("unknown", lost_ms, stable)]
    detail += ", as by lower clocks or less power (no counters of clocks are given to confirm it)"
    return [_Candidate("throttle", lost_ms, detail)]


def _routing(two: _Windows) -> list[_Candidate]:
    """At most one candidate: the rank whose rows of experts cost it the most more than before."""
    old, new, shares = two.before.routing_ms, two.after.routing_ms, two.after.shares
    if not len(shares):
        return []
    grown = new.mean(axis=1) - old.mean(axis=1)
    rank = int(grown.argmax())
    lost_ms = _scale(two, rank) * float(grown[rank])
    enough = lost_ms >= two.rule.least_growth * _mean(two.before.step_ms)
    if not enough or _z(old[rank], new[rank]) < two.rule.least_z:
        return []
    before = two.before.shares[rank] if len(two.before.shares) else math.nan
    known = f" instead of {before:.1f}" if math.isfinite(before) else ""
    node = two.table.nodes[rank]
    detail = (
        f"routing: the experts of rank {rank} on node {node} are hot, with {shares[rank]:.1f} "
        f"times the mean rows of its ep group{known}, and the other ranks wait for it; {REMEDY}"
    )
    return [_Candidate("routing", lost_ms, detail, node, rank)]


def _network(two: _Windows) -> list[_Candidate]:
    old, new = two.before.network_ms, two.after.network_ms
    grown = {name: _mean(new[name]) - _mean(old[name]) for name in new if name in old}
    rises = {
        name: value for name, value in grown.items() if _z(old[name], new[name]) >= two.rule.least_z
    }
    if not rises or sum(rises.values()) <= 0:
        return []
    name = max(rises, key=lambda name: rises[name])
    detail = (
        f"the network: the last rank to enter {name} spends {_mean(new[name]):.1f} ms a step in it "
        f"instead of {_mean(old[name]):.1f} ms; {_late(two, name)}"
    )
    trouble = network_trouble(two.counters)
    detail += f"; {trouble}" if trouble else ""
    return [_Candidate("network_wait", sum(rises.values()), detail)]


def _pauses(two: _Windows) -> list[_Candidate]:
    found = []
    for op, (cause, words) in _PAUSES.items():
        new = two.after.pauses_ms.get(op)
        if new is None:
            continue
        old = two.before.pauses_ms.get(op, np.zeros_like(two.before.step_ms))
        grown = _mean(new) - _mean(old)
        enough = grown >= two.rule.least_growth * _mean(two.before.step_ms)
        if not enough or np.count_nonzero(new) < 3 or _z(old, new) < two.rule.least_pause_z:
            continue
        rank = two.after.paused_rank[op]
        counts = two.after.pause_counts[op], two.before.pause_counts.get(op, np.zeros(1))
        detail = (
            f"{words} holds the slowest rank of a step up for {_mean(new):.1f} ms instead of "
            f"{_mean(old):.1f} ms ({_mean(counts[0]):.1f} times a step on all ranks, before "
            f"{_mean(counts[1]):.1f}; most on rank {rank} of node {two.table.nodes[rank]})"
        )
        found.append(_Candidate(cause, grown, detail, two.table.nodes[rank], rank))
    return found


def _undecided(two: _Windows, candidates: list[_Candidate]) -> str:
    shown = [name for name in two.after.lateness_ms if name in two.before.lateness_ms]
    grown = {
        name: _mean(two.after.lateness_ms[name]) - _mean(two.before.lateness_ms[name])
        for name in shown
    }
    text = "no cause explains enough of it"
    if candidates:
        largest = max(candidates, key=lambda one: one.explained_ms)
        text += f"; the largest part is {largest.explained_ms:.1f} ms: {largest.detail}"
    if grown:
        name = max(grown, key=lambda name: grown[name])
        text += f"; {_late(two, name)}"
    old, new = _mean(two.before.unmeasured_ms), _mean(two.after.unmeasured_ms)
    return f"{text}; time in no span: {new:.1f} ms a step, before {old:.1f} ms"


def _late(two: _Windows, name: str) -> str:
    old, new = _mean(two.before.lateness_ms[name]), _mean(two.after.lateness_ms[name])
    return f"the first rank waits {new:.1f} ms for the last in {name}, before {old:.1f} ms"


def _slower_than_others(two: _Windows, rank: int, ranks: list[int]) -> bool:
    """True if the computation of a rank grew more than that of other nodes' ranks."""
    relative = _relative(two, rank, ranks)
    if relative is None:
        return False
    old, new = relative
    # At least 5 %, as for a slow node (OutlierRule).
    grew = _ratio(old, new) >= max(two.rule.least_ratio, 1.05)
    return grew and _median_z(old, new) >= two.rule.least_z


def _relative(two: _Windows, rank: int, ranks: list[int]) -> tuple[Floats, Floats] | None:
    """Ratio per step of a rank's computation to the median of its stage's ranks on other nodes."""
    nodes, layout = two.table.nodes, two.table.layout
    others = [other for other in ranks if nodes[other] != nodes[rank]]
    stage = [r for r in others if layout.coordinates(r).pp == layout.coordinates(rank).pp]
    if not others:
        return None
    chosen = stage or others
    old, new = two.before.compute_ms, two.after.compute_ms
    return old[rank] / known_median(old[chosen]), new[rank] / known_median(new[chosen])


def _scale(two: _Windows, rank: int) -> float:
    """Ratio of a step's whole computation to its measured part.

    At level "phases" only the first micro-batches have spans; the others are in no span.
    """
    batches = two.table.micro_batch[two.table.micro_batch != 0xFFFF]
    unmeasured, step = _mean(two.before.unmeasured_ms), _mean(two.before.step_ms)
    if not len(batches) or int(batches.max()) != 1 or unmeasured < 0.2 * step:
        return 1.0
    return 1 + unmeasured / max(float(np.nanmean(two.before.compute_ms[rank])), 1e-9)


def _counts(values: Floats) -> npt.NDArray[np.bool_]:
    """True for each row with values for at least half of the steps."""
    known: npt.NDArray[np.bool_] = 2 * np.count_nonzero(values > 0, axis=1) >= values.shape[1]
    return known


def _ratio(old: Floats, new: Floats) -> float:
    return float(np.nanmedian(new) / max(np.nanmedian(old), 1e-9))


def _median_z(old: Floats, new: Floats) -> float:
    """Robust standard errors by which the median of ``new`` is above that of ``old``."""
    # Logarithms, since times vary by factors: a step twice as long is as far from the median as one
    # half as long.
    old, new = np.log(_known(old)), np.log(_known(new))
    if not len(old) or not len(new):
        return 0.0
    error = float(np.hypot(_median_error(old), _median_error(new)))
    return float((np.median(new) - np.median(old)) / max(error, 1e-3))


def _median_error(values: Floats) -> float:
    """The standard error of the median of correlated ``values``, by their spread around it."""
    spread = float(np.median(np.abs(values - np.median(values))))
    error = _MEDIAN_ERROR * _MAD_TO_DEVIATION * spread * _correlated(values) / np.sqrt(len(values))
    return float(error)


def _known(values: Floats) -> Floats:
    kept: Floats = values[np.isfinite(values) & (values > 0)]
    return kept


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _z(old: Floats, new: Floats) -> float:
    """Standard errors by which the mean of ``new`` is above that of ``old``."""
    least = 1e-3 * max(abs(_mean(old)), abs(_mean(new)), 1e-9)
    error = float(np.hypot(_mean_error(old), _mean_error(new)))
    return (_mean(new) - _mean(old)) / max(error, least)


def _mean_error(values: Floats) -> float:
    """The standard error of the mean of correlated ``values``."""
    return float(values.std()) * _correlated(values) / float(np.sqrt(len(values)))


def _correlated(values: Floats) -> float:
    """Factor on the standard error of a mean for correlated neighbours (lag-1 correlation)."""
    around = values - values.mean()
    power = float(np.sum(around**2))
    if len(values) < 3 or power == 0:
        return 1.0
    # Neighbouring steps are slow together, so there are fewer independent samples than steps: of an
    # autoregressive series (1 - lag) / (1 + lag) times as many. The bound keeps a trend finite.
    lag = min(max(float(np.sum(around[1:] * around[:-1])) / power, 0.0), 0.9)
    return float(np.sqrt((1 + lag) / (1 - lag)))
