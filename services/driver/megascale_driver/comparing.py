"""Compares what nodes measured in diagnostics with the fleet; the verdicts go to who asked.

The figures are in the leader's memory. Each node keeps its own and says them in its hello, so a new
leader has them when the fleet has linked; how often a node failed in a row begins anew.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, OrderedDict
from collections.abc import Sequence

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.wire_text import enum_name
from megascale_driver.analysis.baselines import (
    MAX_NODES,
    REPEATS,
    Comparison,
    FleetBaselines,
    Key,
    Verdict,
    odd_versions,
)

VERSIONS = "versions"
MAX_LEARNED = 64  # figures of one hello
_VERDICTS = {
    Verdict.DEGRADED: types_pb2.CHECK_VERDICT_DEGRADED,
    Verdict.FAIL: types_pb2.CHECK_VERDICT_FAIL,
}
# Not compared: the maximum error of a clock is set by its server, not by the node.
_NOT_COMPARED = frozenset({"clock"})


class FleetFigures:
    """Baselines and versions of the fleet."""

    def __init__(self) -> None:
        self._baselines = FleetBaselines()
        self._versions: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._repeated: list[types_pb2.CheckResult] = []
        self._newest: OrderedDict[str, list[types_pb2.CheckResult]] = OrderedDict()

    def compare(
        self, node: str, model: str, checks: Sequence[types_pb2.CheckResult]
    ) -> list[types_pb2.CheckResult]:
        """The results of ``node`` with baseline, z and the verdict that follows."""
        found = [self._one(node, model, check) for check in checks]
        self._newest[node] = found
        self._newest.move_to_end(node)
        while len(self._newest) > MAX_NODES:
            self._newest.popitem(last=False)
        return found

    def learn(self, node: str, model: str, measured: Sequence[link_pb2.MeasuredFigure]) -> None:
        """What the node has measured under an earlier leader; newer figures of it stay."""
        for one in measured[:MAX_LEARNED]:
            if one.check not in _NOT_COMPARED and math.isfinite(one.value) and one.value > 0:
                self._baselines.learn(
                    node, Key(model, one.check, one.target_class, one.unit), one.value
                )

    def take_repeated(self, node: str) -> list[tuple[str, str]]:
        """Checks (name, detail) that failed by comparison in a row with the newest results."""
        found, self._repeated[:] = list(self._repeated), []
        return [(check.name, f"{check.target}: {check.detail}") for check in found]

    def counts(self) -> Counter[tuple[str, str]]:
        """Targets of all nodes by (test, verdict), of each node's newest diagnostics."""
        return Counter(
            (check.name, enum_name(types_pb2.CheckVerdict, check.verdict, "CHECK_VERDICT_"))
            for checks in self._newest.values()
            for check in checks
        )

    def medians(self) -> dict[tuple[str, str, str], float]:
        """Median of all values of each node's newest diagnostics by (test, class, unit)."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for check in (each for checks in self._newest.values() for each in checks):
            if check.HasField("value"):
                key = (check.name, check.target_class, check.unit)
                values.setdefault(key, []).append(check.value)
        return {key: statistics.median(found) for key, found in values.items()}

    def forget(self, node: str) -> None:
        """The node is new or repaired."""
        self._baselines.forget(node)
        self._versions.pop(node, None)
        self._newest.pop(node, None)

    def _one(self, node: str, model: str, check: types_pb2.CheckResult) -> types_pb2.CheckResult:
        found = types_pb2.CheckResult()
        found.CopyFrom(check)
        if check.verdict != types_pb2.CHECK_VERDICT_PASS:
            return found
        if check.name == VERSIONS:
            self._compare_versions(node, found)
        elif check.HasField("value") and check.name not in _NOT_COMPARED:
            key = Key(model, check.name, check.target_class, check.unit)
            self._annotate(
                found, node, self._baselines.measured(node, check.target, key, check.value)
            )
        return found

    def _annotate(self, found: types_pb2.CheckResult, node: str, comparison: Comparison) -> None:
        found.baseline_source = comparison.source
        if comparison.baseline is not None:
            found.baseline = comparison.baseline
        if comparison.z is not None:
            found.z = comparison.z
        if comparison.verdict not in _VERDICTS or comparison.baseline is None:
            return
        found.verdict = _VERDICTS[comparison.verdict]
        share = found.value / comparison.baseline
        found.detail += f"; {share:.0%} of the {comparison.source} figure"
        if comparison.verdict is Verdict.FAIL:
            if self._baselines.repeated(node, found.name):
                found.detail += f", {REPEATS} times or more in a row: evict the node"
                self._repeated.append(found)
            else:
                found.detail += "; run it again: one result alone condemns no node"

    def _compare_versions(self, node: str, found: types_pb2.CheckResult) -> None:
        self._versions[node] = dict(found.tools)
        self._versions.move_to_end(node)
        while len(self._versions) > MAX_NODES:
            self._versions.popitem(last=False)
        if odd := odd_versions(node, self._versions):
            found.verdict = types_pb2.CHECK_VERDICT_DEGRADED
            found.detail = "; ".join(
                f"{name} {version}, most nodes have {most}" for name, version, most in odd
            )
