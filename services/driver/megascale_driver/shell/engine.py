"""The one task that owns the state: events in, ``core.step``, commit, then commands and effects.

Nothing leaves the driver before the decision behind it is committed to etcd. While a commit waits
for etcd, events queue up, each with the time at which it happened. When the leadership is lost, the
decisions that are not committed are dropped, and the next term makes them again from what the nodes
report.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from megascale.v1 import types_pb2
from megascale_common.etcd.election import Leadership
from megascale_common.service import logs, tasks
from megascale_common.service.clock import Clock
from megascale_common.service.errors import NotLeaderError
from megascale_driver.analysis.divergence import DivergenceTrack, found, observe
from megascale_driver.core.signs import hang
from megascale_driver.core.values import bounds
from megascale_driver.core.values.cluster import AttemptPhase, Cluster
from megascale_driver.core.values.events import (
    Audit,
    CheckGroup,
    Event,
    LeaderStarted,
    LossDiverged,
    MessageRefused,
    NodeHello,
    NodeReport,
    OpenAttempt,
    OpenFailed,
    Outcome,
    PagesRead,
    Probe,
    ProbeResult,
    RankPages,
    StreamReset,
    Tick,
)
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.audit_log import canonical
from megascale_driver.journal.rows import Batch
from megascale_driver.journal.store import Loaded, Store
from megascale_driver.nodes import probes
from megascale_driver.nodes.node_calls import NodeCalls
from megascale_driver.nodes.open_links import Link, OpenLinks
from megascale_driver.nodes.orders import OrderSender
from megascale_driver.presence.arrival import Arrival
from megascale_driver.presence.inbox import StepLanes
from megascale_driver.presence.intake import Intake, pages_of
from megascale_driver.presence.lane import News
from megascale_driver.shell.decisions import Publisher, beside, decide, gathered
from megascale_driver.shell.loop import LoopTurns
from megascale_driver.shell.requests import Entry, Requests
from megascale_driver.wire import messages as wire

LOOP_BLOCKED_S = 1.0  # beyond, the driver itself stood still: silence of nodes is no evidence
BATCH_EVENTS = 256  # decided on in one commit
# Links that are introduced to a new term with what they said last, before other tasks get a turn.
LINKS_AT_ONCE = 64
# Status pages of an attempt that stands still are read so often, or less if it has many nodes.
PAGES_INTERVAL_S = 1.0
PAGES_NODES_PER_S = 300.0

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
        # Whether the state was ever read from etcd: from then on clients may read it, also while no
        # driver leads.
        self.loaded = False
        self._publisher = Publisher(clock)
        self.audit = self._publisher.audit
        self.feeds = self._publisher.feeds
        self.observers = self._publisher.observers
        self.node_calls = NodeCalls(token, clock)
        self.node_calls.compared = self.post
        self.links = OpenLinks()
        self.turns = LoopTurns()  # of messages of nodes
        self.orders = OrderSender(self.links)
        self.requests = Requests()
        self._retimed = asyncio.Event()  # what the next tick waits for may have changed
        self.presence = Intake(policy)
        # Whose messages were refused in this term; one line each: they come by the step or beat.
        self._refused: set[str] = set()
        self._steps = StepLanes()
        self._tick_waits = False  # for the core
        self._pages_at_s: dict[str, float] = {}  # when those of a job were read
        self._tracks: dict[str, DivergenceTrack] = {}
        self._prober = probes.Prober(token, self._probed)
        self.term_ended_s = 0.0  # the newest one of this process; what it knows is from then
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, event: Event) -> None:
        """Queue an event; dropped without a leadership, since a term starts from the open links."""
        if self.term is None:
            return
        node: str = getattr(event, "node", "")
        if isinstance(event, NodeReport):
            if self._steps and event.report.phase in _ENDS:
                # The steps that the attempt has completed belong before its end. Silence does not:
                # only a tick at its time knows whether the loop stood still.
                self.requests.put(self._tick_of(event.now_s, False, silence=False))
            self.requests.put_report(event, node)
        else:
            self.requests.put(event, node)

    def opened(self, link: Link) -> None:
        """A node has opened its link."""
        now_s = self.clock.now_s()
        self.presence.lane.opened(now_s, link.node, link.incarnation)
        self.post(NodeHello(now_s, link.node, link.identity))

    def closed(self, link: Link) -> None:
        """A node's link broke."""
        self.presence.lane.closed(link.node, link.incarnation)
        self.post(StreamReset(self.clock.now_s(), link.node, link.incarnation))

    def heard(self, link: Link, beat: Arrival | None, now_s: float) -> None:
        """A heartbeat has arrived on a link (None: one that cannot be used); most end here."""
        if self.links.get(link.node) is not link:
            return  # the node has dialled again meanwhile
        news = self.presence.take(link, beat, now_s)
        if news is not News.NONE and self.term is not None:
            self._report(link, news, self.term.epoch, now_s, beat)

    def _report(
        self,
        link: Link,
        news: News,
        epoch: types_pb2.Epoch,
        now_s: float,
        newest: Arrival | None = None,
    ) -> None:
        """Queue the newest heartbeat of a link for the core, ``newest`` if it has just arrived."""
        try:
            event = self.presence.report(link, epoch, now_s, newest)
        except ValueError as error:
            self._refuse_message(f"nodes/{link.node}", str(error))
            return
        if event is None:
            return
        if event.report.checks:
            event = self.node_calls.beside_the_fleet(event, lambda: link.beat, self.state)
        if news is News.DECIDES:
            self.post(event)
            return
        if not self.requests.put_progress(event, link.node, event.report.job):
            self.presence.lane.forget(link.node)  # a later heartbeat brings it again
        # Progress waits for the next tick or another event: a fleet's comes in few decisions.
        self._retimed.set()

    def _refuse_message(self, subject: str, problem: str) -> None:
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
        known = self.state.jobs.get(job)
        if known is not None and (problem := bounds.record(known, record.attempt, record.step)):
            self._refuse_message(f"jobs/{job}", problem)
            return False
        if not self.feeds.of(job).add_step(record):
            return False
        held_s = record.snapshot_time.ToNanoseconds() / 1e9
        self._steps.add(job, record.attempt, record.step, held_s)
        self._retimed.set()
        self._watch_loss(job, record)
        for observer in self.observers:
            observer.step(job, record)
        return True

    def _watch_loss(self, name: str, record: types_pb2.StepRecord) -> None:
        """Post the divergence that the records of a job show, if one does."""
        job = self.state.jobs.get(name)
        if job is None:
            return
        track = self._tracks.get(name, DivergenceTrack())
        track = self._tracks[name] = observe(track, wire.step_sample(record), job.config)
        if (diverged := found(track, job.config)) is not None:
            self.post(LossDiverged(self.clock.now_s(), name, diverged))

    async def adopt(self, leadership: Leadership, loaded: Loaded) -> None:
        """Take over the logs and jobs of the term that :meth:`lead` is about to begin."""
        for step in await self._publisher.adopt(loaded, _epoch(leadership, loaded)):
            self._steps.add(*step)

    async def lead(self, leadership: Leadership, store: Store, loaded: Loaded) -> None:
        """Lead until the lease is lost or a commit is refused; :meth:`adopt` comes before.

        Raises:
            NotLeaderError, EtcdError: why the term ended.
        """
        epoch = _epoch(leadership, loaded)
        self._begin(Term(leadership, store, epoch, self.clock.now_s()), loaded)
        ticker = tasks.essential(self._tick(), "ticks")
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
        # First the start of the term, then for each open link the node's hello and its newest
        # heartbeat. One from before this epoch counts as a report without a desired state.
        self.requests.clear()
        self.orders.clear()
        self._refused.clear()
        self._tick_waits = False
        self.requests.put(LeaderStarted(term.since_s, self.address))
        lane, links = self.presence.lane, self.links.all()
        lane.begin(term.since_s, loaded.cluster.nodes)
        for at, link in enumerate(links):
            lane.opened(term.since_s, link.node, link.incarnation)
            self.requests.put(NodeHello(term.since_s, link.node, link.identity), link.node)
            if at < LINKS_AT_ONCE:
                self._report(link, News.DECIDES, term.epoch, term.since_s)
        if len(links) > LINKS_AT_ONCE:
            self._spawn(self._report_again(term, links[LINKS_AT_ONCE:]))

    async def _report_again(self, term: Term, links: list[Link]) -> None:
        """Queue the newest heartbeats of links that were there before the term."""
        for first in range(0, len(links), LINKS_AT_ONCE):
            await asyncio.sleep(0)
            if self.term is not term:
                return
            for link in links[first : first + LINKS_AT_ONCE]:
                if self.links.get(link.node) is link:
                    self._report(link, News.DECIDES, term.epoch, self.clock.now_s())

    async def _turn(self, store: Store, leadership: Leadership) -> None:
        """Wait for events, decide on a batch of them, commit, then let out what follows."""
        if not self.requests:
            await self.requests.wait()
            if leadership.lease.lost.is_set():
                return
        old = self.state
        await gathered(len(old.nodes))
        batch = self.requests.take(BATCH_EVENTS)
        self._tick_waits &= not any(isinstance(entry.event, Tick) for entry in batch)
        # self.state stays the committed one until the commit is confirmed: a request that is
        # answered meanwhile, and a term that ends here, see nothing that may never have been.
        outcomes: list[tuple[Entry, Outcome]] = []

        def work() -> tuple[Cluster, list[Outcome | Exception], tuple[Audit, ...], Batch]:
            state, found = decide(old, (entry.event for entry in batch), self.policy)
            audit = canonical(line for each in found for line in getattr(each, "audit", ()))
            return state, found, audit, store.between(old, state, audit)

        try:
            state, found, audit, changes = await beside(len(old.nodes), work)
            for entry, outcome in zip(batch, found, strict=True):
                if isinstance(outcome, Outcome):
                    outcomes.append((entry, outcome))
                else:
                    entry.fail(outcome)
            await self._commit(store, leadership, changes)
            self.state = state
            self._retimed.set()
            await self._publish(old, outcomes, audit)
        except BaseException:
            for entry in batch:
                entry.refuse()
            raise

    async def _wake_when(self, lost: asyncio.Event) -> None:
        """End the wait for events when the lease is lost; one task a term, not two a decision."""
        await lost.wait()
        self.requests.wake()

    async def _commit(self, store: Store, leadership: Leadership, batch: Batch) -> None:
        """Commit within the lease.

        Whether a write that is still open when the lease ends was applied is unknown, and need not
        be known. It compares the create revision of this term's leader key, so it cannot be applied
        once the next leader's key exists, and that leader reads etcd only then.
        """
        if not batch.changes:
            # As of most heartbeats that the core sees: that needs no tasks, but others get a turn.
            await asyncio.sleep(0)
            return
        deadline_s = max(leadership.lease.remaining_s(), 0.1)
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
        """Let out what is committed: commands and effects, audit log and watchers, answers."""
        assert self.term is not None
        self.orders.add(name for _, outcome in outcomes for name in outcome.commanded)
        for _, outcome in outcomes:
            for effect in outcome.effects:
                if isinstance(effect, Probe):
                    self._prober.order(effect)
                else:
                    self._spawn(self._perform(effect))
        await self._publisher.committed(old, self.state, audit, self.term.epoch)
        for name in list(self._tracks):
            if (job := self.state.jobs.get(name)) is None or job.terminal:
                del self._tracks[name]
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
            if isinstance(effect, OpenAttempt):
                text = f"{type(error).__name__}: {error}"
                self.post(OpenFailed(self.clock.now_s(), effect.job, effect.attempt, text))

    async def _tick(self) -> None:
        """Give the core the time, four times a second; detect a blocked event loop."""
        last_s = self.clock.now_s()
        while True:
            due_s = await self._until_due(last_s)
            last_s = now_s = self.clock.now_s()
            # Messages that wait for their turn are no silence either.
            behind_s = max(now_s - due_s, self.turns.waited_s())
            blocked = behind_s > LOOP_BLOCKED_S
            if blocked:
                _log.warning(
                    "the driver is behind; silence of nodes is ignored for a while",
                    seconds=behind_s,
                )
            if blocked or not self._tick_waits:
                self._tick_waits = True
                self.post(self._tick_of(now_s, blocked))
            self._read_pages(now_s)

    async def _until_due(self, last_s: float) -> float:
        """Wait until the tick after ``last_s`` is due; when that was."""
        pace = self.presence.pace
        while True:
            now_s = self.clock.now_s()
            due_s = pace.next_tick_s(last_s, now_s, self.state, bool(self._steps or self.requests))
            if not pace.skips:
                await asyncio.sleep(max(0.0, due_s - now_s))
                return due_s
            self._retimed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - now_s if due_s < math.inf else None):
                    await self._retimed.wait()
                    continue  # something may be due earlier now
            return due_s

    def _tick_of(self, now_s: float, blocked: bool, *, silence: bool = True) -> Tick:
        lanes = self._steps.take()
        records = {
            job: wire.record_values(record)
            for job in lanes
            if (record := self.feeds.record_of(job)) is not None
        }
        return Tick(
            now_s,
            tuple((job, lane.attempt, lane.step) for job, lane in lanes.items()),
            blocked,
            records,
            {job: lane.held_s for job, lane in lanes.items()},
            self.presence.lane.due(now_s, self.state.nodes) if silence else (),
        )

    def _read_pages(self, now_s: float) -> None:
        """Read the status pages of attempts that stand still: they are in no event."""
        for job in self.state.jobs.values():
            every_s = max(PAGES_INTERVAL_S, len(job.slots) / PAGES_NODES_PER_S)
            if now_s - self._pages_at_s.get(job.name, 0.0) < every_s:
                continue
            if hang.stands_still(job, now_s, self.policy):
                self._pages_at_s[job.name] = now_s
                self._spawn(self._post_pages(job))

    async def _post_pages(self, job: Job) -> None:
        pages = await self.status_pages(job)
        self.post(PagesRead(self.clock.now_s(), job.name, job.attempt, tuple(pages)))

    async def status_pages(self, job: Job) -> list[RankPages]:
        """The status pages of a job's ranks by the newest heartbeats of its nodes."""
        links = [link for slot in job.slots if (link := self.links.get(slot.node)) is not None]
        return await pages_of(links, job.name, job.attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.single(work, "effect")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _epoch(leadership: Leadership, loaded: Loaded) -> types_pb2.Epoch:
    return types_pb2.Epoch(
        cluster_generation=loaded.generation, create_revision=leadership.create_revision
    )
