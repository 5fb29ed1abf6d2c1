"""The open links to nodes: one per node, with the messages that are to be sent on it.

A link is the driver's side of the stream that :mod:`megascale_driver.service.link_service` serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from megascale.v1 import link_pb2
from megascale_driver.core.values.cluster import Identity
from megascale_driver.presence.intake import Seat

ACKS_HELD = 64  # an agent that does not read its acknowledgements loses the oldest

Send = Callable[[link_pb2.ConnectResponse], Awaitable[None]]


async def _nowhere(message: link_pb2.ConnectResponse) -> None:
    """Where a link without a stream sends to."""


class Link(Seat):
    """One open link. Of the desired states that have not been sent only the newest is kept.

    A stream takes one message at a time. Whoever finds it free writes, and goes on with what was
    added meanwhile, so an acknowledgement is on its way without a change of task.
    """

    def __init__(
        self,
        node: str,
        identity: Identity,
        received_at_s: float,
        send: Send = _nowhere,
        protocol: int = 1,
    ) -> None:
        super().__init__(node, identity.incarnation, received_at_s)
        self.identity = identity
        self.protocol = protocol  # the version that both sides speak
        self.ended = asyncio.Event()
        self._send = send
        self._desired: link_pb2.DesiredState | None = None
        self._acks: deque[link_pb2.ConnectResponse] = deque(maxlen=ACKS_HELD)
        self._writing = True  # until the driver's hello is sent
        self._writer: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether either side has ended it."""
        return self.ended.is_set()

    async def greet(self, hello: link_pb2.ConnectResponse) -> None:
        """Send the driver's hello, then what has been added before."""
        await self._send(hello)
        await self._write()

    def command(self, desired: link_pb2.DesiredState) -> None:
        """Send this desired state next, in place of one that has not been sent."""
        self._desired = desired
        if not self._writing and not self.closed:
            self._writing = True
            self._writer = asyncio.ensure_future(self._write())

    async def acknowledge(self, ack: link_pb2.ConnectResponse) -> None:
        """Send this acknowledgement, at once if the stream is free."""
        self._acks.append(ack)
        if not self._writing and not self.closed:
            self._writing = True
            await self._write()

    def close(self) -> None:
        """End the stream from the driver's side."""
        self.ended.set()

    async def _write(self) -> None:
        try:
            while not self.closed:
                # The desired state goes first: a command must not wait behind acknowledgements.
                if self._desired is not None:
                    desired = self._desired
                    self._desired = None
                    await self._send(link_pb2.ConnectResponse(desired_state=desired))
                elif self._acks:
                    await self._send(self._acks.popleft())
                else:
                    return
        except Exception:
            self.close()  # the stream is broken, which its reader reports
        finally:
            self._writing = False


class OpenLinks:
    """All open links, at most one per node: a newer one replaces an older one."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: Link) -> None:
        """Register an open link and close its predecessor."""
        old = self._links.get(link.node)
        if old is not None:
            old.close()
        self._links[link.node] = link

    def get(self, node: str) -> Link | None:
        """The open link of a node, if it has one."""
        return self._links.get(node)

    def rival(self, node: str, incarnation: str, received_since_s: float) -> Link | None:
        """The open link of another incarnation of the node that has sent something since then.

        Then two agents use the same node name at the same time.
        """
        link = self._links.get(node)
        if (
            link is None
            or link.closed
            or link.incarnation == incarnation
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

    def close_all(self) -> None:
        """End every stream."""
        for link in self.all():
            link.close()
