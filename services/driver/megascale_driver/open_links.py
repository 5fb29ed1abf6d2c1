"""The open links to nodes: one per node, with the messages that are to be sent on it.

A link is the driver's side of the stream that :mod:`megascale_driver.link_service` serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from megascale.v1 import link_pb2
from megascale_driver.core.state import Identity

ACKS_HELD = 64  # an agent that does not read its acknowledgements loses the oldest


class Link:
    """One open link. Of the desired states that have not been sent only the newest is kept."""

    def __init__(self, node: str, identity: Identity, received_at_s: float) -> None:
        self.node = node
        self.identity = identity
        self.beat: link_pb2.Heartbeat | None = None
        self.received_at_s = received_at_s
        self._desired: link_pb2.DesiredState | None = None
        self._acks: deque[link_pb2.HeartbeatAck] = deque(maxlen=ACKS_HELD)
        self._ready = asyncio.Event()
        self.closed = False

    def command(self, desired: link_pb2.DesiredState) -> None:
        """Send this desired state next, in place of one that has not been sent."""
        self._desired = desired
        self._ready.set()

    def acknowledge(self, ack: link_pb2.HeartbeatAck) -> None:
        """Send this acknowledgement soon."""
        self._acks.append(ack)
        self._ready.set()

    def close(self) -> None:
        """End the stream from the driver's side."""
        self.closed = True
        self._ready.set()

    async def outgoing(self) -> AsyncIterator[link_pb2.ConnectResponse]:
        """Messages to the node in the order of sending, until the link is closed."""
        while not self.closed:
            # The desired state goes first: a command must not wait behind acknowledgements.
            if self._desired is not None:
                desired, self._desired = self._desired, None
                yield link_pb2.ConnectResponse(desired_state=desired)
            elif self._acks:
                yield link_pb2.ConnectResponse(heartbeat_ack=self._acks.popleft())
            else:
                # No await since the checks above, so nothing can have been added in between.
                self._ready.clear()
                await self._ready.wait()


class OpenLinks:
    """All open links, at most one per node: a newer one replaces an older one."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, link: Link) -> None:
        """Register an open link and close its predecessor."""
        old = self._links.get(link.node)
        if old is not None:
            old.close()
        self._links[link.node] = link

    def rival(self, node: str, incarnation: str, received_since_s: float) -> Link | None:
        """The open link of another incarnation of the node that has sent something since then.

        Then two agents use the same node name at the same time.
        """
        link = self._links.get(node)
        if (
            link is None
            or link.closed
            or link.identity.incarnation == incarnation
            or link.received_at_s < received_since_s
        ):
            return None
        return link

    def remove(self, link: Link) -> bool:
        """Forget a link that ended; whether it was the node's current one."""
        if self._links.get(link.node) is not link:
            return False
        del self._links[link.node]
        return True

    def all(self) -> list[Link]:
        """Every open link."""
        return list(self._links.values())

    def command(self, node: str, desired: link_pb2.DesiredState) -> None:
        """Send a desired state to a node; one without a link gets the newest when it connects."""
        link = self._links.get(node)
        if link is not None:
            link.command(desired)

    def close_all(self) -> None:
        """End every stream."""
        for link in self.all():
            link.close()
