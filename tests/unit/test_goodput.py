"""Goodput: every microsecond has one part, whatever happens and whatever the clock does."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.desk import POLICY, Desk, exited
from tests.harness.properties import examples
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_common.service.clock import VirtualClock
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.core.values import goodput
from megascale_driver.core.values.cluster import AttemptPhase, Cluster
from megascale_driver.core.values.events import (
    AttemptOpened,
    CancelRequested,
    JobSubmitted,
    LeaderStarted,
    Tick,
)
from megascale_driver.core.values.goodput import MAX_MARKS, PARTS, Activity, Ledger
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.journal import codec
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.metrics import DriverMetrics
from megascale_driver.wire import messages as wire
from megascale_job.restore import RestorePlan, RestoreSource


def parts(ledger: Ledger) -> dict[str, float]:
    """Seconds of each part that is not zero."""
    return {
        part.removesuffix("_us"): getattr(ledger, part) / 1e6
        for part in PARTS
        if getattr(ledger, part)
    }


def check(ledger: Ledger) -> None:
    values = [getattr(ledger, part) for part in PARTS]
    assert min(values) >= 0 and sum(values) == ledger.wall_us, ledger
    assert 0 <= ledger.undecided_us <= ledger.lost_us and ledger.lost_steps >= 0
    assert len(ledger.marks) <= MAX_MARKS
    assert list(ledger.marks) == sorted(ledger.marks)
    assert all(0 <= time_us <= ledger.productive_us for _, time_us in ledger.marks)


def test_a_fault_costs_the_steps_behind_the_restored_one_and_the_time_until_the_next() -> None:
    ledger = goodput.placed(goodput.submitted(100.0), 110.0)  # 10 s in the queue
    ledger = goodput.restored(ledger, 0)
    for step in range(1, 21):  # the first after 5 s, then one each second: 19 s
        ledger = goodput.stepped(ledger, step, 114.0 + step)
    ledger = goodput.broke(ledger, 134.5, 136.0)  # half a step later, detected after 1.5 s
    assert parts(ledger)["lost"] == 0.5
    ledger = goodput.placed(goodput.entered(ledger, Activity.WAITING, 137.0), 139.0)
    ledger = goodput.restored(ledger, 15)  # 5 steps are lost
    ledger = goodput.stepped(ledger, 16, 144.0)
    ledger = goodput.stepped(ledger, 17, 145.0, checkpointing_s=0.25)
    ledger = goodput.entered(ledger, Activity.ENDED, 147.0)
    assert parts(ledger) == {
        "waiting": 10 + 2, "starting": 5, "productive": 14 + 0.75, "lost": 5 + 0.5,
        "detecting": 1.5, "restarting": 1 + 5, "checkpointing": 0.25, "ending": 2,
    }  # fmt: skip
    assert (ledger.lost_steps, ledger.faults, ledger.wall_us) == (5, 1, 47_000_000)
    assert ledger.ratio == 14.75 / 47 and ledger.ratio_since_start == 14.75 / 37
    assert goodput.at(ledger, 1e6) == ledger, "an ended job's figures stay"


def test_steps_that_a_driver_never_saw_are_not_lost_if_a_later_one_is_restored() -> None:
    ledger = goodput.restored(goodput.placed(goodput.submitted(0.0), 0.0), 0)
    ledger = goodput.stepped(goodput.stepped(ledger, 1, 1.0), 5, 5.0)
    broken = goodput.broke(ledger, 9.0, 10.0)
    assert parts(goodput.restored(broken, 8)) == {
        "starting": 1, "productive": 4 + 4, "detecting": 1,
    }  # fmt: skip
    learned_too = goodput.learned(broken, 9)
    assert goodput.learned(learned_too, 5) == learned_too
    again = goodput.restored(learned_too, 9)
    assert (parts(again)["productive"], again.lost_steps) == (8, 0)
    assert parts(goodput.restored(broken, 0))["lost"] == 8


def test_time_of_lost_steps_is_right_to_a_step_at_a_steady_pace_over_any_distance() -> None:
    ledger = goodput.restored(goodput.placed(goodput.submitted(0.0), 0.0), 0)
    for step in range(1, 5001):
        ledger = goodput.stepped(ledger, step, float(step))
    for restored in (4990, 3000, 17):
        lost = goodput.restored(goodput.broke(ledger, 5000.0, 5000.0), restored)
        assert lost.lost_steps == 5000 - restored
        assert parts(lost)["lost"] == pytest.approx(5000 - restored, abs=1.0), restored


times = st.floats(0.0, 1e6, allow_nan=False)
steps = st.integers(0, 500)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("entered"), st.sampled_from(list(Activity)[:-1]), times),
        st.tuples(st.just("placed"), times),
        st.tuples(st.just("stepped"), steps, times, st.floats(-1.0, 1e5, allow_nan=False)),
        st.tuples(st.just("learned"), steps),
        st.tuples(st.just("broke"), times, times),
        st.tuples(st.just("restored"), steps),
        st.tuples(st.just("failover")),
    ),
    max_size=80,
)


@examples(300)
@given(moves, times)
def test_the_parts_sum_up_to_the_wall_time_after_any_history(
    history: list[tuple[object, ...]], now_s: float
) -> None:
    """Times come in any order: clocks are set back and forward; the state passes through etcd."""
    ledger = goodput.submitted(1000.0)
    for name, *arguments in history:
        before = ledger
        if name == "failover":
            ledger = codec.load(Ledger, codec.dump(ledger))
            assert ledger == before
        else:
            ledger = getattr(goodput, str(name))(ledger, *arguments)
        check(ledger)
        assert ledger.until_us >= before.until_us, "time never runs back"
        check(goodput.at(ledger, now_s))
    ended = goodput.entered(ledger, Activity.ENDED, now_s)
    check(ended)
    for name, *arguments in history:
        if name not in ("failover", "learned", "restored"):
            assert getattr(goodput, str(name))(ended, *arguments).wall_us == ended.wall_us


@examples(12)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_the_invariant_holds_in_the_core_under_crashes_failovers_and_clock_steps(
    seed: int, data: st.DataObject
) -> None:
    world = SimulatedCluster(seed, nodes=4)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", steps=200), "test"))
    faults = st.sampled_from(["kill", "crash", "pause", "failover", "clock", "none"])
    for _ in range(data.draw(st.integers(1, 6))):
        world.run(data.draw(st.floats(1.0, 30.0)))
        fault, node = data.draw(faults), f"n{data.draw(st.integers(0, 3))}"
        if fault == "kill":
            world.kill_worker(node)
        elif fault == "crash":
            world.crash(node, 10.0)
        elif fault == "pause":
            world.pause(node, 20.0)
        elif fault == "failover":
            world.failover()
        elif fault == "clock":  # a tick of a clock that was set back, or far forward
            world.feed(Tick(world.now_s + data.draw(st.sampled_from([-5.0, 3.0]))))
        job = world.state.jobs["a"]
        check(job.goodput)
        check(goodput.at(job.goodput, world.now_s))
    created_us = round(job.created_at_s * 1e6)
    assert job.goodput.since_us == created_us
    assert sum(line.reason == "ATTEMPT_STOPPED" for line in world.audit) <= job.goodput.faults + 1


def running() -> Desk:
    desk = Desk("n1", "n2")
    desk.now_s += 5.0
    desk.submit()
    desk.now_s += 10.0
    desk.run()
    return desk


def step(desk: Desk, number: int, held_s: float = 0.0) -> None:
    desk.feed(Tick(desk.now_s, (("a", desk.job().attempt, number),), checkpointing_s={"a": held_s}))


def test_the_core_accounts_for_a_killed_worker() -> None:
    desk = running()  # placed at once, 10 s until all workers run
    for number in range(1, 11):
        desk.now_s += 2.0
        step(desk, number)
    desk.now_s += 3.0
    desk.fail("n2", exited(5, desk.now_s - 1.0))
    assert desk.job().phase is JobPhase.STOPPING
    desk.now_s += 4.0
    desk.stop()
    desk.now_s += 6.0
    desk.run()
    desk.now_s += 5.0
    step(desk, 1)
    # Without checkpoints it starts from step 0: 18 s of steps, and 2 s of the one in progress.
    assert parts(desk.job().goodput) == {
        "starting": 12.0, "lost": 18 + 2, "detecting": 1, "restarting": 4 + 6 + 5,
    }  # fmt: skip
    assert (desk.job().goodput.lost_steps, desk.job().goodput.faults) == (10, 1)
    desk.now_s += 2.0
    desk.feed(CancelRequested(desk.now_s, "a", "enough", "ada"))
    desk.now_s += 1.0
    desk.stop()
    assert desk.job().phase is JobPhase.CANCELLED
    assert parts(desk.job().goodput)["ending"] == 3.0


def test_a_hang_begins_when_the_job_last_advanced() -> None:
    desk = running()
    desk.now_s += 1.0
    step(desk, 1)
    last_s = desk.now_s
    while desk.job().phase is JobPhase.RUNNING:
        desk.wait(1.0)
        node_status = {"job": "a", "attempt": 1}
        for node in ("n1", "n2"):
            if desk.job().phase is JobPhase.RUNNING:
                desk.report(node, AttemptPhase.RUNNING, **node_status, statuses=stuck(desk, node))
    assert "HANG_SUSPECTED" in desk.reasons()
    assert parts(desk.job().goodput)["detecting"] == desk.now_s - last_s


def stuck(desk: Desk, node: str) -> tuple[RankStatus, ...]:
    slot = desk.job().slot_of(node)
    assert slot is not None
    return tuple(RankStatus(rank, 1, "STEP", desk.now_s - 1016.0) for rank in slot.ranks)


def test_a_leader_that_was_away_counts_what_was_trained_meanwhile() -> None:
    desk = running()
    for number in (1, 2):
        desk.now_s += 1.0
        step(desk, number)
    job = desk.job()
    read = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    desk.now_s += 30.0  # nobody leads; the workers go on
    desk.state = Cluster(nodes=desk.state.nodes, jobs={"a": read})
    desk.feed(LeaderStarted(desk.now_s, "there"))
    step(desk, 32)
    assert parts(desk.job().goodput) == {"starting": 11.0, "productive": 31.0}


def test_the_wire_has_every_part_to_the_microsecond() -> None:
    ledger = replace(goodput.submitted(1.0), lost_steps=3, faults=2)
    ledger = goodput.placed(ledger, 2.000001)
    message = wire.goodput_message(goodput.stepped(ledger, 1, 2.5))
    assert message.waiting.ToMicroseconds() == 1_000_001
    fields = [field.name for field in message.DESCRIPTOR.fields if field.message_type]
    total = sum(getattr(message, name).ToMicroseconds() for name in fields if name != "wall_time")
    assert total == message.wall_time.ToMicroseconds() == 1_500_000
    assert (message.lost_steps, message.faults) == (3, 2)
    assert {f"{name}_us" for name in fields} == {*PARTS, "wall_time_us"}


def test_a_job_that_restores_counts_only_the_steps_behind() -> None:
    desk = Desk("n1", "n2")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", spares=0), "me"))

    def start(restore: RestorePlan) -> None:
        for name in ("n1", "n2"):
            desk.report(name, AttemptPhase.PREPARED)
        desk.feed(AttemptOpened(desk.now_s, "a", desk.job().attempt, restore, "n1:2"))
        for name in ("n1", "n2"):
            desk.report(name, AttemptPhase.RUNNING)

    start(RestorePlan())
    for number in range(1, 31):
        desk.now_s += 1.0
        step(desk, number)
    desk.fail("n1", exited(0, desk.now_s))
    desk.stop()
    start(RestorePlan(RestoreSource.MEMORY, 25, 1))
    desk.now_s += 7.0
    step(desk, 26)
    found = desk.job().goodput
    assert (found.lost_steps, parts(found)["lost"], parts(found)["productive"]) == (5, 5.0, 24.0)
    assert parts(found)["restarting"] == 7.0


def test_the_metrics_of_a_job_sum_up_to_its_age() -> None:
    desk = running()
    for number in (1, 2, 3):
        desk.now_s += 2.0
        step(desk, number)
    engine = Engine(POLICY, VirtualClock(), "token", "address")
    engine.state, engine.term = desk.state, cast(Term, object())
    found = {
        (sample.name, sample.labels.get("part", "")): sample.value
        for metric in DriverMetrics(engine).registry.collect()
        for sample in metric.samples
        if sample.labels.get("job") == "a"
    }
    name = "megascale_job_time_seconds"
    spent = {part: value for (of, part), value in found.items() if of == name}
    assert spent.keys() == {part.removesuffix("_us") for part in PARTS}
    # The clock of this engine is far ahead: the step in progress counts as productive.
    assert sum(spent.values()) == pytest.approx(engine.clock.now_s() - desk.job().created_at_s)
    assert spent["starting"] == 12.0
    assert found["megascale_job_goodput_ratio", ""] == pytest.approx(
        spent["productive"] / sum(spent.values())
    )
    assert found["megascale_job_lost_steps_total", ""] == 0
