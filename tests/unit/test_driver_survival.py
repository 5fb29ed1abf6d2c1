"""What a job keeps across a change of leader, and how often that is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.harness.desk import POLICY, Desk, job_with
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.values.cluster import AttemptPhase, Cluster
from megascale_driver.core.values.events import LeaderStarted, Tick
from megascale_driver.core.values.goodput import Activity
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec
from megascale_driver.shell.feeds import JobFeeds
from megascale_driver.wire import messages as wire
from megascale_executor.agent.reports.step_reports import StepReports
from megascale_job.restore import RestorePlan, RestoreSource

STEPS = 400
TICK_S = 0.25


class Stored:
    """A desk whose job is stored as the journal does: only when a decision about it is made."""

    def __init__(self) -> None:
        self.desk = Desk("n1", "n2")
        self.writes, self.head = 0, b""
        self.desk.submit(steps=STEPS)
        self.desk.run()
        self.store(None)

    def store(self, old: Job | None) -> None:
        job = self.desk.job()
        if differs(old, job):
            self.writes, self.head = self.writes + 1, codec.dump(job)

    def step(self, step: int, at_s: float = TICK_S) -> None:
        """A tick in which ``step`` is the newest one reported."""
        old = self.desk.job()
        self.desk.now_s += at_s
        record = {"attempt": old.attempt, "step": step, "loss": 4 - step / 1000, "step_time": 0.25}
        seen, records = (("a", old.attempt, step),), {"a": record}
        self.desk.feed(Tick(self.desk.now_s, seen, records=records))
        self.store(old)

    def finish(self) -> None:
        old = self.desk.job()
        for node in ("n1", "n2"):
            self.desk.report(node, AttemptPhase.FINISHED)
        self.store(old)

    def next_leader(self) -> Job:
        """The job as another driver reads it."""
        job = self.desk.job()
        read = codec.load(Job, self.head, config=job.config, attempts=job.attempts)
        self.desk.state = Cluster(nodes=self.desk.state.nodes, jobs={"a": read})
        self.desk.feed(LeaderStarted(self.desk.now_s, "there"))
        return self.desk.job()


def test_a_new_leader_has_the_steps_up_to_the_last_mark_and_marks_are_few() -> None:
    stored = Stored()
    for step in range(1, 211):
        stored.step(step)
    marks = 210 * TICK_S / POLICY.mark_interval_s
    assert stored.writes <= marks + 2, "not one write per step"
    job = stored.next_leader()
    behind = POLICY.mark_interval_s / TICK_S
    assert 210 - behind <= job.current.step <= 210
    assert job.best_step == job.current.step and job.last_record["step"] == job.current.step
    assert len(job.step_times) >= 100, "without them the limit of a hang would be that of a warm-up"
    shown = wire.job_message(job, None)
    assert shown.step == job.current.step and shown.last_record == types_pb2.StepRecord()
    stored.step(210)  # the agent sends its newest record again
    assert stored.desk.job().current.step == 210


def test_a_finished_job_shows_its_final_figures_at_every_later_leader() -> None:
    stored = Stored()
    for step in range(1, STEPS + 1):
        stored.step(step)
    stored.finish()
    for _ in range(2):
        job = stored.next_leader()
        assert job.phase is JobPhase.SUCCEEDED
        record = JobFeeds().of("a").adopt(wire.record_message(job.last_record))
        shown = wire.job_message(job, record)
        assert (shown.step, shown.last_record.step) == (STEPS, STEPS)
        assert shown.last_record.loss == 4 - STEPS / 1000
        assert shown.last_record.step_time.ToMilliseconds() == 250


def test_a_record_that_arrives_after_the_end_is_stored_at_once() -> None:
    stored = Stored()
    for step in range(1, STEPS):
        stored.step(step)
    stored.finish()
    stored.step(STEPS)
    assert stored.next_leader().current.step == STEPS


def test_a_head_without_the_new_fields_is_read() -> None:
    stored = Stored()
    stored.step(1)
    new = {"marked_at_s", "step", "best_step", "last_record", "goodput", "step_times"}
    values = json.loads(stored.head)
    assert new <= values.keys()
    stored.head = json.dumps({k: v for k, v in values.items() if k not in new}).encode()
    job = stored.next_leader()
    assert (job.phase, job.current.step, job.last_record) == (JobPhase.RUNNING, 0, {})
    # It has no history, so its time counts from here on.
    assert job.goodput.since_us == round(stored.desk.now_s * 1e6)
    stored.step(7)
    assert (stored.desk.job().current.step, stored.desk.job().goodput.activity) == (
        7,
        Activity.TRAINING,
    )
    stored.finish()
    ended = json.loads(stored.head)
    stored.head = json.dumps({k: v for k, v in ended.items() if k not in new}).encode()
    assert not wire.job_message(stored.next_leader(), None).HasField("goodput")


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"step": 210, "committed_step": 200, "committed_by_attempt": 1}, 210),
        ({"step": 0, "committed_step": 200, "committed_by_attempt": 1}, 200),
        # The attempt after it has not restored yet: it will restore at least what is committed.
        (
            {
                "number": 2, "committed_step": 200, "committed_by_attempt": 1, "restore": None,
            },
            200,
        ),
        # It restored an older one, because the newest was damaged.
        (
            {
                "number": 2, "committed_step": 200, "committed_by_attempt": 1,
                "restore": RestorePlan(RestoreSource.STORAGE, 100, 1, "m"),
            },
            100,
        ),
    ],
)  # fmt: skip
def test_the_step_shown_is_never_before_what_is_committed(
    changes: dict[str, Any], step: int
) -> None:
    job = job_with(Stored().desk.job(), **changes)
    assert wire.job_message(job, None).step == step


def test_a_record_survives_the_form_in_which_the_core_keeps_it() -> None:
    record = types_pb2.StepRecord(
        attempt=2, step=9, loss=1.25, consumed_tokens=1 << 50, mfu_causal=0.0
    )
    record.step_time.FromNanoseconds(250_000_000)
    record.completed_at.FromSeconds(1_760_000_000)
    values = wire.record_values(record)
    stored = json.loads(json.dumps({**values, "of_a_later_build": 3.0}))
    assert wire.record_message(stored) == record
    assert wire.record_message({}) == types_pb2.StepRecord()


def test_a_new_leader_reads_a_record_of_a_skipped_step_and_one_with_hot_experts() -> None:
    record = types_pb2.StepRecord(step=3, loss=2.0, skipped_because="norm", balance=1.5)
    record.hot_experts.experts.add(layer=5, expert=17, load=4.2)
    values = wire.record_values(record)
    assert values == {"step": 3, "loss": 2.0, "balance": 1.5}, "numbers alone"
    # A row of an earlier build has the text, too.
    stored = wire.record_message({**values, "skipped_because": "norm"})  # type: ignore[dict-item]
    assert stored == types_pb2.StepRecord(step=3, loss=2.0, balance=1.5)


def test_a_feed_keeps_the_newer_of_its_own_and_the_stored_record() -> None:
    feed = JobFeeds().of("a")
    stored = types_pb2.StepRecord(attempt=1, step=205)
    assert feed.adopt(stored) == stored == feed.last_record
    newer = types_pb2.StepRecord(attempt=1, step=210)
    assert feed.add_step(newer) and feed.adopt(stored) == newer
    assert not feed.add_step(stored)


class TakingDriver:
    """Takes all step records."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.called = asyncio.Event()

    async def ReportSteps(
        self, requests: AsyncIterator[link_pb2.ReportStepsRequest], timeout: float
    ) -> link_pb2.ReportStepsResponse:
        records = [record async for request in requests for record in request.records]
        self.taken += [record.step for record in records]
        self.called.set()
        return link_pb2.ReportStepsResponse(accepted=len(records))


async def session(reports: StepReports) -> list[int]:
    """Steps that one session with a driver sends first."""
    driver = TakingDriver()
    sending = asyncio.create_task(reports.send_forever(cast(Any, driver)))
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await driver.called.wait()
    sending.cancel()
    await asyncio.wait({sending})
    return driver.taken


async def test_each_session_sends_the_newest_record_again() -> None:
    reports = StepReports()
    for step in (1, 2, 3):
        reports.add("a", {"step": step, "attempt": 1})
    assert await session(reports) == [1, 2, 3]
    assert await session(reports) == [3], "the next driver may not have it"
    reports.add("a", {"step": 4, "attempt": 1})
    assert await session(reports) == [4], "in order: an older record would be dropped as known"
