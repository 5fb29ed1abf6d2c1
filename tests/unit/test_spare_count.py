"""How many spares by the binomial rule: exact sums, the published table, the driver, the plan."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.desk import POLICY, Desk
from tests.harness.simulated_cluster import demo_job

from megascale_cli.planning import plan_job
from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import JobSubmitted
from megascale_driver.placement.gang import Candidate, Capacity, fit_warnings
from megascale_job import loading
from megascale_job.config import CheckpointConfig, JobConfig
from megascale_job.sizes.failures import (
    advised_spares,
    away_probability,
    enough_spares,
    wanted_spares,
)
from megascale_job.wire import spec as job_spec


def exactly(nodes: int, p: Fraction, k: int) -> Fraction:
    """P(X <= k) in whole numbers."""
    return sum(
        (math.comb(nodes, i) * p**i * (1 - p) ** (nodes - i) for i in range(k + 1)), Fraction(0)
    )


@given(
    st.integers(0, 120),
    st.fractions(Fraction(1, 10_000), Fraction(9, 10), max_denominator=10_000),
    st.fractions(Fraction(1, 2), Fraction(9_999, 10_000), max_denominator=10_000),
)
def test_the_number_is_the_smallest_that_suffices(nodes: int, p: Fraction, t: Fraction) -> None:
    found = enough_spares(nodes, float(p), float(t))
    rounding = Fraction(1, 10**12)
    assert exactly(nodes, p, found) >= t - rounding
    assert found == 0 or exactly(nodes, p, found - 1) < t + rounding


def test_the_limits_of_the_rule() -> None:
    assert enough_spares(10, 0.0, 0.99) == 0 and enough_spares(10, 1.0, 0.99) == 10
    assert enough_spares(100_000, 0.05, 0.99) in range(5_100, 5_200)  # no underflow
    for nodes, p, target in ((-1, 0.1, 0.9), (1, 1.1, 0.9), (1, 0.1, 1.0)):
        with pytest.raises(ValueError, match="give 0 or more"):
            enough_spares(nodes, p, target)
    with pytest.raises(ValueError, match="must be above 0"):
        away_probability(0.0, 1.0)


@pytest.mark.parametrize(("nodes", "spares"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_defaults_give_the_published_numbers(nodes: int, spares: int) -> None:
    config = demo_job("a")  # ByteRobust, arXiv 2509.16293
    assert advised_spares(config, nodes, devices_per_node=8) == spares


def automatic(**recovery: float) -> JobConfig:
    config = demo_job("a", spares=0)
    config = replace(config, checkpoint=CheckpointConfig())
    return replace(config, recovery=replace(config.recovery, spares="auto", **recovery))  # type: ignore[arg-type]


def test_a_job_has_the_number_that_it_gives_or_that_of_the_rule() -> None:
    assert wanted_spares(demo_job("a", spares=3), 1024, 8) == 3
    assert wanted_spares(automatic(), 1024, 8) == 4
    assert wanted_spares(automatic(), 1024, 8, device_hours=5_000.0) > 12
    assert loading.from_json(loading.to_json(automatic())) == automatic()
    refused = loading.to_mapping(demo_job("a", spares=2))
    refused["recovery"] |= {"spares": "auto", "repair_hours": 0.0, "spare_probability": 1.0}
    with pytest.raises(Exception, match="is given, and recovery") as caught:
        loading.from_mapping(refused)
    assert "recovery.repair_hours" in str(caught.value)
    assert "recovery.spare_probability" in str(caught.value)


def test_the_driver_names_as_many_and_says_once_what_is_missing() -> None:
    desk = Desk("n1", "n2", "n3")
    # Nodes that are away one hour in two: of two nodes both may be, so two spares are wanted.
    config = automatic(repair_hours=8_760.0)
    desk.feed(JobSubmitted(desk.now_s, config, "me"))
    desk.run()
    assert desk.job().spares == ("n3",)
    (said,) = [line for line in desk.audit if line.reason == "SPARES_SHORT"]
    assert "1 of 2 spares stand by: with 2 nodes" in said.message
    sentence = explain(desk.state, "a", desk.now_s, POLICY)
    assert sentence.endswith("; 1 more spare should stand by")
    for _ in range(3):
        desk.wait(1.0)
        for slot in desk.job().slots:
            desk.report(slot.node, AttemptPhase.RUNNING)
    assert desk.reasons().count("SPARES_SHORT") == 1
    desk.hello("n4")
    desk.report("n4", AttemptPhase.IDLE)
    assert desk.job().spares == ("n3", "n4") and desk.job().current.spares_short == 0


def test_the_plan_and_the_warnings_of_a_submit_have_the_number() -> None:
    config = replace(automatic(), parallelism=replace(automatic().parallelism, dp=256))
    config = replace(config, training=replace(config.training, global_batch_size=2048))
    plan = plan_job(job_spec.to_proto(config), 8, 0)
    assert (plan["nodes"], plan["spare_nodes"], plan["nodes_wanted"]) == (128, 2, 130)
    counted = replace(config, recovery=replace(config.recovery, spares="count"))
    plan = plan_job(job_spec.to_proto(counted), 8, 0)
    assert (plan["spare_nodes"], plan["spare_nodes_advised"]) == (0, 2)
    known = [Capacity(Candidate(f"n{i}", "cuda", tuple(range(8)), "s"), 0) for i in range(129)]
    assert fit_warnings(config, known) == [
        "recovery.spares: auto asks for 2, and of 129 nodes known so far 1 can be spared"
    ]
