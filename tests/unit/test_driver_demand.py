"""How many nodes the driver asks a platform for: jobs, spares, quotas, nodes kept from work."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.desk import POLICY, Desk, job_with
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.queue.scheduling import Demand, demand
from megascale_driver.core.values.attempt import LeaveKind, Leaving
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import (
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    QuotaRequested,
    SuspendRequested,
)
from megascale_driver.core.values.job import JobPhase
from megascale_job.config import CheckpointConfig, JobConfig


def asked(desk: Desk) -> tuple[int, int]:
    found: Demand = demand(desk.state, POLICY)
    return found.wanted, found.missing


def submit(desk: Desk, name: str = "a", spares: int = 1, tenant: str = "red") -> None:
    """A job of eight ranks, tensor-parallel groups of two."""
    config: JobConfig = replace(
        demo_job(name, spares=spares), checkpoint=CheckpointConfig(), tenant=tenant
    )
    desk.feed(JobSubmitted(desk.now_s, config, "me"))


def join(desk: Desk, *names: str) -> None:
    for name in names:
        desk.hello(name)
        desk.report(name, AttemptPhase.IDLE)


def test_without_a_job_nothing_is_asked_for() -> None:
    assert asked(Desk()) == (0, 0)
    assert asked(Desk("n1", "n2")) == (0, 0)


def test_before_any_node_is_known_a_first_one_is_asked_for() -> None:
    desk = Desk()
    submit(desk)
    assert asked(desk) == (1, 1)
    join(desk, "n1")  # of four devices: two nodes and a spare
    assert asked(desk) == (3, 2)
    join(desk, "n2", "n3")
    assert asked(desk) == (3, 0)


def test_a_lost_node_and_short_spares_are_missing() -> None:
    desk = Desk("n1", "n2", "n3")
    submit(desk)
    desk.run()
    assert asked(desk) == (3, 0)
    desk.crash("n3")  # the spare
    assert asked(desk) == (3, 1)
    desk.crash("n2")
    assert asked(desk) == (3, 2)


def test_missing_nodes_say_who_asks_for_them() -> None:
    desk = Desk("n1", "n2", "n3")
    submit(desk)
    desk.run()
    assert demand(desk.state, POLICY).why == ""
    desk.feed(CordonRequested(desk.now_s, "n3", "its link flaps", "ada"))
    assert demand(desk.state, POLICY).why == (
        "jobs and their spares ask for 3, and 1 of those alive serve none, kept from work or left "
        "by a job"
    )


def test_evicted_nodes_count_on_neither_side_and_cordoned_ones_on_both() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    submit(desk)
    desk.run()
    desk.feed(CordonRequested(desk.now_s, "n4", "a look at its fan", "ops"))
    assert asked(desk) == (4, 0)
    spare = desk.job().spares[0]
    desk.feed(EvictRequested(desk.now_s, spare, "broken", "ops"))
    assert asked(desk) == (4, 1)


def test_a_job_above_its_quota_asks_for_nothing() -> None:
    desk = Desk("n1", "n2")
    submit(desk, "a", spares=0)
    desk.feed(QuotaRequested(desk.now_s, "red", 8, "a reason", "ops", None))
    submit(desk, "b", spares=0)
    submit(desk, "c", spares=0, tenant="blue")
    assert asked(desk) == (4, 2)
    desk.feed(QuotaRequested(desk.now_s, "red", 16, "a reason", "ops", None))
    assert asked(desk) == (6, 4)


def test_what_no_number_of_such_nodes_could_run_is_not_asked_for() -> None:
    desk = Desk("n1")
    config = replace(demo_job("a", spares=2), checkpoint=CheckpointConfig())
    wide = replace(config.parallelism, tp=8, pp=1, dp=1)
    desk.feed(JobSubmitted(desk.now_s, replace(config, parallelism=wide), "me"))
    assert desk.job().config.layout.tp == 8
    assert asked(desk) == (0, 0)


def test_a_job_that_is_suspended_frees_its_nodes_and_asks_for_none() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a"), "me"))
    assert desk.job().phase is JobPhase.PREPARING and asked(desk) == (3, 0)
    desk.feed(SuspendRequested(desk.now_s, "a", "later", "ops"))
    assert desk.job().phase is JobPhase.STOPPING and asked(desk) == (0, 0)


def test_a_job_that_saves_before_it_leaves_asks_for_nodes_only_if_it_waits_for_others() -> None:
    desk = Desk("n1", "n2", "n3")
    submit(desk)
    desk.run()
    for kind, wanted in ((LeaveKind.SUSPEND, 0), (LeaveKind.DRAIN, 3)):
        order = Leaving(kind, "a reason", "ops", desk.now_s)
        leaving = {"a": job_with(desk.job(), leaving=order)}
        found = demand(replace(desk.state, jobs=leaving), POLICY)
        assert found.wanted == wanted
