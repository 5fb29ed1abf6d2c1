"""Alerts by webhook: one for each cause, delivered in spite of a bad server, never in the way."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.harness.waiting import eventually
from tests.harness.webhook import Answer, WebhookServer

from megascale_common.service.errors import OptionError
from megascale_driver.alerting import opening, sender
from megascale_driver.alerting.grouping import COLLECT_S, MAX_LINES, REPEAT_S, Groups
from megascale_driver.alerting.sender import MAX_QUEUED, Alerts, Webhook
from megascale_driver.core.values.cluster import Cluster, Silence
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.reasons import ALERTS, Reason


def line(reason: str, *, job: str = "demo", attempt: int = 1, message: str = "it is so") -> Audit:
    subject = f"jobs/{job}" if job else "nodes/n7"
    return Audit(job, 1, 1.5e9, "driver", subject, reason, message, attempt=attempt)


def test_the_table_knows_only_reasons_of_the_log() -> None:
    assert set(ALERTS) <= set(get_args(Reason))


def test_lines_of_one_cause_are_one_alert_and_more_urgent_ones_another() -> None:
    groups = Groups()
    groups.add(line("NODE_DEAD", message="node n3 is dead"), 100.0)
    groups.add(line("NODE_EVICTED"), 101.0)
    groups.add(line("ATTEMPT_STOPPED"), 101.0)  # alerts nobody
    groups.add(line("JOB_SUCCEEDED"), 101.0)  # info, and warning is the least
    groups.add(line("NODE_DEAD", job=""), 101.0)
    assert groups.due(100.0 + COLLECT_S - 0.1) == []
    (one,) = groups.due(100.0 + COLLECT_S)
    assert (one.severity, one.job, one.attempt, len(one.lines)) == ("warning", "demo", 1, 2)
    assert one.title == "NODE_DEAD: node n3 is dead"
    (other,) = groups.due(102.0 + COLLECT_S)
    assert (other.job, other.attempt) == ("", 0)
    groups.add(line("NODE_DEAD"), 110.0)  # quiet: the same cause, no more urgent
    assert groups.next_s() is None
    groups.add(line("JOB_FAILED"), 111.0)
    (worse,) = groups.due(111.0 + COLLECT_S)
    assert (worse.severity, worse.more) == ("critical", 1)
    groups.add(line("JOB_FAILED"), 112.0 + COLLECT_S + REPEAT_S)
    assert groups.next_s() is not None  # the quiet time is over


def test_an_alert_has_so_many_lines_and_counts_the_others() -> None:
    groups = Groups(least="info", silenced=["STRAGGLER"])
    for _ in range(MAX_LINES + 5):
        groups.add(line("NODE_DEAD"), 1.0)
        groups.add(line("STRAGGLER"), 1.0)
    (found,) = groups.due(1.0 + COLLECT_S)
    assert (len(found.lines), found.more) == (MAX_LINES, 5)


def test_what_an_operator_has_silenced_is_counted_and_alerts_nobody() -> None:
    until_s = 1000.0
    for subject, held in (
        ("NODE_DEAD", 2),  # the reason, whatever it is about
        ("jobs/demo", 2),  # all lines of the job's log, and nothing else
        ("nodes/n7", 1),
        ("jobs/other", 0),
    ):
        groups, silences = Groups(), {subject: Silence(subject, until_s)}
        lines = [line("NODE_DEAD"), line("NODE_DEAD", job=""), line("HANG_SUSPECTED")]
        for each in lines:
            groups.add(each, 999.0, silences)
        assert groups.held_back == held, subject
        (*found,) = groups.due(float("inf"))
        assert sum(len(alert.lines) for alert in found) == len(lines) - held
        groups.add(line("NODE_DEAD"), until_s, silences)  # it has ended
        assert groups.held_back == held


@pytest.fixture
def server_of() -> Iterator[Callable[[Answer], WebhookServer]]:
    made: list[WebhookServer] = []

    def make(answer: Answer) -> WebhookServer:
        made.append(WebhookServer(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


@asynccontextmanager
async def running(alerts: Alerts) -> AsyncIterator[None]:
    alerts.start()
    try:
        yield
    finally:
        await alerts.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("megascale_driver.alerting.grouping.COLLECT_S", 0.05)


def alerts_to(*urls: str, form: Any = "json") -> Alerts:
    return Alerts([Webhook(url, "east", form) for url in urls], Groups(), time.time)


@pytest.mark.usefixtures("quick")
async def test_an_alert_arrives_after_the_server_has_failed(
    server_of: Callable[[Answer], WebhookServer],
) -> None:
    answers = {1: (500, {}), 2: (429, {"Retry-After": "1"})}
    server = server_of(lambda number: answers.get(number, (200, {})))
    alerts = alerts_to(server.url)
    async with running(alerts):
        begun_s = time.monotonic()
        alerts.committed(Cluster(), Cluster(), (line("JOB_FAILED", message="no <node> left"),))
        await eventually(lambda: server.bodies, "the alert")
        assert time.monotonic() - begun_s > 1.0  # as the server asked
        await eventually(lambda: alerts.outcomes()["sent"] == 1, "the alert")
    (body,) = server.bodies
    assert (body["cluster"], body["severity"], body["job"]) == ("east", "critical", "demo")
    assert body["next"] == "megascale explain demo" and body["title"].startswith("JOB_FAILED: ")
    assert body["lines"][0]["time"] == "2017-07-14T02:40:00.000+00:00"


@pytest.mark.usefixtures("quick")
async def test_the_form_of_slack_has_no_markup_of_strangers(
    server_of: Callable[[Answer], WebhookServer],
) -> None:
    server = server_of(lambda number: (200, {}))
    alerts = alerts_to(server.url, form="slack")
    async with running(alerts):
        lines = (line("JOB_FAILED", message="see <@everyone>"), line("NODE_DEAD"))
        alerts.committed(Cluster(), Cluster(), lines)
        await eventually(lambda: server.bodies, "the alert")
    text = server.bodies[0]["text"]
    assert "&lt;@everyone&gt;" in text and "• NODE_DEAD jobs/demo: it is so" in text


@pytest.mark.usefixtures("quick")
async def test_what_is_refused_is_given_up_and_holds_nothing_up(
    server_of: Callable[[Answer], WebhookServer], caplog: pytest.LogCaptureFixture
) -> None:
    refusing = server_of(lambda number: (404, {}))
    good = server_of(lambda number: (200, {}))
    alerts = alerts_to(refusing.url, good.url)
    async with running(alerts):
        alerts.committed(Cluster(), Cluster(), (line("JOB_FAILED"),))
        await eventually(lambda: alerts.outcomes()["failed"] == 1 and good.bodies, "the alert")
    assert refusing.asked == 1
    assert "a-secret-path" not in caplog.text


@pytest.mark.usefixtures("quick")
async def test_a_server_that_hangs_loses_the_oldest_and_stops_nobody(
    server_of: Callable[[Answer], WebhookServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(number: int) -> tuple[int, dict[str, str]]:
        released.wait(30.0)
        return 200, {}

    monkeypatch.setattr(sender, "CLOSE_S", 0.1)
    server = server_of(hang)
    alerts = alerts_to(server.url)
    async with running(alerts):
        for number in range(MAX_QUEUED + 10):
            alerts.committed(Cluster(), Cluster(), (line("NODE_DEAD", attempt=number),))
        await eventually(lambda: alerts.outcomes()["dropped"] >= 9, "the alert")
        released.set()


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    opening.add_options(parser)
    return parser.parse_args(arguments)


def test_options(tmp_path: Path) -> None:
    assert opening.opened(parsed(), "east", time.time).webhooks == ()
    secret = tmp_path / "hook"
    secret.write_text("https://hooks.example.com/services/T0/B0\n")
    options = parsed("--alert-webhook", f"@{secret}", "--alert-silence", "STRAGGLER,NODE_DEAD")
    found = opening.opened(options, "east", time.time)
    assert [each.host for each in found.webhooks] == ["hooks.example.com"]
    for arguments, says in (
        (("--alert-webhook", "@/no/such/file"), "give a file"),
        (("--alert-webhook", "ftp://x"), "https://"),
        (("--alert-silence", "PLACED"), "no reason that alerts"),
    ):
        with pytest.raises(OptionError, match=says):
            opening.opened(parsed(*arguments), "east", time.time)
