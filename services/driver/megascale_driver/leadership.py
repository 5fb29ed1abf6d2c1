"""Campaigns for leadership, leads, and campaigns again; a standby knows who leads.

A driver whose lease lapsed while etcd was away keeps its links and comes back with a higher epoch.
If another driver leads by then, the links are closed, so that executors go there, and watchers are
sent after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import grpc

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.election import Leadership, campaign
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable, UnknownOutcome
from megascale_common.service import logs
from megascale_common.service.errors import RpcError
from megascale_driver.engine import Engine
from megascale_driver.journal.codec import CodecError
from megascale_driver.journal.predecessor import clear_dead_leader, is_gone, self_description
from megascale_driver.journal.store import LEADER_KEY, NotLeader, Store

LEASE_TTL_S = 10
OBSERVE_INTERVAL_S = 1.0
RETRY_S = 1.0

_log = logs.get(__name__)


async def _ignore(leads: bool) -> None:
    """Nobody wants to hear of it."""


class Leader:
    """Runs the engine's terms. ``notify`` is called with True when a term begins and with False when
    it has ended.
    """

    def __init__(
        self,
        client: EtcdClient,
        engine: Engine,
        notify: Callable[[bool], Awaitable[None]] = _ignore,
    ) -> None:
        self.known_address = ""
        self.etcd_answers = True
        # Set while another driver is known to lead.
        self.superseded = asyncio.Event()
        self._client = client
        self._engine = engine
        self._notify = notify

    @property
    def shows_state(self) -> bool:
        """Whether this driver's picture is the best there is: it leads, or did last and nobody else
        does.
        """
        return self._engine.term is not None or (self._engine.loaded and not self.known_address)

    def not_leading(self) -> RpcError:
        """The refusal of a standby, with the leader's address where it is known."""
        where = f"; the leader is {self.known_address}" if self.known_address else ""
        why = (
            ""
            if self.etcd_answers
            else "; etcd does not answer, so no driver may change anything now"
        )
        metadata = {"leader": self.known_address} if self.known_address else {}
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            "NOT_LEADER",
            f"this driver does not lead{where}{why}",
            metadata=metadata,
        )

    async def run(self) -> None:
        """Campaign and lead, term after term, until cancelled."""
        observer = asyncio.create_task(self._observe())
        try:
            while True:
                await self._term()
        finally:
            observer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await observer

    async def _term(self) -> None:
        engine = self._engine
        value = json.dumps(self_description(engine.address)).encode()
        await self._clear_dead_leader(value)
        try:
            leadership = await campaign(self._client, LEADER_KEY, value, ttl_s=LEASE_TTL_S)
        except (
            EtcdError
        ) as error:  # no room, too many requests, no access: all of it may be mended while we wait
            _log.error(
                "etcd refuses the campaign; it is tried again", error=str(error), retry_s=RETRY_S
            )
            await asyncio.sleep(RETRY_S)
            return
        self.known_address = engine.address
        self.superseded.clear()
        try:
            await self._lead(leadership)
        except (NotLeader, EtcdError) as error:
            self.etcd_answers = (
                not leadership.lease.lost.is_set()
            )  # the observer will know better soon
            _log.warning("leadership ended", error=str(error))
        except CodecError as error:
            _log.error("what etcd holds cannot be read; another build may", error=str(error))
            await asyncio.sleep(RETRY_S)
        finally:
            self.known_address = ""
            await self._notify(False)
            await leadership.resign()

    async def _clear_dead_leader(self, own_value: bytes) -> None:
        """Once etcd answers: before, there is nothing to campaign for. What it refuses, the
        campaign raises.
        """
        while True:
            try:
                await clear_dead_leader(self._client, own_value)
                return
            except (EtcdUnavailable, UnknownOutcome):
                await asyncio.sleep(RETRY_S)
            except EtcdError:
                return

    async def _lead(self, leadership: Leadership) -> None:
        store = Store(self._client, leadership)
        loaded = await store.load()
        await self._notify(True)
        await self._engine.lead(leadership, store, loaded)

    async def _observe(self) -> None:
        """While not leading, look up who does, and let executors go to it."""
        while True:
            if self._engine.term is not None:
                self.etcd_answers = True
            else:
                await self._look_up()
            await asyncio.sleep(OBSERVE_INTERVAL_S)

    async def _look_up(self) -> None:
        try:
            holder = await self._client.get(LEADER_KEY)
            if holder is not None and is_gone(holder.value):
                await clear_dead_leader(
                    self._client
                )  # the campaign sees the key go, and need not wait for the lease
                holder = None
            self.etcd_answers = True
        except EtcdError:
            self.etcd_answers = False
            return
        address = _address_of(holder.value) if holder is not None else ""
        if self._engine.term is None:
            self.known_address = address
            if address and address != self._engine.address:
                self.superseded.set()
                self._engine.links.close_all()


def _address_of(value: bytes) -> str:
    """Where the leader serves, by the value of its key; empty when somebody else wrote that."""
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    return str(found.get("address", "")) if isinstance(found, dict) else ""
