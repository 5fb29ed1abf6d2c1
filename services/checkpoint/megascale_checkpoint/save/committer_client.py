"""Reports a rank's durable files to the committer, and waits until the checkpoint is complete.

The call is repeated until the step is complete, superseded or given up. The committer keeps reports
in memory only, and after a restart it gets them again through these repetitions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import DataLossError, SupersededError
from megascale_common.service.status import read

HOLD_S = 5.0  # the committer holds its answer until it commits, this long at most
CALL_TIMEOUT_S = 15.0
GIVE_UP_S = 900.0  # a step is given up if other ranks persist it later than this
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
STORAGE_UNAVAILABLE = "STORAGE_UNAVAILABLE"  # reason of a committer whose storage fails


class CommitterClient:
    """Sends reports to committers, over one channel per address."""

    def __init__(self, token: str, *, give_up_s: float = GIVE_UP_S) -> None:
        self._token = token
        self._give_up_s = give_up_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def report_prepared(
        self,
        request: checkpoint_pb2.ReportPreparedRequest,
        endpoint: str,
        storage_failed: Callable[[str], None],
    ) -> str:
        """Return the manifest's address once the checkpoint is complete.

        ``storage_failed`` is called with the reason each time the committer's storage does not take
        the commit; the report is repeated all the same.

        Raises:
            SupersededError: a later attempt was opened, or a later step committed, before this one
                was complete.
            ServiceError: the committer refuses the report, or the step is given up.
        """
        stub = checkpoint_pb2_grpc.CheckpointServiceStub(self._channel(endpoint))
        deadline = time.monotonic() + self._give_up_s
        pause_s, problem = FIRST_PAUSE_S, "other ranks have not persisted the step"
        while time.monotonic() < deadline:
            try:
                answer = await stub.ReportPrepared(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                problem = f"committer {endpoint}: {error.details()}"
                # FAILED_PRECONDITION means fenced, which is final. UNAVAILABLE covers a committer
                # that restarts or has not opened the attempt yet. Any other code is a refusal.
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise SupersededError(error.details() or "superseded") from error
                if error.code() not in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    raise DataLossError(problem) from error
                if read(error).reason == STORAGE_UNAVAILABLE:
                    storage_failed(f"the commit failed: {error.details()}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if answer.committed:
                return str(answer.manifest_uri)
            # No pause: the committer has held its answer for HOLD_S.
            pause_s, problem = FIRST_PAUSE_S, "other ranks have not persisted the step"
        raise DataLossError(f"given up after {self._give_up_s:.0f} s: {problem}")

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._token)
        return self._channels[endpoint]
