"""Nodes at rest: heartbeats that would only repeat the one before are not sent.

A node of a large fleet rests while it has nothing to report: its driver's presence lane assumes it
heard (:meth:`megascale_driver.presence.lane.Lane.assume`). Whatever befalls the node, its link, its
driver or the network ends the rest first. Then all is as if each heartbeat had been sent: the lane,
the link and the rules get the time of the newest one, and the next goes out when it is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.shell.network import Link
    from tests.simulation.shell.nodes import SimNode

BEAT_S = 5.0  # between two heartbeats
FLEET = 256  # nodes from which on they rest


class Rest:
    """The rest of one node."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._link: Link | None = None  # on which it rests
        self._beat_s = 0.0  # of the loop: when the newest heartbeat was sent

    def __bool__(self) -> bool:
        return self._link is not None

    def begin(self, link: Link) -> bool:
        """Rest after the heartbeat that has just been sent; False if the node must go on."""
        node = self._node
        world, gang = node.world, node.gang
        if not (world.rests and node.settled and world.may_rest(link)):
            return False
        if gang is not None and not gang.settled:
            return False
        self._link, self._beat_s = link, world.loop.time()
        link.driver.engine.presence.lane.assume(node.name)
        return True

    def end(self) -> None:
        """Go on with heartbeats, before anything happens that they would show."""
        link, self._link = self._link, None
        if link is None:
            return
        node = self._node
        loop_s = node.world.loop.time()
        newest_s = self._beat_s + (loop_s - self._beat_s) // BEAT_S * BEAT_S
        heard_s = min(loop_s, newest_s + link.delay_s)
        with node.world.loop.aside():
            node.goes_on(link, newest_s + BEAT_S - loop_s, heard_s)
            link.believe(heard_s + node.world.skipped_s)
