"""Sends step records to the driver, and keeps them in a bounded buffer until the driver has them.

Delivery is at least once, across reconnects: a record whose acknowledgement was lost is sent again,
which the driver detects by (job, attempt, step). Each session also sends the newest record again,
because a driver that has just taken over may not have it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from itertools import islice, takewhile
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import link_pb2, link_pb2_grpc, types_pb2
from megascale_common.service import logs

_log = logs.get(__name__)

MAX_RECORDS = 10_000
_MAX_PER_CALL = 1_000
_MAX_PER_REQUEST = 200
_CALL_TIMEOUT_S = 10.0
# A tiny model makes many steps per second; their records share a call.
_COALESCE_S = 0.05
_RETRY_S = 1.0
# With these codes the driver has read the records and will never take them.
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)

_DURATIONS = {
    "step_time_s": "step_time",
    "snapshot_time_s": "snapshot_time",
    "data_wait_s": "data_wait",
}
_TIMES = {"completed_at_s": "completed_at"}
_MAX_HOT_EXPERTS = 8
_SCALARS = frozenset(
    field.name for field in types_pb2.StepRecord.DESCRIPTOR.fields if field.message_type is None
)


def to_proto(record: Mapping[str, Any]) -> types_pb2.StepRecord:
    """A worker's record for the wire; unknown names and None are left out.

    Raises:
        TypeError, ValueError, OverflowError: a value does not have its field's type or range.
    """
    message = types_pb2.StepRecord()
    for name, value in record.items():
        if value is None:
            continue
        if name in _SCALARS:
            setattr(message, name, value)
        elif name in _DURATIONS:
            getattr(message, _DURATIONS[name]).FromNanoseconds(round(value * 1e9))
        elif name in _TIMES:
            message.completed_at.FromNanoseconds(round(value * 1e9))
        elif name == "hot_experts":
            for one in value[:_MAX_HOT_EXPERTS]:
                message.hot_experts.experts.add(**one)
    return message


class StepReports:
    """The buffer of one node, and its sender."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._pending: deque[tuple[str, types_pb2.StepRecord]] = deque()
        self._newest: tuple[str, types_pb2.StepRecord] | None = None
        self._first = 0  # number of records that have left the buffer, sent or dropped
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, job: str, record: Mapping[str, Any]) -> None:
        """Add a worker's record; if the buffer is full, the oldest one is dropped and counted."""
        try:
            message = to_proto(record)
        except (TypeError, ValueError, OverflowError) as error:  # round() of inf overflows
            self.dropped += 1
            _log.error("bad step record", job=job, error=str(error), dropped=self.dropped)
            return
        self._newest = (job, message)
        self._pending.append(self._newest)
        if len(self._pending) > self._limit:
            self._forget(1)
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 1000 == 0:
                _log.warning(
                    "step records dropped: no driver takes them",
                    dropped=self.dropped,
                    limit=self._limit,
                )
        self._empty.clear()
        self._filled.set()

    async def until_taken(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until the driver has all records; none is dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning(
                "the driver has not taken all step records", pending=len(self), timeout_s=timeout_s
            )

    async def send_forever(self, stub: link_pb2_grpc.ExecutorLinkServiceAsyncStub) -> None:
        """Send all records over one connection; those that cannot be sent are kept."""
        # The driver of this session may be another one than that which took the newest record.
        if self._newest is not None and not self._pending:
            self._pending.append(self._newest)
            self._filled.set()
        while True:
            await self._filled.wait()
            await asyncio.sleep(_COALESCE_S)
            first, (job, records) = self._first, self._next_batch()
            try:
                response = await stub.ReportSteps(_requests(job, records), timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _FINAL:
                    _log.info(
                        "step records are kept: the driver did not take them",
                        reason=error.details(),
                    )
                    await asyncio.sleep(_RETRY_S)
                    continue
                _log.error(
                    "driver refused step records for good",
                    count=len(records),
                    reason=error.details(),
                )
                response = link_pb2.ReportStepsResponse(accepted=len(records))
            if response.accepted < len(records):
                _log.info(
                    "driver left step records out", sent=len(records), accepted=response.accepted
                )
            # Some of them may have been dropped meanwhile, because the buffer was full.
            self._forget(first + len(records) - self._first)
            if not self._pending:
                self._filled.clear()
                self._empty.set()

    def _next_batch(self) -> tuple[str, list[types_pb2.StepRecord]]:
        """The oldest records, all of one job, so that a refused job loses only its own records."""
        job = self._pending[0][0]
        same = takewhile(lambda entry: entry[0] == job, islice(self._pending, _MAX_PER_CALL))
        return job, [record for _, record in same]

    def _forget(self, count: int) -> None:
        for _ in range(min(count, len(self._pending))):
            self._pending.popleft()
            self._first += 1


async def _requests(
    job: str, records: list[types_pb2.StepRecord]
) -> AsyncIterator[link_pb2.ReportStepsRequest]:
    for begin in range(0, len(records), _MAX_PER_REQUEST):
        yield link_pb2.ReportStepsRequest(
            job=job, records=records[begin : begin + _MAX_PER_REQUEST]
        )
