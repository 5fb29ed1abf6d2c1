"""Leases: keys that are deleted when their owner is gone, which the owner detects in time.

Validity is counted from the moment before the last successful keep-alive was sent, on a clock that
runs on while the machine is suspended, less a margin. So the owner stops acting before the server
can give its keys to another, even if it was paused or cut off, or its event loop was blocked.
"""

import asyncio
import contextlib
import time
from typing import Self

import grpc.aio
import structlog

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import Member, retry_backoff
from megascale_common.etcd.errors import (
    EtcdError,
    EtcdUnavailable,
    InvalidEtcdRequest,
    UnknownOutcome,
)

KEEPALIVES_PER_TTL = 3
MARGIN_FRACTION = 0.1  # of the TTL: room for clock drift and for the work between check and effect
REVOKE_TIMEOUT_S = 2.0
GRANT_ATTEMPTS = 3  # a grant whose answer is lost leaves a lease that expires by itself

_log = structlog.get_logger(__name__)


def now_s() -> float:
    """Seconds on a clock that never steps and that runs on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A lease that is kept alive in the background until `close` or until it is lost.

    `lost` is set, for good, when the server reports that the lease is gone, when its validity has
    run out here, or when it was closed; `lost_reason` has the reason. Code that must not act
    without the lease checks `remaining_s()` right before it acts: that is right even if the event
    loop has not run since.
    """

    def __init__(
        self, client: EtcdClient, lease_id: int, ttl_s: int, granted_from_s: float
    ) -> None:
        self.lease_id = lease_id
        self.ttl_s = ttl_s  # as granted: the server raises one that is below its election timeout
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self._client = client
        self._valid_until_s = 0.0
        self._extend(granted_from_s, ttl_s)
        self._keeper = asyncio.create_task(self._keep(), name=f"etcd-lease-{lease_id:x}")

    @classmethod
    async def grant(cls, client: EtcdClient, ttl_s: int) -> Self:
        """Get a lease of `ttl_s` whole seconds and start to keep it alive.

        Raises InvalidEtcdRequest for a TTL below one second, EtcdUnavailable and UnknownOutcome as
        usual.
        """
        if ttl_s < 1:
            raise InvalidEtcdRequest(f"ttl_s: {ttl_s} must be at least 1 second")

        async def send(member: Member, timeout_s: float) -> rpc_pb2.LeaseGrantResponse:
            return await member.lease.LeaseGrant(
                rpc_pb2.LeaseGrantRequest(TTL=ttl_s), timeout=timeout_s
            )

        attempts_left = GRANT_ATTEMPTS
        while True:
            attempts_left -= 1
            # Taken before sending: the server's TTL starts later, so ours ends earlier.
            sent_s = now_s()
            try:
                reply = await client.members.write("lease grant", client.timeout_s, send)
            except UnknownOutcome:
                if attempts_left == 0:
                    raise
            else:
                return cls(client, reply.ID, reply.TTL, sent_s)

    def remaining_s(self) -> float:
        """Seconds for which the lease is still valid; 0 when it is lost."""
        return 0.0 if self.lost.is_set() else max(0.0, self._valid_until_s - now_s())

    async def close(self) -> None:
        """Stop the keep-alives and revoke the lease, which deletes its keys. Never raises."""
        self._lose("closed")
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        request = rpc_pb2.LeaseRevokeRequest(ID=self.lease_id)

        async def send(member: Member, timeout_s: float) -> rpc_pb2.LeaseRevokeResponse:
            return await member.lease.LeaseRevoke(request, timeout=timeout_s)

        # A lease that cannot be revoked expires by itself.
        with contextlib.suppress(EtcdError):
            await self._client.members.write("lease revoke", REVOKE_TIMEOUT_S, send)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _extend(self, sent_s: float, ttl_s: float) -> None:
        self._valid_until_s = sent_s + ttl_s * (1.0 - MARGIN_FRACTION)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()

    async def _keep(self) -> None:
        """Renew every third of the TTL; after a failure retry until the validity has run out."""
        interval_s = self.ttl_s / KEEPALIVES_PER_TTL
        backoff = retry_backoff()
        wait_s = interval_s
        try:
            while True:
                # Never past the end of the validity: that must be detected when it happens.
                await asyncio.sleep(min(wait_s, self.remaining_s()))
                if (remaining_s := self.remaining_s()) <= 0:
                    return self._lose(f"not renewed for {self.ttl_s} s less a margin")
                sent_s = now_s()
                try:
                    ttl_s = await self._renew(min(remaining_s, interval_s))
                except EtcdError as error:
                    _log.warning("lease not renewed", lease_id=self.lease_id, error=str(error))
                    wait_s = backoff.next_s()
                    continue
                if ttl_s <= 0:
                    return self._lose("expired or revoked on the server")
                self._extend(sent_s, ttl_s)
                wait_s = interval_s
                backoff.reset()
        finally:
            self._lose("no longer renewed")

    async def _renew(self, timeout_s: float) -> int:
        """Send one keep-alive; returns the new TTL in seconds, 0 for a lease that is gone.

        Each has a stream of its own, so that it can go to another member than the one before.
        """

        async def send(member: Member, call_timeout_s: float) -> int:
            call = member.lease.LeaseKeepAlive(timeout=call_timeout_s)
            try:
                await call.write(rpc_pb2.LeaseKeepAliveRequest(ID=self.lease_id))
                reply = await call.read()
            except asyncio.InvalidStateError:  # raised by a write to a call that has just ended
                reply = grpc.aio.EOF
            finally:
                call.cancel()
            if not isinstance(reply, rpc_pb2.LeaseKeepAliveResponse):
                raise EtcdUnavailable("the keep-alive stream ended without a reply")
            return reply.TTL

        return await self._client.members.read("lease keep-alive", timeout_s, send)
