"""Numbers that one thing of the world draws: what others draw does not change them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.shell.world import World


class Chances:
    """A generator that begins anew with each event of the world (:meth:`World.run`).

    So what follows an event does not depend on how often somebody drew before it, as in a stretch
    that one run lives through and another one skips.
    """

    __slots__ = ("_event", "_name", "_random", "_world")

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, f"{world.seed}-{name}"
        self._event = world.event
        self._random = random.Random(self._name)

    @property
    def now(self) -> random.Random:
        """The generator since the newest event."""
        if self._event != self._world.event:
            self._event = self._world.event
            self._random.seed(f"{self._name}-{self._event}")
        return self._random
