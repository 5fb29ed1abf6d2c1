"""The task that owns the state: events in, ``core.step``, commit, then commands and effects.

Nothing leaves the driver before the decision behind it is committed to etcd. While a commit waits
for etcd, events queue up, each with the time at which it happened. When the leadership is lost,
decisions that are not committed are dropped, and the next term makes them again from what the nodes
report.

The parts: :class:`Heartbeats` takes in what nodes report, :class:`Steps` what ranks report of their
steps, :class:`Ticks` gives the core the time, :class:`Requests` is the queue, :class:`Publisher`
distributes what is committed, and :class:`OrderSender` sends desired states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from megascale.v1 import types_pb2
from megascale_common.etcd.election import Leadership
from megascale_common.service import logs, tasks
from megascale_common.service.clock import Clock
from megascale_common.service.errors import NotLeaderError
from megascale_driver.core.values.cluster import AttemptPhase, Cluster
from megascale_driver.core.values.events import (
    Audit,
    CheckGroup,
    Event,
    LeaderStarted,
    MessageRefused,
    NodeReport,
    OpenAttempt,
    OpenFailed,
    Outcome,
    Probe,
    ProbeResult,
    Tick,
)
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.audit_log import canonical
from megascale_driver.journal.rows import Batch
from megascale_driver.journal.store import Loaded, Store
from megascale_driver.nodes import probes
from megascale_driver.nodes.node_calls import NodeCalls
from megascale_driver.nodes.open_links import OpenLinks
from megascale_driver.nodes.orders import OrderSender
from megascale_driver.presence.intake import Intake
from megascale_driver.shell.decisions import Publisher, decide, gather_events, off_loop
from megascale_driver.shell.heartbeats import Heartbeats
from megascale_driver.shell.requests import Entry, Requests
from megascale_driver.shell.ticks import Steps, Ticks

BATCH_EVENTS = 256  # events decided in one commit

_ENDS = frozenset({AttemptPhase.FAILED, AttemptPhase.FINISHED})

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership of this process, from the election to the loss of the lease."""

    leadership: Leadership
    store: Store
    epoch: types_pb2.Epoch
    since_s: float


class Engine:
    """Runs terms one after another, over the same links and feeds."""

    def __init__(self, policy: Policy, clock: Clock, token: str, address: str) -> None:
        self.policy = policy
        self.clock = clock
        self.address = address
        self.state = Cluster()
        self.term: Term | None = None
        # True once the state was read from etcd: clients can read it from then on, also while no
        # driver leads.
        self.loaded = False
        self._publisher = Publisher(clock)
        self.audit = self._publisher.audit
        self.feeds = self._publisher.feeds
        self.observers = self._publisher.observers
        self.node_calls = NodeCalls(token, clock)
        self.node_calls.compared = self.post
        self.links = OpenLinks()
        self.orders = OrderSender(self.links)
        self.requests = Requests()
        self.retimed = asyncio.Event()  # set when something may be due before the next tick
        self.presence = Intake(policy)
        self.heartbeats = Heartbeats(self)
        self.steps = Steps(self)
        self.ticks = Ticks(self, self.steps, self.heartbeats)
        # Subjects of messages refused in this term. One line each: such messages come with every
        # step or heartbeat.
        self._refused: set[str] = set()
        self._prober = probes.Prober(token, self._probed)
        self.term_ended_s = 0.0  # end of the newest term; what this process knows is from then
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> types_pb2.Epoch | None:
        """The epoch of the term; None without one."""
        return self.term.epoch if self.term is not None else None

    def post(self, event: Event) -> None:
        """Queue an event; dropped without a leadership, since a term begins from the open links."""
        if self.term is None:
            return
        node: str = getattr(event, "node", "")
        if isinstance(event, NodeReport):
            if self.steps and event.report.phase in _ENDS:
                # The completed steps of the attempt come before its end. Silence does not: only a
                # regular tick knows whether the loop was blocked.
                self.requests.put(self.steps.tick(event.now_s, False, silence=False))
            self.requests.put_report(event, node)
        else:
            self.requests.put(event, node)

    def refuse_message(self, subject: str, problem: str) -> None:
        """Report a message of a node that cannot be used, once in a term for each subject."""
        if subject not in self._refused:
            self._refused.add(subject)
            self.post(MessageRefused(self.clock.now_s(), subject, problem))

    async def call(self, event: Event) -> Outcome:
        """Queue a request and wait until it is committed.

        Raises:
            NotLeaderError: this driver does not lead, or the leadership ended before the commit.
            TimeoutError: etcd did not confirm the commit in time; it may still happen.
        """
        if self.term is None:
            raise NotLeaderError("this driver does not lead")
        return await self.requests.call(event)

    def step_done(self, job: str, record: types_pb2.StepRecord) -> bool:
        """Take in a step record; False if it was known, or cannot be true."""
        if not self.steps.done(job, record):
            return False
        for observer in self.observers:
            observer.step(job, record)
        return True

    async def adopt(self, leadership: Leadership, loaded: Loaded) -> None:
        """Take over the logs and jobs of the term that :meth:`lead` is about to begin."""
        for step in await self._publisher.adopt(loaded, _epoch(leadership, loaded)):
            self.steps.add(*step)

    async def lead(self, leadership: Leadership, store: Store, loaded: Loaded) -> None:
        """Lead until the lease is lost or a commit is refused; :meth:`adopt` comes before.

        Raises:
            NotLeaderError, EtcdError: why the term ended.
        """
        epoch = _epoch(leadership, loaded)
        self._begin(Term(leadership, store, epoch, self.clock.now_s()), loaded)
        ticker = tasks.essential(self.ticks.run(), "ticks")
        sender = tasks.essential(self.orders.run(epoch, lambda: self.state), "orders")
        lost = tasks.essential(self._wake_when(leadership.lease.lost), "lease")
        try:
            while not leadership.lease.lost.is_set():
                await self._turn(store, leadership)
            raise NotLeaderError(f"the lease was lost: {leadership.lease.lost_reason}")
        finally:
            self.term = None
            self.term_ended_s = self.clock.now_s()
            ticker.cancel()
            sender.cancel()
            lost.cancel()
            for entry in self.requests.clear():
                entry.refuse()

    async def close(self) -> None:
        """Cancel the effects in progress."""
        self._prober.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, term: Term, loaded: Loaded) -> None:
        self.state = loaded.cluster
        self.loaded = True
        self.term = term
        # The order: start of the term, then for each open link the hello of its node and its newest
        # heartbeat. A heartbeat from before this epoch counts as a report without a desired state.
        self.requests.clear()
        self.orders.clear()
        self._refused.clear()
        self.ticks.taken()
        self.requests.put(LeaderStarted(term.since_s, self.address))
        self.heartbeats.begin(term.epoch, term.since_s)

    async def _turn(self, store: Store, leadership: Leadership) -> None:
        """Wait for events, decide a batch of them, commit, then publish what follows."""
        if not self.requests:
            await self.requests.wait()
            if leadership.lease.lost.is_set():
                return
        old = self.state
        await gather_events(len(old.nodes))
        batch = self.requests.take(BATCH_EVENTS)
        if any(isinstance(entry.event, Tick) for entry in batch):
            self.ticks.taken()
        # self.state stays the committed one until the commit is confirmed, so that requests
        # answered meanwhile, and a term that ends here, see nothing that may never take effect.
        outcomes: list[tuple[Entry, Outcome]] = []

        def work() -> tuple[Cluster, list[Outcome | Exception], tuple[Audit, ...], Batch]:
            state, found = decide(old, (entry.event for entry in batch), self.policy)
            audit = canonical(line for each in found for line in getattr(each, "audit", ()))
            return state, found, audit, store.between(old, state, audit)

        try:
            state, found, audit, changes = await off_loop(len(old.nodes), work)
            for entry, outcome in zip(batch, found, strict=True):
                if isinstance(outcome, Outcome):
                    outcomes.append((entry, outcome))
                else:
                    entry.fail(outcome)
            # Callers are answered only after this: until etcd has confirmed, the decision may never
            # happen.
            await self._commit(store, leadership, changes)
            self.state = state
            self.retimed.set()
            await self._publish(old, outcomes, audit)
        except BaseException:
            # The term ends with any error here. Entries that were answered already ignore the
            # refusal.
            for entry in batch:
                entry.refuse()
            raise

    async def _wake_when(self, lost: asyncio.Event) -> None:
        """End the wait for events when the lease is lost; one task a term, not two a decision."""
        await lost.wait()
        self.requests.wake()

    async def _commit(self, store: Store, leadership: Leadership, batch: Batch) -> None:
        """Commit within the lease.

        It is unknown, and need not be known, whether a write that is still open at the end of the
        lease was applied: it cannot be applied once the next leader's key exists, and that leader
        reads etcd only then (Note [Fencing] in :mod:`megascale_driver.journal.fenced`).
        """
        if not batch.changes:
            # Most reports change nothing that is stored: skip the write, but yield to other tasks.
            await asyncio.sleep(0)
            return
        deadline_s = max(leadership.lease.remaining_s(), 0.1)
        # Both are awaited, since a lost lease must end the wait for an etcd that does not answer.
        work = asyncio.ensure_future(store.write(batch, deadline_s))
        lost = asyncio.ensure_future(leadership.lease.lost.wait())
        try:
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            if leadership.lease.lost.is_set():
                raise NotLeaderError("the lease was lost during a commit")
            await work
        finally:
            work.cancel()
            lost.cancel()

    async def _publish(
        self, old: Cluster, outcomes: list[tuple[Entry, Outcome]], audit: tuple[Audit, ...]
    ) -> None:
        """Publish what is committed: commands and effects, audit log and watchers, answers."""
        assert self.term is not None
        # Commands go first: nodes wait for them, and publishing a mass event takes a while.
        self.orders.add(name for _, outcome in outcomes for name in outcome.commanded)
        for _, outcome in outcomes:
            for effect in outcome.effects:
                if isinstance(effect, Probe):
                    self._prober.order(effect)
                else:
                    self.spawn(self._perform(effect))
        await self._publisher.committed(old, self.state, audit, self.term.epoch)
        self.steps.forget_ended()
        for entry, outcome in outcomes:
            entry.succeed(outcome)

    def _probed(self, probe: Probe, found: probes.Probed) -> None:
        self.post(
            ProbeResult(
                self.clock.now_s(),
                probe.node,
                probe.incarnation,
                found.outcome,
                found.job,
                found.attempt,
                found.phase,
            )
        )

    async def _perform(self, effect: OpenAttempt | CheckGroup) -> None:
        term = self.term
        if term is None:
            return
        try:
            if isinstance(effect, CheckGroup):
                self.post(await self.node_calls.check_group(effect))
            else:
                slots, node = self.state.jobs[effect.job].slots, self.state.nodes[effect.node]
                self.post(await self.node_calls.open_attempt(effect, slots, node, term.epoch))
        except Exception as error:
            _log.exception(
                "an effect failed; the core orders it again", effect=type(effect).__name__
            )
            # The core waits for the answer to an OpenAttempt. A group check without one runs into
            # its own time limit.
            if isinstance(effect, OpenAttempt):
                text = f"{type(error).__name__}: {error}"
                self.post(OpenFailed(self.clock.now_s(), effect.job, effect.attempt, text))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work until it ends or the driver does."""
        task = tasks.single(work, "effect")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _epoch(leadership: Leadership, loaded: Loaded) -> types_pb2.Epoch:
    return types_pb2.Epoch(
        cluster_generation=loaded.generation, create_revision=leadership.create_revision
    )
