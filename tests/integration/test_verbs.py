"""Every order of an operator needs a reason, can be tried without an effect, happens once by id."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.harness.driver import running_driver, small_job
from tests.harness.etcd import etcd_server
from tests.harness.fake_executor import FakeExecutor
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.server import EtcdServer

__all__ = ["etcd_server"]

STORED = ("jobs/", "nodes/", "log/", "tenants/", "silences/", "requests/", "breaker")


HOUR = Duration(seconds=3600)


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
    ("SilenceAlerts", driver_pb2.SilenceAlertsRequest(subject="nodes/n1", duration=HOUR)),
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

        async def stored() -> dict[str, int]:
            found: dict[str, int] = {}
            for prefix in STORED:
                found |= {i.key: i.mod_revision for i in (await etcd.get_prefix(prefix)).items}
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
            assert await stored() == before, f"{name} has an effect though it was only tried"
            wanted.request_id = uuid.uuid4().hex
            await call(wanted, timeout=CALL_TIMEOUT_S)
            given = await stored()
            assert given != before, f"{name} has no effect"
            await call(wanted, timeout=CALL_TIMEOUT_S)
            assert await stored() == given, f"{name} took effect twice under one id"
            if name == "CancelJob":
                continue  # a job that is cancelled already is answered as it is
            wanted.reason = "something else"
            with pytest.raises(grpc.aio.AioRpcError) as other:
                await call(wanted, timeout=CALL_TIMEOUT_S)
            assert "request_id" in str(other.value.details()), f"{name}: {other.value.details()}"
            assert await stored() == given
