"""Quotas of tenants by order: they hold at once, outlast drivers, and the option is the default."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.desk import POLICY, Desk
from tests.harness.simulated_cluster import demo_job
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_common.service.errors import LimitError
from megascale_driver.core import machine
from megascale_driver.core.queue import quotas
from megascale_driver.core.queue.quotas import in_force
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import JobSubmitted, QuotaRequested, RequestKey, Tick
from megascale_driver.core.values.job import JobPhase
from megascale_driver.service.driver import raise_refusal
from megascale_driver.wire import messages as wire
from megascale_job.config import CheckpointConfig

WORLD = 8  # ranks of a job here


def submit(desk: Desk, name: str, tenant: str = "red") -> None:
    config = replace(demo_job(name, spares=0), checkpoint=CheckpointConfig(), tenant=tenant)
    desk.feed(JobSubmitted(desk.now_s, config, "me"))


def order(desk: Desk, devices: int | None, tenant: str = "red", key: str = "") -> str:
    request = RequestKey(key, str(devices)) if key else None
    return desk.feed(QuotaRequested(desk.now_s, tenant, devices, "a reason", "ops", request))


def said(desk: Desk) -> list[str]:
    return [f"{e.message} -> {e.outcome}" for e in desk.audit if e.reason == "QUOTA_SET"]


def test_a_quota_keeps_jobs_of_its_tenant_waiting_and_a_higher_one_lets_them_start() -> None:
    desk = Desk("n1", "n2", "n3", "n4")  # of four devices each
    order(desk, WORLD)
    submit(desk, "a")
    submit(desk, "b")
    submit(desk, "c", tenant="blue")
    assert desk.job("a").phase is JobPhase.PREPARING
    assert desk.job("b").phase is JobPhase.QUEUED
    assert "tenant red has a quota of 8 devices: 8 are in use" in desk.job("b").reason
    assert desk.job("c").phase is JobPhase.PREPARING
    for name in ("n5", "n6"):
        desk.hello(name)
        desk.report(name, AttemptPhase.IDLE)
    order(desk, 2 * WORLD)
    assert desk.job("b").phase is JobPhase.PREPARING  # in the same decision
    assert said(desk)[-1] == (
        "the quota of tenant red is 16 devices: a reason -> it was 8 devices; its jobs hold 8"
    )


def test_jobs_go_on_above_a_lower_quota_and_nothing_is_said_twice() -> None:
    desk = Desk("n1", "n2")
    submit(desk, "a")
    order(desk, 4)
    order(desk, 4)
    assert desk.job("a").phase is JobPhase.PREPARING
    assert said(desk) == [
        "the quota of tenant red is 4 devices: a reason -> it was not limited; its jobs hold 8 "
        "and continue; none of them starts again above the quota"
    ]


def test_the_option_is_the_default_and_comes_back() -> None:
    desk, policy = Desk("n1"), replace(POLICY, quotas={"red": 3, "blue": 5})
    assert in_force(desk.state.tenants, policy) == {"red": 3, "blue": 5}
    order(desk, 0)
    assert in_force(desk.state.tenants, policy) == {"red": 0, "blue": 5}
    shown = {tenant.name: tenant for tenant in wire.tenant_messages(desk.state, policy)}
    assert [(t.quota, t.set) for t in (shown["red"], shown["blue"])] == [(0, True), (5, False)]
    order(desk, None)
    assert in_force(desk.state.tenants, policy) == {"red": 3, "blue": 5}
    assert said(desk)[-1].startswith("the quota of tenant red is not limited")
    order(desk, None)  # it is so already
    assert len(said(desk)) == 2


def test_a_request_takes_effect_once_and_its_id_is_not_used_for_another() -> None:
    desk = Desk("n1")
    order(desk, 4, key="k")
    order(desk, 5)
    assert order(desk, 4, key="k") == "" and desk.state.tenants["red"].quota == 5
    assert order(desk, 6, key="k") == "REQUEST_ID_REUSED"


def test_tenants_are_bounded_over_jobs_and_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_TENANTS", 3)
    desk = Desk("n1")
    submit(desk, "a", tenant="blue")
    submit(desk, "d", tenant="red")
    assert order(desk, 4, tenant="green") == ""
    config = replace(demo_job("b", spares=0), checkpoint=CheckpointConfig(), tenant="grey")
    outcome = machine.step(desk.state, JobSubmitted(desk.now_s, config, "me"), POLICY)[1]
    with pytest.raises(LimitError, match="tenant: grey would be one more than 3 ") as error:
        raise_refusal(outcome)
    assert error.value.reason == "TOO_MANY_TENANTS" and error.value.fields[0][0] == "tenant"
    assert "b" not in desk.state.jobs and order(desk, 4, tenant="grey") == "TOO_MANY_TENANTS"
    # Those that are there go on, and one that is given up makes room.
    submit(desk, "c", tenant="red")
    assert "c" in desk.state.jobs and order(desk, 5, tenant="green") == ""
    assert order(desk, None, tenant="grey") == "", "nothing to give up, nothing to refuse"
    assert order(desk, None, tenant="green") == ""
    submit(desk, "b", tenant="grey")
    assert "b" in desk.state.jobs and order(desk, 1, tenant="green") == "TOO_MANY_TENANTS"


def test_a_tick_changes_no_tenant() -> None:
    desk = Desk("n1")
    order(desk, 4)
    state, _ = machine.step(desk.state, Tick(desk.now_s + 1.0), POLICY)
    assert state.tenants == desk.state.tenants


@pytest.mark.parametrize("words", [("red",), ("red", "4", "--default")])
def test_the_command_wants_a_number_or_the_default(words: tuple[str, ...]) -> None:
    found = CliRunner().invoke(build_app(), ["quota", *words, "--reason", "r"])
    assert found.exit_code == 2
    assert "give DEVICES, or --default" in " ".join(found.output.split())
