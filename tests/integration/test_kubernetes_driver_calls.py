"""How the platform process finds the leading driver behind one Service of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest
from tests.harness.kubernetes_service import Service
from tests.unit.test_kubernetes_decisions import a_machine, a_pod

from megascale.v1 import driver_pb2, driver_pb2_grpc
from megascale_common.service.errors import NotLeaderError, UnavailableError
from megascale_common.service.status import abort
from megascale_driver.platform.kubernetes.cluster import KubernetesCluster
from megascale_driver.platform.kubernetes.controller import Controller, Driver
from megascale_driver.platform.kubernetes.objects import Machine, Pod

TOKEN = "a-token-of-this-test-alone"


class Desk(driver_pb2_grpc.DriverServiceServicer):
    """A driver that leads, or one that names another as the leader."""

    def __init__(self, leads: bool, hint: str = "") -> None:
        self.leads, self.hint, self.calls = leads, hint, 0

    async def ListNodes(self, request: Any, context: Any) -> driver_pb2.ListNodesResponse:
        self.calls += 1
        if not self.leads:
            known = {"leader": self.hint} if self.hint else None
            await abort(context, NotLeaderError("this driver does not lead", metadata=known))
        return driver_pb2.ListNodesResponse(nodes=[driver_pb2.Node(name="n1")])


class Witnessed(Desk):
    """One that takes reports of what Kubernetes does not reach."""

    def __init__(self) -> None:
        super().__init__(leads=True)
        self.reports: list[dict[str, str]] = []

    async def ReportUnreachableNodes(
        self, request: driver_pb2.ReportUnreachableNodesRequest, context: Any
    ) -> driver_pb2.ReportUnreachableNodesResponse:
        self.reports.append({node.name: node.condition for node in request.nodes})
        return driver_pb2.ReportUnreachableNodesResponse()


@contextlib.asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server()
    driver_pb2_grpc.add_DriverServiceServicer_to_server(desk, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_driver_that_refuses_is_not_left() -> None:
    async with serving(Desk(leads=True)) as there:
        driver = Driver(["127.0.0.1:1", there], TOKEN)
        try:
            assert len(await driver.nodes()) == 1
            kept = driver._leader
            with pytest.raises(UnavailableError, match="refuses CordonNode"):
                await driver.cordon("n1", "nobody serves that here")
            assert driver._leader is kept
        finally:
            await driver.close()


@pytest.mark.parametrize("names_the_leader", [True, False])
async def test_a_standby_that_the_service_has_chosen_is_left(names_the_leader: bool) -> None:
    leader = Desk(leads=True)
    async with serving(leader) as there:
        standby = Desk(leads=False, hint=there if names_the_leader else "")
        async with serving(standby) as other:
            chosen = [other, other, there]
            service = Service(lambda: [chosen.pop(0) if len(chosen) > 1 else chosen[0]])
            async with service.serving():
                driver = Driver([service.address], TOKEN)
                try:
                    for _ in range(4):
                        with contextlib.suppress(UnavailableError):
                            assert [node.name for node in await driver.nodes()] == ["n1"]
                            break
                    else:
                        pytest.fail("the leader was not found in four passes")
                    assert standby.calls == (1 if names_the_leader else 2)
                    # It is asked again at once, and nobody else is.
                    await driver.nodes()
                    assert leader.calls == 2 and standby.calls <= 2
                    # The leader has changed: the one that is known is left as well.
                    leader.leads, standby.leads, chosen[:] = False, True, [other]
                    for _ in range(4):
                        with contextlib.suppress(UnavailableError):
                            await driver.nodes()
                            break
                    else:
                        pytest.fail("the new leader was not found")
                finally:
                    await driver.close()


class Machines:
    """One machine with the pod of n1, whose kubelet reports or does not."""

    known = True

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.reached = True

    def machines(self) -> dict[str, Machine]:
        words = "Ready" if self.reached else "NotReady (NodeStatusUnknown)"
        made = a_machine(reached=self.reached, conditions=(words,))
        return {"m1": made}

    def pods(self) -> dict[str, Pod]:
        return {"n1": a_pod("n1")}


@pytest.mark.parametrize("known", [True, False])
async def test_what_kubernetes_does_not_reach_is_repeated_until_it_is_over(known: bool) -> None:
    """Also beside a driver of the build before, which has no such call."""
    desk = Witnessed() if known else Desk(leads=True)
    machines = Machines()
    async with serving(desk) as there:
        driver = Driver([there], TOKEN)
        controller = Controller(cast(KubernetesCluster, machines), driver, 1.0)
        try:
            for reached in (True, False, False, True, True):
                machines.reached = reached
                await controller.agree()
        finally:
            await driver.close()
    assert desk.calls == 5, "every pass listed the nodes"
    if isinstance(desk, Witnessed):
        lost = {"n1": "machine m1: NotReady (NodeStatusUnknown)"}
        assert desk.reports == [lost, lost, {}], "a clean cluster makes no call"
