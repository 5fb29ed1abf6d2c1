"""Comparison of a node's measurements with the fleet: robust baselines, thresholds, verdicts. Pure.

A value is compared with the values of other nodes with the same device model, test and class of
target. The baseline is their median; values far below it are dropped and the median is taken again,
until none is far below (the procedure of SuperBench, arXiv 2402.06194). The spread is the median
absolute deviation (MAD). With too few nodes a shipped figure is the baseline, and the comparison
names that source.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

FAIL_RATIO, FAIL_Z = 0.90, -6.0
DEGRADED_RATIO, DEGRADED_Z = 0.95, -4.0
MIN_NODES = 5
# Makes the MAD of a normal distribution equal its standard deviation.
MAD_SCALE = 1.4826
# Lower bound of the spread, as a share of the median: equal values have a MAD of 0, but no
# measurement here repeats more exactly than this.
MIN_SPREAD_RATIO = 0.002
MAX_KEYS, MAX_NODES = 4096, 16384
_ROUNDS = 10
# Consecutive FAILs of one target that are evidence; a single one can be another process's load.
REPEATS = 2
_LEARNED = ""  # stands for all targets: the median that a node reported from before


class Verdict(Enum):
    """Result of comparing a value with its baseline."""

    PASS = "PASS"
    DEGRADED = "DEGRADED"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"  # nothing to compare with


@dataclass(frozen=True, slots=True)
class Key:
    """Values with equal keys are compared with each other."""

    model: str
    test: str
    target_class: str
    unit: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A value compared with its baseline.

    ``z`` is None without a spread; ``source`` is fleet or shipped.
    """

    verdict: Verdict
    baseline: float | None = None
    z: float | None = None
    source: str = ""


# Figures of healthy nodes, by (part of the device model, test, class of target), from NVIDIA's
# nccl-tests notes and the thresholds that Azure and stas00 published (docs/diagnostics.md).
SHIPPED: Mapping[tuple[str, str, str], float] = {
    ("H100", "host_copy", "host-cuda"): 48.0,
    ("H100", "host_copy", "cuda-host"): 48.0,
    ("H200", "host_copy", "host-cuda"): 48.0,
    ("H200", "host_copy", "cuda-host"): 48.0,
    ("H100", "device_copy", "cuda-cuda"): 335.0,
    ("H200", "device_copy", "cuda-cuda"): 335.0,
    ("H100", "rdma_pairs", "loopback"): 380.0,
    ("H200", "rdma_pairs", "loopback"): 380.0,
}


def more_is_better(unit: str) -> bool:
    """True for rates (units ending in /s), which are better when higher; False for times."""
    return unit.endswith("/s")


def shipped_baseline(key: Key) -> float | None:
    """The shipped figure of a key, or None."""
    for (model, test, target_class), figure in SHIPPED.items():
        if model in key.model and (test, target_class) == (key.test, key.target_class):
            return figure
    return None


def centre(values: Iterable[float], *, more: bool) -> tuple[float, float]:
    """Median and scaled MAD of ``values``, which must not be empty, without the bad ones.

    Values worse than DEGRADED by ratio and by z are dropped until there are none. Otherwise a tenth
    of slow nodes would widen the spread, which would then hide them.
    """
    kept = sorted(values)
    for _ in range(_ROUNDS):
        median, spread = _median_and_spread(kept)
        good = [each for each in kept if not _is_worse(each, median, spread, more=more)]
        if len(good) == len(kept):
            break
        kept = good
    return _median_and_spread(kept)


def _median_and_spread(values: list[float]) -> tuple[float, float]:
    median = statistics.median(values)
    mad = statistics.median(abs(each - median) for each in values)
    return median, max(MAD_SCALE * mad, MIN_SPREAD_RATIO * abs(median))


def _is_worse(value: float, median: float, spread: float, *, more: bool) -> bool:
    ratio, z = _ratio(value, median, more=more), _z(value, median, spread, more=more)
    return ratio < DEGRADED_RATIO and z < DEGRADED_Z


def _ratio(value: float, median: float, *, more: bool) -> float:
    """Share of the baseline; inverted for times, so that less is always worse."""
    top, bottom = (value, median) if more else (median, value)
    return top / bottom if bottom > 0 else 1.0


def _z(value: float, median: float, spread: float, *, more: bool) -> float:
    distance = (value - median) / spread if spread > 0 else 0.0
    return distance if more else -distance


def compare(value: float, key: Key, others: Iterable[float]) -> Comparison:
    """Compare ``value`` with one value per other node; with few nodes, with the shipped figure."""
    # A value of 0 has no ratio to others.
    more, found = more_is_better(key.unit), [each for each in others if each > 0]
    if len(found) < MIN_NODES:
        figure = shipped_baseline(key)
        if figure is None:
            return Comparison(Verdict.UNKNOWN)
        # A figure from elsewhere has no spread, so it is only good for a warning, never for FAIL.
        slow = _ratio(value, figure, more=more) < FAIL_RATIO
        return Comparison(Verdict.DEGRADED if slow else Verdict.PASS, figure, None, "shipped")
    median, spread = centre(found, more=more)
    ratio, z = _ratio(value, median, more=more), _z(value, median, spread, more=more)
    # Both limits must be exceeded. The ratio alone would condemn a node in a fleet that varies by
    # nature; z alone would condemn it for a difference too small to matter.
    verdict = Verdict.PASS
    if ratio < FAIL_RATIO and z < FAIL_Z:
        verdict = Verdict.FAIL
    elif ratio < DEGRADED_RATIO and z < DEGRADED_Z:
        verdict = Verdict.DEGRADED
    return Comparison(verdict, median, z if more else -z, "fleet")


class FleetBaselines:
    """The newest value of every node, by key and target.

    Bounded: the least recently measured keys, and nodes within a key, are dropped first.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[Key, OrderedDict[str, dict[str, float]]] = OrderedDict()

    def measured(self, node: str, target: str, key: Key, value: float) -> Comparison:
        """Compare a value with the other nodes', then keep it as this node's newest."""
        nodes = self._values.setdefault(key, OrderedDict())
        self._values.move_to_end(key)
        # One value per node: a node with many targets must not outvote the others.
        others = [
            statistics.median(values.values()) for name, values in nodes.items() if name != node
        ]
        found = compare(value, key, others)
        # A real value replaces the median that the node reported from an earlier driver's time.
        own = nodes.setdefault(node, {})
        own.pop(_LEARNED, None)
        own[target] = value
        nodes.move_to_end(node)
        self._bound(nodes)
        return found

    def learn(self, node: str, key: Key, value: float) -> None:
        """Add a node's earlier median over its targets, unless it has newer values."""
        nodes = self._values.setdefault(key, OrderedDict())
        self._values.move_to_end(key)
        nodes.setdefault(node, {_LEARNED: value})
        self._bound(nodes)

    def _bound(self, nodes: OrderedDict[str, dict[str, float]]) -> None:
        while len(nodes) > MAX_NODES:
            nodes.popitem(last=False)
        while len(self._values) > MAX_KEYS:
            self._values.popitem(last=False)

    def forget(self, node: str) -> None:
        """Drop the values of a node that was repaired or is gone."""
        for nodes in self._values.values():
            nodes.pop(node, None)


def odd_versions(
    node: str, versions: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, str, str]]:
    """Libraries whose version on ``node`` differs from most: (name, its version, the fleet's).

    ``versions``: those of all nodes, by node. A majority is more than half of the nodes that have
    the library, of which there must be at least MIN_NODES.
    """
    found = []
    for name, version in sorted(versions.get(node, {}).items()):
        theirs = [each[name] for each in versions.values() if name in each]
        most = max(sorted(set(theirs)), key=theirs.count)
        if len(theirs) >= MIN_NODES and theirs.count(most) > len(theirs) / 2 and version != most:
            found.append((name, version, most))
    return found
