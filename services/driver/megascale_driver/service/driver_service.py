"""DriverService: the driver's API for clients, one handler per call.

Requests become events for the engine; responses are built from the engine's state. Handlers are
methods of small groups, one per subject; a method with the name of a call is the handler of that
call. The groups share :mod:`megascale_driver.service.driver`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import grpc

from megascale.v1 import driver_pb2, driver_pb2_grpc
from megascale_driver.service.cluster import ClusterCalls
from megascale_driver.service.driver import Driver
from megascale_driver.service.jobs import JobCalls, Plans
from megascale_driver.service.nodes import FleetCalls
from megascale_driver.service.spans import SpanCalls, Views
from megascale_driver.service.topology import TopologyCalls
from megascale_driver.service.watch import WatchCalls
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader

_DESCRIPTOR = driver_pb2.DESCRIPTOR.services_by_name["DriverService"]
NAME: Final = _DESCRIPTOR.full_name


class DriverService:
    """The handlers of all calls; ``views`` and ``plans`` are None on a driver without spans."""

    def __init__(
        self,
        engine: Engine,
        leader: Leader,
        cluster: str,
        views: Views | None = None,
        plans: Plans | None = None,
    ) -> None:
        driver = Driver(engine, leader, cluster)
        groups = (
            JobCalls(driver, plans),
            FleetCalls(driver),
            ClusterCalls(driver),
            WatchCalls(driver),
            SpanCalls(driver, views),
            TopologyCalls(driver),
        )
        self.handlers: dict[str, Callable[..., Any]] = {
            name: getattr(group, name)
            for name in _DESCRIPTOR.methods_by_name
            for group in groups
            if hasattr(group, name)
        }
        assert self.handlers.keys() == set(_DESCRIPTOR.methods_by_name), "a call has no handler"

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers with a server."""
        servicer: Any = SimpleNamespace(**self.handlers)
        driver_pb2_grpc.add_DriverServiceServicer_to_server(servicer, server)
