"""DriverService calls about spans: heat map, cause of a falling MFU, timeline.

A span is one timed operation of one rank, such as a forward pass or a collective.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from megascale.v1 import driver_pb2
from megascale_common.service.errors import StateError, invalid
from megascale_common.service.status import answers, streams
from megascale_driver.core.values.job import Job
from megascale_driver.service.driver import Calls, Context, Driver

DEFAULT_STEPS = 50
MAX_STEPS = 500
MAX_NAMES = 64
DEFAULT_DECLINE_STEPS = 200
MAX_DECLINE_STEPS = 2000
DEFAULT_TIMELINE_STEPS = 3
MAX_TIMELINE_STEPS = 50
MAX_TIMELINE_RANKS = 64  # most ranks in a request; a request without ranks means all
PART_BYTES = 1 << 20  # of a trace, per message


class Views(Protocol):
    """Reader of the stored spans: :class:`megascale_driver.telemetry.views.SpanViews`."""

    async def heat_map(
        self, job: Job, names: tuple[str, ...], steps: int
    ) -> driver_pb2.GetHeatMapResponse:
        """Heat map over the newest ``steps`` steps of the job's newest attempt."""

    async def decline(self, job: Job, steps: int, split: int) -> driver_pb2.GetMfuDeclineResponse:
        """Why steps take longer from step ``split`` on, over the newest ``steps`` steps.

        ``split`` 0: the step from which they take longer is found first.
        """

    async def timeline(self, job: Job, first: int, steps: int, ranks: tuple[int, ...]) -> bytes:
        """A compressed trace of ``steps`` steps from ``first`` on (0: the newest steps).

        ``ranks``: only these; empty: all.

        Raises:
            LookupError: there are no spans of these steps.
            ValueError: there are too many spans.
        """


class SpanCalls(Calls):
    """Answers from stored spans; ``views`` is None on a driver that keeps no spans."""

    def __init__(self, driver: Driver, views: Views | None = None) -> None:
        super().__init__(driver)
        self._views = views

    @answers
    async def GetHeatMap(
        self, request: driver_pb2.GetHeatMapRequest, context: Context
    ) -> driver_pb2.GetHeatMapResponse:
        """Time of each rank for each operation, compared with the ranks that do the same work."""
        job = self._driver.job(request.job)
        if not 0 <= request.steps <= MAX_STEPS:
            raise invalid("steps", f"it is {request.steps}", f"give 1 to {MAX_STEPS}, or 0 for 50")
        if len(request.operations) > MAX_NAMES:
            raise invalid("operations", f"there are {len(request.operations)}", "give 64 at most")
        return await self._stored().heat_map(
            job, tuple(request.operations), request.steps or DEFAULT_STEPS
        )

    @answers
    async def GetMfuDecline(
        self, request: driver_pb2.GetMfuDeclineRequest, context: Context
    ) -> driver_pb2.GetMfuDeclineResponse:
        """The cause for which steps of a job take longer than before."""
        job = self._driver.job(request.job)
        if not 0 <= request.steps <= MAX_DECLINE_STEPS:
            remedy = f"give 1 to {MAX_DECLINE_STEPS}, or 0 for {DEFAULT_DECLINE_STEPS}"
            raise invalid("steps", f"it is {request.steps}", remedy)
        if request.split_step < 0:
            raise invalid("split_step", f"it is {request.split_step}", "give a step, or 0")
        steps = request.steps or DEFAULT_DECLINE_STEPS
        return await self._stored().decline(job, steps, request.split_step)

    @streams
    async def GetTimeline(
        self, request: driver_pb2.GetTimelineRequest, context: Context
    ) -> AsyncIterator[driver_pb2.GetTimelineResponse]:
        """One trace of all or some ranks, on one clock."""
        job = self._driver.job(request.job)
        if not 0 <= request.steps <= MAX_TIMELINE_STEPS:
            remedy = f"give 1 to {MAX_TIMELINE_STEPS}, or 0 for {DEFAULT_TIMELINE_STEPS}"
            raise invalid("steps", f"it is {request.steps}", remedy)
        if request.first_step < 0:
            raise invalid("first_step", f"it is {request.first_step}", "give a step, or 0")
        world = job.config.layout.world_size
        if len(request.ranks) > MAX_TIMELINE_RANKS:
            problem = f"there are {len(request.ranks)}"
            raise invalid("ranks", problem, f"give {MAX_TIMELINE_RANKS} at most, or none for all")
        if unknown := [rank for rank in request.ranks if not 0 <= rank < world]:
            raise invalid("ranks", f"the job has no rank {unknown[0]}", f"give 0 to {world - 1}")
        steps, ranks = request.steps or DEFAULT_TIMELINE_STEPS, tuple(sorted(set(request.ranks)))
        try:
            data = await self._stored().timeline(job, request.first_step, steps, ranks)
        except LookupError as error:
            raise StateError(str(error), reason="NO_TELEMETRY") from error
        except ValueError as error:
            raise invalid("steps", str(error), "give fewer, or some of the ranks") from error
        for begin in range(0, len(data), PART_BYTES):
            yield driver_pb2.GetTimelineResponse(data=data[begin : begin + PART_BYTES])

    def _stored(self) -> Views:
        if self._views is None:
            text = (
                "this driver keeps no spans: start it with --telemetry-folder, and with the "
                "packages of the extra observability"
            )
            raise StateError(text, reason="NO_TELEMETRY")
        return self._views
