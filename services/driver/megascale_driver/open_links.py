"""The executors' links: one stream per node, a mailbox for the newest desired state, immediate
acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from megascale.v1 import link_pb2
from megascale_driver.core.state import Identity

ACKS_HELD = 64  # an executor that does not read its acknowledgements loses the oldest


class Link:
    """One open stream, from the driver's side. Desired states are level-triggered: only the newest
    is kept.
    """

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
        """Send this desired state next, in place of one that has not gone out."""
        self._desired = desired
        self._ready.set()

    def acknowledge(self, ack: link_pb2.HeartbeatAck) -> None:
        """Send this acknowledgement soon."""
        self._acks.append(ack)
        self._ready.set()

    def close(self) -> None:
        """End the stream from our side."""
        self.closed = True
        self._ready.set()

    async def outgoing(self) -> AsyncIterator[link_pb2.ConnectResponse]:
        """Messages to the node as they come up, until the link is closed."""
        while not self.closed:
            if self._desired is not None:
                desired, self._desired = self._desired, None
                yield link_pb2.ConnectResponse(desired_state=desired)
            elif self._acks:
                yield link_pb2.ConnectResponse(heartbeat_ack=self._acks.popleft())
            else:
                self._ready.clear()
                await self._ready.wait()


class OpenLinks:
    """All open links, one per node: a newer one takes the place of an older one."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, link: Link) -> None:
        """Register an open link and close its predecessor."""
        old = self._links.get(link.node)
        if old is not None:
            old.close()
        self._links[link.node] = link

    def rival(self, node: str, incarnation: str, received_since_s: float) -> Link | None:
        """The open link of another incarnation of the node that was heard since then: two agents
        share a name.
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
        """Forget a link that ended; whether it was the node's present one."""
        if self._links.get(link.node) is not link:
            return False
        del self._links[link.node]
        return True

    def all(self) -> list[Link]:
        """Every open link."""
        return list(self._links.values())

    def command(self, node: str, desired: link_pb2.DesiredState) -> None:
        """Send a desired state to a node, if it is connected; else it gets the present one when it
        connects.
        """
        link = self._links.get(node)
        if link is not None:
            link.command(desired)

    def close_all(self) -> None:
        """End every stream."""
        for link in self.all():
            link.close()
