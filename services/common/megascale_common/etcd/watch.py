"""Watches that survive the server: each change from a revision on, in order, delivered once.

After a lost connection the watch resumes behind what was delivered. A revision can change many keys
and etcd may split its events over several messages, so the position is a revision and the number of
its events already delivered: resuming requests that revision again and skips that number.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.connection import REQUIRE_LEADER, retry_backoff
from megascale_common.etcd.errors import (
    AccessDenied,
    Compacted,
    EtcdUnavailable,
    InvalidEtcdRequest,
    refusal,
)
from megascale_common.etcd.operations import Event
from megascale_common.service import logs
from megascale_common.service.backoff import Backoff

if TYPE_CHECKING:  # the client makes the watches
    from megascale_common.etcd.client import EtcdClient

# A slow consumer stops the reading, and flow control then stops the server.
QUEUE_EVENTS = 1024

_log = logs.get(__name__)


@dataclass(slots=True)
class Position:
    """How far a watch is: all before `revision` is delivered, and `delivered` events of it.

    `repeated` events of `revision` will come once more on the present stream before new ones.
    """

    revision: int
    delivered: int = 0
    repeated: int = 0

    def restart(self) -> int:
        """The revision to request on a new stream."""
        self.repeated = self.delivered
        return self.revision

    def take(self, revision: int) -> bool:
        """Whether the next event of the stream, at `revision`, is new; moves behind it."""
        if revision < self.revision:
            return False
        if revision > self.revision:
            self.revision = revision
            self.delivered = 0
            self.repeated = 0
        if self.repeated:
            self.repeated -= 1
            return False
        self.delivered += 1
        return True

    def complete(self, revision: int) -> None:
        """Everything up to and with `revision` has been delivered."""
        if revision >= self.revision:
            self.revision = revision + 1
            self.delivered = 0
            self.repeated = 0


class Watch:
    """`async with Watch(client, prefix, start_revision) as watch: async for event in watch: ...`

    Delivers the changes of every key that starts with `key` (`prefix=False`: of that key alone),
    from `start_revision` on, which is included: read a Listing first and start at its revision + 1.
    While no member answers it waits, without limit; a call of the client shows whether etcd is
    away. Iteration raises Compacted when history that was still to be delivered was discarded (list
    again), AccessDenied, and ends after `close`. At most `queue_events` are held ahead of the
    consumer.
    """

    def __init__(
        self,
        client: "EtcdClient",
        key: str,
        start_revision: int,
        *,
        prefix: bool = True,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        if start_revision < 1:
            raise InvalidEtcdRequest(
                f"start_revision: {start_revision} must be at least 1: start right behind a read, "
                "so that no change is missed between the two"
            )
        self.position = Position(start_revision)
        self._client = client
        self._key = key
        self._range = client.keys.range_of(key) if prefix else (client.keys.full(key), b"")
        self._room = asyncio.Semaphore(queue_events)
        # Bounded by _room, not by a size, so that the end (None) always finds a place in it.
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._failure: Exception | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._run(), name=f"etcd-watch-{self._key}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self._queue.get()
        if event is not None:
            self._room.release()
            return event
        self._queue.put_nowait(None)  # every later call finds the end as well
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def close(self) -> None:
        """Stop watching. Events already held are still delivered, then the iteration ends."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _run(self) -> None:
        """Follow one stream after another until refused or closed."""
        backoff = retry_backoff()
        members = self._client.members
        try:
            while True:
                with contextlib.suppress(EtcdUnavailable):
                    member = await members.member(self._client.timeout_s)
                    call = member.watch.Watch(metadata=REQUIRE_LEADER)
                    try:
                        await self._follow(call, backoff)
                    except grpc.aio.AioRpcError as error:
                        if (refused := refusal(error, f"watch {self._key}")) is not None:
                            raise refused from error
                    except asyncio.InvalidStateError:
                        pass  # raised by a write to a call that has just ended
                    finally:
                        call.cancel()
                    members.avoid(member)
                _log.info("watch resumes", key=self._key, revision=self.position.revision)
                await backoff.sleep()
        except Exception as error:  # raised again where the consumer iterates
            self._failure = error
        finally:
            self._queue.put_nowait(None)

    async def _follow(
        self,
        call: grpc.aio.StreamStreamCall[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse],
        backoff: Backoff,
    ) -> None:
        """Deliver one stream's events; returns when the server ends the stream."""
        key, end = self._range
        create = rpc_pb2.WatchCreateRequest(
            key=key,
            range_end=end,
            start_revision=self.position.restart(),
            progress_notify=True,
            fragment=True,
        )
        await call.write(rpc_pb2.WatchRequest(create_request=create))
        while True:
            response = await call.read()
            if not isinstance(response, rpc_pb2.WatchResponse):
                return
            if response.canceled:
                return self._canceled(response)
            if not response.created:
                backoff.reset()
                await self._deliver(response)

    async def _deliver(self, response: rpc_pb2.WatchResponse) -> None:
        """Queue the new events of a message and move the position behind it."""
        for event in response.events:
            if self.position.take(event.kv.mod_revision):
                await self._room.acquire()
                deleted = event.type == rpc_pb2.Event.DELETE
                self._queue.put_nowait(Event(self._client.keys.key_value(event.kv), deleted))
        if not response.fragment:
            # Without events it is a progress notification: there were none up to its revision. With
            # events its header's revision may be ahead of them, so only their own counts. A
            # fragment completes nothing: more events of its last revision follow.
            last = (
                response.events[-1].kv.mod_revision if response.events else response.header.revision
            )
            self.position.complete(last)

    def _canceled(self, response: rpc_pb2.WatchResponse) -> None:
        """Raise if the server will never serve this watch; return if a new stream may help."""
        reason = response.cancel_reason or "no reason given"
        if response.compact_revision:
            raise Compacted(
                f"watch {self._key}: revision {self.position.revision} is gone",
                response.compact_revision,
            )
        if "permission denied" in reason:
            raise AccessDenied(f"watch {self._key}: {reason}")
        _log.warning("watch canceled by the server", key=self._key, reason=reason)
