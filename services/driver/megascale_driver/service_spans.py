"""DriverService, the methods about spans: what the ranks of a job have measured."""

from __future__ import annotations

from typing import Protocol

from megascale.v1 import driver_pb2
from megascale_common.service.errors import StateError, invalid
from megascale_common.service.handlers import answers
from megascale_driver.core.state import Job
from megascale_driver.engine import Engine
from megascale_driver.leadership import Leader
from megascale_driver.service_base import Context, ServiceBase

DEFAULT_STEPS = 50
MAX_STEPS = 500
MAX_NAMES = 64


class Views(Protocol):
    """What reads the stored spans: :class:`megascale_driver.telemetry.views.SpanViews`."""

    async def heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        """The newest ``steps`` steps of the job's newest attempt."""


class SpanMethods(ServiceBase):
    """Answers from stored spans; ``views`` is None where this driver keeps none."""

    def __init__(
        self, engine: Engine, leader: Leader, cluster: str, views: Views | None = None
    ) -> None:
        super().__init__(engine, leader, cluster)
        self._views = views

    @answers
    async def GetHeatMap(
        self, request: driver_pb2.GetHeatMapRequest, context: Context
    ) -> driver_pb2.GetHeatMapResponse:
        """What each rank takes for each operation, beside those that do the same work."""
        job = self._job(request.job)
        if not 0 <= request.steps <= MAX_STEPS:
            raise invalid("steps", f"it is {request.steps}", f"give 1 to {MAX_STEPS}, or 0 for 50")
        if len(request.operations) > MAX_NAMES:
            raise invalid("operations", f"there are {len(request.operations)}", "give 64 at most")
        return await self._stored().heat_map(
            job, tuple(request.operations), request.steps or DEFAULT_STEPS
        )

    def _stored(self) -> Views:
        if self._views is None:
            text = (
                "this driver keeps no spans: start it with --telemetry-folder, and with the "
                "packages of the extra observability"
            )
            raise StateError(text, reason="NO_TELEMETRY")
        return self._views
