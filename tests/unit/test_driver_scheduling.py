"""Scheduling that cannot invert, on the driver's core: survivors, spares, gangs, jobs that wait."""

from __future__ import annotations

from tests.harness.desk import Desk
from tests.harness.fleet import Fleet
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.values.cluster import AttemptPhase, usable
from megascale_driver.core.values.events import (
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    StreamReset,
)
from megascale_driver.core.values.job import JobPhase


def test_a_lower_job_does_not_take_the_survivors_of_one_that_recovers() -> None:
    fleet = Fleet("n0", "n1")
    fleet.add("high", 2, priority=5)
    fleet.start("high")
    fleet.add("low", 1)
    fleet.lose("high", "n1")
    assert fleet.job("high").phase is JobPhase.QUEUED
    fleet.beat()
    assert fleet.job("low").phase is JobPhase.QUEUED, "n0 is kept for the job that recovers"
    fleet.hello("n2")
    fleet.report("n2", AttemptPhase.IDLE)
    fleet.wait(0.25)
    assert sorted(fleet.nodes_of("high")) == ["n0", "n2"]


def test_survivors_are_not_kept_for_ever() -> None:
    fleet = Fleet("n0", "n1")
    fleet.add("high", 2, priority=5)
    fleet.start("high")
    fleet.add("low", 1)
    fleet.lose("high", "n1")
    for _ in range(121):
        fleet.beat()
    assert fleet.job("low").phase is JobPhase.PREPARING, "an unplaceable job stops nobody"


def test_a_spare_is_a_node_that_could_start_now() -> None:
    fleet = Fleet("n0", "n1", "n2", "n3")
    fleet.add("a", 1, spares=1)
    (spare,) = fleet.job("a").spares
    fleet.feed(EvictRequested(fleet.now_s, spare, "smoke", "me"))
    fleet.feed(CordonRequested(fleet.now_s, next(iter(_others(fleet, spare))), "later", "me"))
    fleet.wait(0.25)
    (spare,) = fleet.job("a").spares
    assert usable(fleet.state.nodes[spare])
    broken = fleet.state.nodes[spare]
    fleet.feed(StreamReset(fleet.now_s, spare, broken.identity.incarnation))
    assert fleet.job("a").spares == (), "its link broke, and no other node is left"


def test_a_silent_spare_is_no_spare() -> None:
    fleet = Fleet("n0", "n1", "n2")
    fleet.add("a", 1, spares=1)
    (spare,) = fleet.job("a").spares
    for _ in range(3):
        fleet.beat(4.0, but=spare)
    assert fleet.liveness(spare) == "SUSPECT"
    assert fleet.job("a").spares and spare not in fleet.job("a").spares


def test_a_node_that_the_job_has_left_is_not_its_spare() -> None:
    fleet = Fleet("n0", "n1")
    fleet.add("a", 1, spares=1)
    fleet.start("a")
    left = fleet.nodes_of("a")[0]
    fleet.feed(EvictRequested(fleet.now_s, left, "smoke", "me"))
    fleet.idle("a")
    fleet.wait(0.25)
    assert left in fleet.job("a").evicted and left not in fleet.job("a").spares
    for node in list(fleet.state.nodes):
        assert node not in fleet.job("a").spares or usable(fleet.state.nodes[node])


def test_a_job_that_no_node_can_run_keeps_no_spare_from_others() -> None:
    fleet = Fleet("n0", "n1")
    fleet.add("huge", 9, priority=9)
    fleet.add("a", 1, spares=1)
    fleet.wait(0.25)
    assert fleet.job("a").phase is JobPhase.PREPARING and len(fleet.job("a").spares) == 1
    assert "it needs 36 devices" in fleet.job("huge").reason


def test_small_jobs_do_not_starve_a_gang() -> None:
    fleet = Fleet("n0", "n1")
    fleet.add("s0", saves=False)
    fleet.add("s1", saves=False)
    for name in ("s0", "s1"):
        fleet.start(name)
    fleet.add("gang", 2)
    for k in range(2, 8):  # one small job ends, and the next one waits already
        fleet.add(f"s{k}", saves=False)
        ended = next((n for n in fleet.state.jobs if fleet.job(n).phase is JobPhase.RUNNING), None)
        if ended is None:
            break
        fleet.all_report(ended, AttemptPhase.FINISHED)
        for node in fleet.nodes_of(ended):
            fleet.report(node, AttemptPhase.IDLE)
        fleet.beat()
        for name in list(fleet.state.jobs):
            if name != "gang" and fleet.job(name).phase is JobPhase.PREPARING:
                fleet.start(name)
    assert fleet.job("gang").phase is JobPhase.PREPARING


def _others(fleet: Fleet, spare: str) -> set[str]:
    return set(fleet.state.nodes) - {spare, *fleet.nodes_of("a")}


def test_every_placement_and_every_wait_says_why() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(spares=1)
    desk.run()
    desk.crash("n2")
    desk.stop()
    first, second = [line.message for line in desk.audit if line.reason == "PLACED"]
    assert first.endswith("(2 nodes, the fewest that have room)")
    assert second.endswith("(1 of 2 nodes keep their ranks, spare n3 joins them)")
    desk.feed(JobSubmitted(desk.now_s, demo_job("b"), "me"))
    assert desk.job("b").phase is JobPhase.QUEUED
    assert "needs 8 devices" in desk.job("b").reason and "until job a ends" in desk.job("b").reason
