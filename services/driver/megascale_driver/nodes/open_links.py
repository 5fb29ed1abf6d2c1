"""The open links to nodes: one per node, with the messages to send on it.

A link is the driver's side of the stream that :mod:`megascale_driver.service.link_service` serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from megascale.v1 import link_pb2
from megascale_driver.core.values.cluster import Identity
from megascale_driver.presence.intake import Seat

ACKS_HELD = 64  # acknowledgements held; an agent that does not read loses the oldest

Send = Callable[[link_pb2.ConnectResponse], Awaitable[None]]


async def _nowhere(message: link_pb2.ConnectResponse) -> None:
    """The send function of a link without a stream."""


class Link(Seat):
    """One open link. Only the newest of the unsent desired states is kept.

    A stream takes one message at a time. A caller that finds it free writes, and continues with
    what was added meanwhile, so an acknowledgement is sent without a change of task.
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
        self.protocol = protocol  # the protocol version of the link
        self.ended = asyncio.Event()
        self._send = send
        self._desired: link_pb2.DesiredState | None = None
        self._acks: deque[link_pb2.ConnectResponse] = deque(maxlen=ACKS_HELD)
        self._writing = True  # until the driver's hello is sent
        self._writer: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """True if either side has ended the link."""
        return self.ended.is_set()

    async def greet(self, hello: link_pb2.ConnectResponse) -> None:
        """Send the hello of the driver, then what was added before."""
        await self._send(hello)
        await self._write()

    def command(self, desired: link_pb2.DesiredState) -> None:
        """Send this desired state next, instead of an unsent older one."""
        self._desired = desired
        if not self._writing and not self.closed:
            self._writing = True
            # In a task: the sender of orders must not wait for a slow agent.
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
                # The desired state comes first: a command must not wait behind acknowledgements.
                if self._desired is not None:
                    desired = self._desired
                    self._desired = None
                    await self._send(link_pb2.ConnectResponse(desired_state=desired))
                elif self._acks:
                    await self._send(self._acks.popleft())
                else:
                    return
        except Exception:
            self.close()  # the stream is broken; its reader reports that
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

        It means that two agents use the same node name at the same time.
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
        """Forget a link that ended; True if it was the current one of its node."""
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
