"""Silences of alerts: bounded, in the audit log, ended by time or by order; the CLI's times."""

from __future__ import annotations

import pytest
from tests.harness.desk import Desk
from typer import BadParameter
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_cli.silencing import duration_s
from megascale_common.service.errors import LimitError
from megascale_driver.core.orders import silencing
from megascale_driver.core.orders.silencing import MAX_SILENCES
from megascale_driver.core.values.cluster import in_force
from megascale_driver.core.values.events import SilenceRequested
from megascale_driver.service.base import raise_refusal


def order(desk: Desk, subject: str, duration_s: float) -> str:
    return desk.feed(SilenceRequested(desk.now_s, subject, duration_s, "its fan", "ops"))


def said(desk: Desk) -> list[tuple[str, str, str, str]]:
    return [(e.reason, e.subject, e.message, e.outcome) for e in desk.audit if e.actor == "ops"]


def test_a_silence_holds_until_its_end_and_both_ends_are_in_the_log() -> None:
    desk = Desk("n1")
    order(desk, "nodes/n1", 7200.0)
    order(desk, "STRAGGLER", 1800.0)
    assert [each.subject for each in in_force(desk.state.silences, desk.now_s)] == [
        "STRAGGLER",
        "nodes/n1",
    ]
    assert said(desk)[0] == (
        "ALERTS_SILENCED", "nodes/n1", "nobody is alerted of nodes/n1: its fan",
        "for 2 h; decisions and this log go on as before",
    )  # fmt: skip
    assert said(desk)[1][1] == "cluster"  # a reason is about no node
    assert [s.subject for s in in_force(desk.state.silences, desk.now_s + 3600)] == ["nodes/n1"]
    order(desk, "nodes/n1", 0.0)
    order(desk, "nodes/n1", 0.0)  # nothing is said twice
    assert [line[0] for line in said(desk)[2:]] == ["SILENCE_ENDED"]
    assert list(desk.state.silences) == ["STRAGGLER"]


def test_those_that_have_ended_go_with_the_next_order_and_the_rest_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silencing, "MAX_SILENCES", 2)
    desk = Desk("n1")
    for subject in ("NODE_DEAD", "nodes/n1"):
        order(desk, subject, 60.0)
    event = SilenceRequested(desk.now_s, "STRAGGLER", 60.0, "r", "ops")
    _, outcome = desk.ask(event)
    with pytest.raises(LimitError, match="megascale silence SUBJECT --end") as error:
        raise_refusal(outcome)
    assert error.value.reason == "TOO_MANY_SILENCES" and error.value.fields[0][0] == "subject"
    order(desk, "nodes/n1", 3600.0)  # one that is there may be longer
    desk.now_s += 120.0
    order(desk, "STRAGGLER", 60.0)
    assert sorted(desk.state.silences) == ["STRAGGLER", "nodes/n1"]
    assert MAX_SILENCES == 256


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600)]
)
def test_a_time_on_the_command_line(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds
    for bad in ("2", "h", "-1h", "2 weeks", ""):
        with pytest.raises(BadParameter, match="30m, 2h or 1d"):
            duration_s(bad)


@pytest.mark.parametrize(
    "arguments", [["nodes/n1"], ["nodes/n1", "--for", "2h", "--end"], ["nodes/n1", "--for", "0m"]]
)
def test_a_silence_without_a_time_is_refused(arguments: list[str]) -> None:
    found = CliRunner().invoke(build_app(), ["silence", *arguments, "--reason", "r"])
    assert found.exit_code == 2
