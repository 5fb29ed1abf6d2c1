"""Calls and updates that may come twice: the id of a request, what a watch has yielded."""

from __future__ import annotations

import uuid

from megascale.v1 import driver_pb2


class Seen:
    """What a watch has yielded: events by number in the job's log, steps by attempt and step."""

    def __init__(self) -> None:
        self._event = 0
        self._step = (0, 0)

    def is_new(self, update: driver_pb2.WatchJobResponse) -> bool:
        """Record an update; False when it was yielded before. The job's state is always new."""
        kind = update.WhichOneof("update")
        if kind == "event":
            new = update.event.seq > self._event
            self._event = max(self._event, update.event.seq)
        elif kind == "step":
            place = (update.step.attempt, update.step.step)
            new = place > self._step
            self._step = max(self._step, place)
        else:
            new = kind is not None
        return new


def request_id() -> str:
    """A new id. Made once per call, so the driver recognises every repetition as the same one."""
    return str(uuid.uuid4())
