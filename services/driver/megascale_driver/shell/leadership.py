"""Campaigns for leadership, leads, and campaigns again; a standby looks up who leads.

A driver whose lease expired while etcd was away keeps its links, and leads again with a higher
epoch when etcd is back. If another driver leads by then, the links are closed so that the agents
dial that one, and watchers get an error with its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import pkgutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from megascale_common.etcd.election import Leadership, campaign
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable, UnknownOutcome, own_words
from megascale_common.etcd.lease import Keeper, now_s
from megascale_common.etcd.operations import Etcd
from megascale_common.service import logs, tasks
from megascale_common.service.errors import CodecError, NotLeaderError
from megascale_common.service.identity.gate import caller
from megascale_common.service.tasks import Periodic
from megascale_driver import shell
from megascale_driver.journal.older_lines import OlderLines
from megascale_driver.journal.predecessor import clear_dead_leader, is_gone, self_description
from megascale_driver.journal.store import LEADER_KEY, Store
from megascale_driver.journal.timeline import Timeline
from megascale_driver.journal.trimmer import Retention, Trimmer
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.sweep import Sweep

LEASE_TTL_S = 10
OBSERVE_INTERVAL_S = 1.0
RETRY_S = 1.0
LOOK_UP_S = 0.5
# A driver that has lost its term and has not reached etcd for this long may be the only one that is
# cut off: it closes its links, so that its nodes find a driver that leads. The new leader counts
# their silence from its start and would declare them dead after 60 s.
CUT_OFF_S = 20.0
NO_LEADER = "no leader"  # etcd's message from a member without a quorum

_log = logs.get(__name__)


def watches(engine: Engine) -> Iterator[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
    """The name and the loop of the watch of each detector: ``watch`` of each NAME_watch here."""
    for module in pkgutil.iter_modules(shell.__path__):
        name, _, kind = module.name.rpartition("_")
        if kind == "watch":
            found = importlib.import_module(f"{shell.__name__}.{module.name}")
            if hasattr(found, "watch"):
                yield name, found.watch(engine)


async def _ignore(leads: bool) -> None:
    """The default of ``notify``: does nothing."""


class Leader:
    """Runs the terms of the engine; calls ``notify`` with True when one starts, False when it ends.

    ``keeper`` renews the lease, by default a task of the event loop; ``clock``: the clock of the
    lease. ``retention``: what stays of the audit log. ``sweep_every_s``: time between the checks of
    two idle nodes; 0: no checks.
    """

    def __init__(
        self,
        client: Etcd,
        engine: Engine,
        notify: Callable[[bool], Awaitable[None]] = _ignore,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = now_s,
        retention: Retention | None = None,
        sweep_every_s: float = 0.0,
    ) -> None:
        self.known_address = ""
        self.etcd_answers = True
        # The error of etcd because of which there is no term; None without one.
        self._etcd_error: EtcdError | None = None
        self._answered_s = clock()  # when etcd did last
        # When etcd last answered without a term, or last renewed the lease.
        self._heard_s = self._answered_s
        # Set while another driver is known to lead.
        self.superseded = asyncio.Event()
        # Set while this driver is elected and reads the state; its event is set at the end of that.
        self.beginning: asyncio.Event | None = None
        self._client = client
        self._engine = engine
        self._notify = notify
        self._keeper = keeper
        self._clock = clock
        self._sweep_every_s = sweep_every_s
        self._retention = retention if retention is not None else Retention()
        self.older = OlderLines(client, self._retention.export_to)
        self.timeline = Timeline(client, self.older)

    @property
    def shows_state(self) -> bool:
        """True if clients can read the state here: it leads, or led last and no other does."""
        return self._engine.term is not None or (self._engine.loaded and not self.known_address)

    def not_leading(self) -> NotLeaderError:
        """The error of a driver that does not lead, with the leader's address if it is known."""
        why = f": {self.without_term}" if self.without_term else ""
        # People with tokens are served at another port, which only their own list of drivers has.
        peer = caller()
        known = self.known_address and not (peer is not None and peer.by_token)
        metadata = {"leader": self.known_address} if known else {}
        return NotLeaderError(f"this driver does not lead{why}", metadata=metadata)

    @property
    def without_term(self) -> str:
        """Why this driver has no term, in one sentence; empty while it leads, or if unknown.

        If no driver can lead, it contains the message of etcd, so that an operator looks there.
        """
        if self._engine.term is not None:
            return ""
        if self.known_address and self.known_address != self._engine.address:
            return f"the leader is {self.known_address}"
        problem = self._problem_of_etcd()
        if problem and not self.etcd_answers:
            return f"{problem}, so no driver can change anything now"
        return problem

    def _problem_of_etcd(self) -> str:
        """The refusal of etcd in its own words, or how long it has been silent; or empty."""
        error = self._etcd_error
        words = words_of(error) if error is not None else ""
        refused = error is not None and not isinstance(error, (EtcdUnavailable, UnknownOutcome))
        if words == NO_LEADER:
            return "etcd has no leader"
        if refused:
            return f"etcd refuses {'writes' if self.etcd_answers else 'reads'}: {words}"
        if self.etcd_answers:
            return f"etcd does not confirm writes: {words}" if words else ""
        if error is not None and own_words(error):
            return f"etcd does not answer in time (etcdserver: {words})"
        seen = f" ({words})" if words else ""
        return f"etcd has not answered for {self._clock() - self._heard_s:.0f} s{seen}"

    async def run(self) -> None:
        """Campaign and lead, term after term, until cancelled."""
        observer = tasks.essential(self._observe(), "observer")
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
        # Otherwise a driver that was restarted on this host would wait for the lease of its
        # predecessor.
        await self._clear_dead_leader(value)
        try:
            leadership = await campaign(
                self._client,
                LEADER_KEY,
                value,
                ttl_s=LEASE_TTL_S,
                keeper=self._keeper,
                clock=self._clock,
            )
        except EtcdError as error:
            # No space, too many requests, no access: an operator may fix it meanwhile.
            self._etcd_error = error
            _log.error(
                "etcd refuses the campaign; it is repeated", error=str(error), retry_s=RETRY_S
            )
            await asyncio.sleep(RETRY_S)
            return
        self.known_address = engine.address
        self.superseded.clear()
        try:
            await self._lead(leadership)
        except (NotLeaderError, EtcdError) as error:
            lease = leadership.lease
            self.etcd_answers = not lease.lost.is_set()  # a guess until the next lookup
            self._heard_s = self._clock() if self.etcd_answers else lease.answered_s
            self._etcd_error = error if isinstance(error, EtcdError) else None
            _log.warning("leadership ended", error=str(error))
        except CodecError as error:
            _log.error("the state in etcd cannot be read by this build", error=str(error))
            await asyncio.sleep(RETRY_S)
        finally:
            # Clients look elsewhere from now on: the state of this driver may be outdated.
            await self._notify(False)
            await self._look_up_leader()
            # Also after an error: standbys would wait for the lease of a key that stays.
            await leadership.resign()

    async def _look_up_leader(self) -> None:
        """Look up who leads, right after a term of this driver.

        Until that is known, this driver shows no state: another one may already lead, and have
        decided.
        """
        try:
            async with asyncio.timeout(LOOK_UP_S):
                holder = await self._client.get(LEADER_KEY)
        except (EtcdError, TimeoutError):
            self.known_address = ""  # unknown: the last state is better than none
            return
        address = _address_of(holder.value) if holder is not None else ""
        self.known_address = "" if address == self._engine.address else address

    async def _clear_dead_leader(self, own_value: bytes) -> None:
        """Wait until etcd answers, then remove the key of a leader that is gone.

        The campaign reports any error other than unavailability.
        """
        while True:
            try:
                await clear_dead_leader(self._client, own_value)
                return
            except (EtcdUnavailable, UnknownOutcome) as error:
                self._etcd_error = error
                await asyncio.sleep(RETRY_S)
            except EtcdError:
                return

    async def _lead(self, leadership: Leadership) -> None:
        # Read only now that the leader key is this driver's: whatever a former leader still tries
        # to commit fails on its fence, so nothing can be added to what is read here (Note [Fencing]
        # in journal.fenced).
        store = Store(self._client, leadership)
        beginning = self.beginning = asyncio.Event()
        try:
            loaded = await store.load()
            await self._engine.adopt(leadership, loaded)
            self._etcd_error = None
            await self._notify(True)
        finally:
            # Waiting calls continue in the next turn of the loop, when the term has begun.
            self.beginning = None
            beginning.set()
        trimmer = Trimmer(self._client, leadership, self._retention, self._engine.clock)
        beside = [
            tasks.repeated(lambda: trimmer.run(lambda: self._engine.state), "trimming"),
            tasks.essential(self._end_when_deposed(leadership), "deposed"),
        ]
        engine = self._engine
        beside += [tasks.repeated(run, name) for name, run in watches(engine)]
        if self._sweep_every_s > 0:
            sweep = Sweep(
                engine.node_calls, lambda: engine.state, engine.clock.now_s, self._sweep_every_s
            )
            beside.append(tasks.repeated(sweep.run, "sweep"))
        try:
            await self._engine.lead(leadership, store, loaded)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _end_when_deposed(self, leadership: Leadership) -> None:
        """End the term when its key is gone: another driver may lead, and the nodes stay here."""
        await leadership.deposed(OBSERVE_INTERVAL_S)
        _log.warning(
            "the leader key is gone or another driver's, though the lease is valid: the term ends"
        )
        await leadership.lease.close()

    async def _observe(self) -> None:
        """While another driver leads, keep its address and send the agents to it."""
        looks = Periodic(OBSERVE_INTERVAL_S)
        while True:
            if self._engine.term is not None:
                self.etcd_answers = True
            else:
                await self._look_up()
                if self.etcd_answers:
                    self._heard_s = self._clock()
            if self.etcd_answers:
                self._answered_s = self._clock()
            elif self._clock() - self._answered_s > CUT_OFF_S and self._engine.links.all():
                _log.warning("no term and no etcd: the links to the nodes are closed")
                self._engine.links.close_all()
            await looks.wait()

    async def _look_up(self) -> None:
        try:
            holder = await self._client.get(LEADER_KEY)
            if holder is not None and is_gone(holder.value):
                # The campaign watches the key, so it continues at once instead of at the end of the
                # lease.
                await clear_dead_leader(self._client)
                holder = None
            self.etcd_answers = True
        except EtcdError as error:
            self.etcd_answers = False
            self._etcd_error = error
            return
        address = _address_of(holder.value) if holder is not None else ""
        if address == self._engine.address and self.beginning is None:
            address = ""  # the key of its own earlier term, which etcd cannot delete now
        if self._engine.term is None:
            self.known_address = address
            if address and address != self._engine.address:
                self.superseded.set()
                self._engine.links.close_all()


def words_of(error: EtcdError) -> str:
    """The message of etcd without the call and the code: ``mvcc: database space exceeded``.

    Without one, what our client has observed.
    """
    text = str(error)
    return own_words(error) or text.partition(": ")[2] or text


def _address_of(value: bytes) -> str:
    """The leader's address, from the value of its key; empty if that has another format."""
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    return str(found.get("address", "")) if isinstance(found, dict) else ""
