"""The driver's order that an attempt save and end: passed to the workers once, or taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megascale_common.node import framing
from megascale_common.node.messages import Leave, NotLeft, Stay
from megascale_common.service import logs
from megascale_executor.agent.workers.workers import Worker

_log = logs.get(__name__)


class LeaveOrders:
    """The order that the workers of the present attempt have."""

    def __init__(self) -> None:
        self._id = ""
        # The newest order that a worker could not carry out, and why; ("", "") without one.
        self.failed = ("", "")

    def failed_by(self, message: NotLeft) -> None:
        """A worker could not save. The first of the node that says so is reported."""
        if message.id != self.failed[0]:
            self.failed = (message.id, message.problem)
            _log.warning("order to save failed", id=message.id, reason=message.problem)

    def want(self, order: str, workers: Sequence[Worker]) -> None:
        """The workers are to have this order; "": none."""
        if order == self._id:
            return
        self._id = order
        _log.info("order to save and end", id=order or "withdrawn")
        message = Leave(id=order) if order else Stay()
        for worker in workers:
            # One that cannot be reached has ended, or is about to; the driver gets that otherwise.
            with contextlib.suppress(framing.FramingError):
                worker.channel.send(message)

    def forget(self) -> None:
        """The attempt has ended."""
        self._id, self.failed = "", ("", "")
