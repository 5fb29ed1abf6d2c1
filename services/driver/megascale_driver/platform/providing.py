"""More nodes where jobs lack some: when a platform is asked, for how many, and what is reported.

The intent is in the driver's journal: its jobs and nodes say how many nodes there should be. The
platform is asked for that number in all, so whoever carries this on after a crash asks for the same
and gets no node twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from megascale_common.service.errors import OptionError, UnavailableError

# An agent that is restarted, or a node that is on its way, is no lack.
AFTER_S = 60.0


class Providing:
    """Called again and again with what the driver lacks.

    Args:
        provide: asks the platform for a number of nodes in all (``Platform.provide``).
        up_to: more than so many are never asked for; 0: none are.
        after_s: how long nodes have to be missing before the platform is asked.
    """

    def __init__(
        self,
        provide: Callable[[int], Awaitable[int]],
        up_to: int,
        after_s: float,
        report: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provide = provide
        self._up_to = up_to
        self._after_s = after_s
        self._report = report
        self._clock = clock
        self._missing_since_s: float | None = None
        self._said: tuple[str, dict[str, Any]] | None = None

    async def settle(self, wanted: int, missing: int) -> None:
        """Ask for ``wanted`` nodes in all, if ``missing`` of them have been for long enough.

        What comes of it is reported when it changes; a refusal is asked again at the next call.
        """
        if not missing or not self._up_to:
            self._missing_since_s = None
            self._said = None
            return
        now_s = self._clock()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s < self._after_s:
            return
        count = min(wanted, self._up_to)
        try:
            there = await self._provide(count)
        except (OptionError, UnavailableError) as error:
            self._say("not_provided", {"count": count, "error": error.message})
        else:
            bound = self._up_to if wanted > self._up_to else 0
            self._say("provided", {"count": count, "there": there, "bound": bound})

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        if self._said != (event, fields):
            self._said = (event, fields)
            self._report(event, fields)
