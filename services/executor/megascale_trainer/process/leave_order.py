"""The order to save and end early: it rides in rank 0's vote, and ends all ranks together.

Every rank reads the sum of the votes of step s, on CUDA after it launched s + 1. So the first step
that no rank has launched then, s + 2, is the last for all of them. If its state cannot be saved,
they train on, and rank 0 asks again only for another order.
"""

from __future__ import annotations

from collections.abc import Callable

from megascale_common.node.messages import Leave, NotLeft, Stay
from megascale_trainer.save.snapshot_schedule import LEAVE

STEPS_AHEAD = 2
MAX_PROBLEM = 2000  # characters that the agent gets


class LeaveOrder:
    """The newest order that this rank has from its agent; ``report`` sends the agent a failure."""

    def __init__(self, rank: int, report: Callable[[NotLeft], None]) -> None:
        self._rank, self._report = rank, report
        self._wanted, self._failed = "", ""

    def take(self, order: Leave | Stay) -> None:
        """An order of the agent."""
        self._wanted = order.id if isinstance(order, Leave) else ""

    @property
    def vote(self) -> int:
        """This rank's part in the sum of the votes of a step."""
        asks = self._rank == 0 and self._wanted and self._wanted != self._failed
        return LEAVE if asks else 0

    def fail(self, problem: str) -> None:
        """The order could not be carried out: the agent gets the reason now."""
        self._failed = self._wanted
        if self._wanted:
            self._report(NotLeft(id=self._wanted, problem=problem[:MAX_PROBLEM]))
