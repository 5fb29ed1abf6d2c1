"""Every order of an operator needs a reason, can be tried without an effect, happens once by id."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.harness.driver import running_driver, small_job
from tests.harness.etcd import etcd_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.server import EtcdServer
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import records

__all__ = ["etcd_server"]

STORED = ("jobs/", "nodes/", "log/", "tenants/", "requests/", "breaker")
Stored = dict[str, tuple[int, bytes]]  # by key: the revision of its last write, and the value


def longer_job() -> Any:
    spec = small_job("a")
    spec.trainer.training.steps += 7
    return spec


# In this order each of them changes something; "a" waits for more nodes than there are.
ORDERS: list[tuple[str, Any]] = [
    ("SuspendJob", driver_pb2.SuspendJobRequest(name="a")),
    ("ResumeJob", driver_pb2.ResumeJobRequest(name="a")),
    ("UpdateJob", driver_pb2.UpdateJobRequest(spec=longer_job())),
    ("SetPolicy", driver_pb2.SetPolicyRequest(rule="hang", mode=types_pb2.POLICY_MODE_OBSERVE)),
    ("SetQuota", driver_pb2.SetQuotaRequest(tenant="physics", devices=3)),
    ("CordonNode", driver_pb2.CordonNodeRequest(name="n1")),
    ("UncordonNode", driver_pb2.UncordonNodeRequest(name="n1")),
    ("DrainNode", driver_pb2.DrainNodeRequest(name="n1")),
    ("EvictNode", driver_pb2.EvictNodeRequest(name="n1", now=True)),
    ("ResetBreaker", driver_pb2.ResetBreakerRequest()),
    ("CancelJob", driver_pb2.CancelJobRequest(name="a")),
    ("RestartJob", driver_pb2.RestartJobRequest(name="a")),
    ("CancelJob", driver_pb2.CancelJobRequest(name="a")),
    ("DeleteJob", driver_pb2.DeleteJobRequest(name="a")),
]


def written(before: Stored, after: Stored) -> set[str]:
    """Keys that were written or deleted between two readings, but not by the line JOB_WAITS.

    A job that has waited for a second gets that line, at a time of the driver's clock and not of an
    order: on a busy machine it may fall between any two readings. It comes in a transaction of its
    own with the job's head, so all keys of a revision whose only lines are JOB_WAITS are left out.
    An order has another line in the log, whatever else it does.
    """
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    lines: dict[int, set[str]] = {}
    for key in changed & after.keys():
        if "log/" in key:
            revision, value = after[key]
            lines.setdefault(revision, set()).update(
                line.reason for line in records.lines_of(value, key)
            )
    waits = {revision for revision, reasons in lines.items() if reasons == {"JOB_WAITS"}}
    return {key for key in changed if key not in after or after[key][0] not in waits}


def test_only_the_line_that_a_job_waits_is_no_effect_of_an_order() -> None:
    def line(seq: int, reason: str) -> tuple[str, bytes]:
        audit = Audit("a", seq, at_s=1.0, actor="", subject="jobs/a", reason=reason, message="")
        ((key, value, _),) = records.records([audit])
        return key, value

    (wait, waits), (order, ordered) = line(1, "JOB_WAITS"), line(2, "JOB_SUSPENDED")
    before: Stored = {"jobs/a/head": (5, b"{}"), "nodes/n1": (5, b"{}"), "requests/x": (5, b"{}")}
    waited = before | {"jobs/a/head": (7, b"{}"), wait: (7, waits)}
    assert written(before, waited) == set()
    assert written(before, waited | {"nodes/n1": (8, b"{}")}) == {"nodes/n1"}
    both = waited | {order: (7, ordered)}
    assert written(before, both) == {"jobs/a/head", wait, order}
    assert written(before, {key: waited[key] for key in waited if key != "requests/x"}) == {
        "requests/x"
    }


def test_the_orders_are_all_calls_that_take_a_reason() -> None:
    """A call that is new here fails until it is in the list."""
    service = driver_pb2.DESCRIPTOR.services_by_name["DriverService"]
    with_reason = {
        method.name for method in service.methods if "reason" in method.input_type.fields_by_name
    }
    with_reason -= {"ProfileJob", "CancelProfile"}  # of a running job; they change no decision
    assert {name for name, _ in ORDERS} == with_reason
    for method in service.methods:
        if method.name in with_reason:
            assert "request_id" in method.input_type.fields_by_name, method.name
            tried = "validate_only" in method.input_type.fields_by_name
            assert tried or method.name == "CancelJob", method.name


async def test_every_order_is_tried_given_once_and_refused_without_a_reason(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    async with (
        running_driver(tmp_path, etcd_server.endpoint) as driver,
        EtcdClient([etcd_server.endpoint], prefix=f"{driver.prefix}/") as etcd,
        FakeExecutor("n1", driver.token, driver.address) as node,
    ):

        async def stored() -> Stored:
            found: Stored = {}
            for prefix in STORED:
                items = (await etcd.get_prefix(prefix)).items
                found |= {item.key: (item.mod_revision, item.value) for item in items}
            return found

        await driver.until_nodes(1)
        await node.until_usable()
        await driver.submit(small_job("a"))
        for name, request in ORDERS:
            call, wanted = getattr(driver.stub, name), type(request)()
            wanted.CopyFrom(request)
            before = await stored()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(wanted, timeout=CALL_TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert "reason" in str(refused.value.details()), name
            wanted.reason = "maintenance"
            if name != "CancelJob":
                wanted.validate_only = True
                tried = await call(wanted, timeout=CALL_TIMEOUT_S)
                assert tried.consequence, f"{name} says what would follow"
                wanted.validate_only = False
            tried_only = written(before, await stored())
            assert not tried_only, f"{name} has an effect though it was only tried: {tried_only}"
            wanted.request_id = uuid.uuid4().hex
            await call(wanted, timeout=CALL_TIMEOUT_S)
            given = await stored()
            assert written(before, given), f"{name} has no effect"
            await call(wanted, timeout=CALL_TIMEOUT_S)
            twice = written(given, await stored())
            assert not twice, f"{name} took effect twice under one id: {twice}"
            if name == "CancelJob":
                continue  # a job that is cancelled already is answered as it is
            wanted.reason = "something else"
            with pytest.raises(grpc.aio.AioRpcError) as other:
                await call(wanted, timeout=CALL_TIMEOUT_S)
            assert "request_id" in str(other.value.details()), f"{name}: {other.value.details()}"
            assert not written(given, await stored()), name
