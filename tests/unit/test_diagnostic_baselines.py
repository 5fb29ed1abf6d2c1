"""Baselines of the fleet: slow nodes are found, noise is not, one result condemns nobody."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.analysis.baselines import (
    MIN_NODES,
    FleetBaselines,
    Key,
    Verdict,
    centre,
    compare,
    odd_versions,
)
from megascale_driver.nodes.checks import FleetFigures, outcomes

GEMM = Key("NVIDIA H200", "gemm", "8192x8192x8192", "TFLOP/s")
LATENCY = Key("cpu", "disk_speed", "sync", "ms")


def fleet(nodes: int, *, level: float = 700.0, noise: float = 0.01, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + draw.uniform(-noise, noise)) for _ in range(nodes)]


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.2, Verdict.PASS), (0.97, Verdict.PASS), (0.93, Verdict.DEGRADED), (0.8, Verdict.FAIL)],
)
def test_a_slow_value_is_worse_by_ratio_and_by_z(ratio: float, verdict: Verdict) -> None:
    found = compare(700 * ratio, GEMM, fleet(20))
    assert (found.verdict, found.source) == (verdict, "fleet")
    assert found.baseline == pytest.approx(700, rel=0.01)
    # A time is worse when longer: the same distance the other way.
    assert compare(2.0 / ratio, LATENCY, fleet(20, level=2.0)).verdict is verdict


def test_a_wide_spread_needs_more_than_a_low_ratio() -> None:
    noisy = fleet(40, noise=0.4)
    assert compare(700 * 0.8, GEMM, noisy).verdict is Verdict.PASS


def test_slow_nodes_do_not_hide_each_other() -> None:
    """Nearly half of the nodes is slow: they are dropped, and do not widen the spread."""
    values = fleet(20) + [500.0 + each for each in range(18)]
    median, spread = centre(values, more=True)
    assert (median, spread) == centre(fleet(20), more=True)
    assert compare(500, GEMM, values).verdict is Verdict.FAIL


@given(
    values=st.lists(st.floats(600, 800), min_size=MIN_NODES, max_size=30),
    value=st.floats(1, 2000),
    factor=st.floats(1e-3, 1e3),
)
def test_the_verdict_knows_no_unit_and_no_order_and_falls_with_the_value(
    values: list[float], value: float, factor: float
) -> None:
    order = [Verdict.FAIL, Verdict.DEGRADED, Verdict.PASS]
    found = compare(value, GEMM, values)
    assert compare(value, GEMM, values[::-1]) == found
    assert order.index(compare(value * 1.5, GEMM, values).verdict) >= order.index(found.verdict)
    median, _ = centre(values, more=True)
    if value >= 0.96 * median:
        assert found.verdict is Verdict.PASS
    # Figures that lie on a threshold may fall either way when they are scaled.
    scaled = compare(value * factor, GEMM, [each * factor for each in values])
    if found.z is not None and abs(value / median - 0.9) > 1e-6 < abs(value / median - 0.95):
        assert scaled.z == pytest.approx(found.z, rel=1e-6, abs=1e-6)


def test_few_nodes_are_compared_with_the_shipped_figure_which_only_warns() -> None:
    copy = Key("NVIDIA H100 80GB HBM3", "host_copy", "host-cuda", "GB/s")
    slow = compare(10.0, copy, [50.0] * (MIN_NODES - 1))
    assert (slow.verdict, slow.baseline, slow.source) == (Verdict.DEGRADED, 48.0, "shipped")
    assert compare(47.0, copy, []).verdict is Verdict.PASS
    assert compare(1.0, GEMM, []).verdict is Verdict.UNKNOWN


def test_a_node_is_not_compared_with_itself() -> None:
    baselines = FleetBaselines()
    for node in (*range(MIN_NODES), MIN_NODES - 1):
        found = baselines.measured(f"n{node}", "cuda:0", GEMM, 300)
        assert found.verdict is Verdict.UNKNOWN
    assert baselines.measured("one more", "cuda:0", GEMM, 300).verdict is Verdict.PASS


def test_an_odd_version_needs_a_majority_of_enough_nodes() -> None:
    versions = {f"n{number}": {"torch": "2.11.0"} for number in range(MIN_NODES - 1)}
    versions["odd"] = {"torch": "2.12.0", "mlx5": "24.1"}
    assert odd_versions("odd", versions) == [("torch", "2.12.0", "2.11.0")]
    assert odd_versions("n0", versions) == []
    del versions["n0"]
    assert odd_versions("odd", versions) == []
    halves = {f"n{number}": {"torch": str(number % 2)} for number in range(8)}
    assert odd_versions("n0", halves) == []


def result(name: str, value: float, **more: str) -> types_pb2.CheckResult:
    return types_pb2.CheckResult(
        name=name, target="cpu:0", verdict=types_pb2.CHECK_VERDICT_PASS, value=value, **more
    )  # type: ignore[arg-type]


def test_the_driver_says_what_a_value_was_compared_with_and_what_to_do() -> None:
    figures = FleetFigures()
    for number, value in enumerate(fleet(8)):
        figures.compare(f"n{number}", "H200", [result("gemm", value, unit="TFLOP/s")], {})
    (first,) = figures.compare("slow", "H200", [result("gemm", 350, unit="TFLOP/s")], {})
    assert first.verdict == types_pb2.CHECK_VERDICT_FAIL and first.z < -6
    assert first.baseline_source == "fleet" and "condemns no node" in first.detail
    slow = {("gemm", "cpu:0"): 1}
    (second,) = figures.compare("slow", "H200", [result("gemm", 350, unit="TFLOP/s")], slow)
    assert "evict the node" in second.detail
    (other_model,) = figures.compare("old", "A100", [result("gemm", 350, unit="TFLOP/s")], {})
    assert other_model.verdict == types_pb2.CHECK_VERDICT_PASS and not other_model.HasField("z")
    assert figures.counts()["gemm", "FAIL"] == 1
    assert figures.medians()["gemm", "", "TFLOP/s"] == pytest.approx(700, rel=0.01)
    wrong = types_pb2.CheckResult(name="gemm", verdict=types_pb2.CHECK_VERDICT_FAIL, value=700)
    assert figures.compare("n0", "H200", [wrong], {}) == [wrong]


def test_versions_of_nodes_are_compared() -> None:
    figures = FleetFigures()
    passes = types_pb2.CHECK_VERDICT_PASS
    for number in range(6):
        versions = {"torch": "2.11.0" if number else "2.12.0"}
        check = types_pb2.CheckResult(name="versions", verdict=passes, tools=versions)
        (found,) = figures.compare(f"n{number}", "H200", [check], {})
        assert found.verdict == passes
    check = types_pb2.CheckResult(name="versions", verdict=passes, tools={"torch": "2.12.0"})
    (found,) = figures.compare("n0", "H200", [check], {})
    assert found.verdict == types_pb2.CHECK_VERDICT_DEGRADED
    assert found.detail == "torch 2.12.0, most nodes have 2.11.0"


def test_a_new_leader_has_the_fleets_figures_from_the_hellos_of_nodes() -> None:
    figures = FleetFigures()
    for number, value in enumerate(fleet(8)):
        said = link_pb2.MeasuredFigure(check="gemm", unit="TFLOP/s", value=value)
        odd = link_pb2.MeasuredFigure(check="gemm", unit="TFLOP/s", value=float("nan"))
        figures.learn(f"n{number}", "H200", [said, odd])
    (slow,) = figures.compare("slow", "H200", [result("gemm", 350, unit="TFLOP/s")], {})
    assert slow.verdict == types_pb2.CHECK_VERDICT_FAIL and slow.baseline_source == "fleet"
    # What a node measures under this leader takes the place of what it said, and stays.
    figures.compare("n0", "H200", [result("gemm", 710, unit="TFLOP/s")], {})
    before = figures.compare("n1", "H200", [result("gemm", 700, unit="TFLOP/s")], {})[0].baseline
    said = link_pb2.MeasuredFigure(check="gemm", unit="TFLOP/s", value=1.0)
    figures.learn("n0", "H200", [said])
    again = figures.compare("n1", "H200", [result("gemm", 700, unit="TFLOP/s")], {})[0].baseline
    assert again == before
    figures.forget("n0")


def test_two_targets_that_are_slow_once_each_are_not_one_that_is_slow_twice() -> None:
    figures = FleetFigures()
    for number, value in enumerate(fleet(8)):
        figures.compare(f"n{number}", "H200", [result("gemm", value, unit="TFLOP/s")], {})
    seen = [result("gemm", value, unit="TFLOP/s") for value in (350, 350, 700, 700)]
    for target, each in zip(("cuda:0", "cuda:1", "cuda:2", "cuda:3"), seen, strict=True):
        each.target = target
    slow = {("gemm", "cuda:1"): 1, ("gemm", "cuda:2"): 1}
    found = outcomes(figures.compare("slow", "H200", seen, slow), slow)
    assert [(each.target, each.failed) for each in found] == [
        ("cuda:0", True), ("cuda:1", True), ("cuda:2", False),
    ]  # fmt: skip
    assert "condemns no node" in found[0].detail and "2 times in a row" in found[1].detail
    wrong = types_pb2.CheckResult(name="gemm", verdict=types_pb2.CHECK_VERDICT_FAIL)
    assert outcomes([wrong], {}) == [], "a hard floor is no comparison"
    few = [result("gemm", 1, unit="TFLOP/s")]
    assert outcomes(FleetFigures().compare("slow", "H200", few, slow), slow) == []
