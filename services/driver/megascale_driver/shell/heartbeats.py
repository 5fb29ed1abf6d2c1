"""The heartbeats of all links: most end here, the others become events of the core.

Note [The lane]
~~~~~~~~~~~~~~~
A fleet of ten thousand nodes sends thousands of heartbeats a second, and nearly all repeat the one
before. None of them enters the core as such: the lane (:mod:`megascale_driver.presence.lane`) notes
when each node was heard and compares what a heartbeat reports with what the core knows of its node.
The core gets an event in three cases only: a heartbeat reports something that it can decide on, one
shows progress that it counts, or a node has been silent for too long, which comes with a tick. So
the work of the core grows with what happens in the fleet, not with its size, and a heartbeat is
acknowledged before anything is decided about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from megascale.v1 import types_pb2
from megascale_common.service.clock import Clock
from megascale_driver.core.signs import hang
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Event, NodeHello, PagesRead, RankPages, StreamReset
from megascale_driver.core.values.job import Job
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.node_calls import NodeCalls
from megascale_driver.nodes.open_links import Link, OpenLinks
from megascale_driver.presence.arrival import Arrival
from megascale_driver.presence.intake import Intake, pages_of
from megascale_driver.presence.lane import News
from megascale_driver.shell.feeds import JobFeeds
from megascale_driver.shell.loop import LoopTurns
from megascale_driver.shell.requests import Requests

# Links that are introduced to a new term with their newest heartbeat, before other tasks get a
# turn.
LINKS_AT_ONCE = 64
# Interval at which the status pages of a stalled attempt are read; longer if the attempt has more
# nodes than are read in that time.
PAGES_INTERVAL_S = 1.0
PAGES_NODES_PER_S = 300.0


class Core(Protocol):
    """The engine as its parts see it: the queue for their events, and the state to look up."""

    policy: Policy
    clock: Clock
    state: Cluster
    feeds: JobFeeds
    links: OpenLinks
    node_calls: NodeCalls
    presence: Intake
    requests: Requests
    retimed: asyncio.Event  # set when something may be due before the next tick

    @property
    def epoch(self) -> types_pb2.Epoch | None:
        """The epoch of the term; None without one."""

    def post(self, event: Event) -> None:
        """Queue an event for the core."""

    def refuse_message(self, subject: str, problem: str) -> None:
        """Report a message of a node that cannot be used."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work until it ends or the driver does."""


class Heartbeats:
    """Takes in heartbeats, and the begin and end of the links that bring them."""

    def __init__(self, core: Core) -> None:
        self.turns = LoopTurns()
        self._core = core
        self._pages_at_s: dict[str, float] = {}  # when the status pages of each job were read

    def begin(self, epoch: types_pb2.Epoch, since_s: float) -> None:
        """A term begins: the core gets the hello and the newest heartbeat of every open link."""
        core = self._core
        lane = core.presence.lane
        links = core.links.all()
        lane.begin(since_s, core.state.nodes)
        for at, link in enumerate(links):
            lane.opened(since_s, link.node, link.incarnation)
            core.requests.put(NodeHello(since_s, link.node, link.identity), link.node)
            # Every hello is queued now, because a report before it would be ignored. The reports of
            # ten thousand links would block the loop, so most come later.
            if at < LINKS_AT_ONCE:
                self._report(link, News.DECIDES, epoch, since_s)
        if len(links) > LINKS_AT_ONCE:
            core.spawn(self._report_again(epoch, links[LINKS_AT_ONCE:]))

    def opened(self, link: Link) -> None:
        """A node has opened its link."""
        now_s = self._core.clock.now_s()
        self._core.presence.lane.opened(now_s, link.node, link.incarnation)
        self._core.post(NodeHello(now_s, link.node, link.identity))

    def closed(self, link: Link) -> None:
        """A node's link broke."""
        self._core.presence.lane.closed(link.node, link.incarnation)
        self._core.post(StreamReset(self._core.clock.now_s(), link.node, link.incarnation))

    def heard(self, link: Link, beat: Arrival | None, now_s: float) -> None:
        """Take in a heartbeat that arrived on a link; None: an unusable one."""
        if self._core.links.get(link.node) is not link:
            return  # the node has opened another link meanwhile
        news = self._core.presence.take(link, beat, now_s)
        if news is not News.NONE and (epoch := self._core.epoch) is not None:
            self._report(link, news, epoch, now_s, beat)

    def _report(
        self,
        link: Link,
        news: News,
        epoch: types_pb2.Epoch,
        now_s: float,
        newest: Arrival | None = None,
    ) -> None:
        """Queue the newest heartbeat of a link for the core, ``newest`` if it has just arrived."""
        core = self._core
        try:
            event = core.presence.report(link, epoch, now_s, newest)
        except ValueError as error:
            core.refuse_message(f"nodes/{link.node}", str(error))
            return
        if event is None:
            return
        # Figures are compared here, with the fleet in memory: the core only gets the verdicts.
        if event.report.checks:
            event = core.node_calls.compared_with_fleet(event, lambda: link.beat, core.state)
        if news is News.DECIDES:
            core.post(event)
            return
        if not core.requests.put_progress(event, link.node, event.report.job):
            core.presence.lane.forget(link.node)  # a later heartbeat brings it again
        # Progress waits for the next tick or another event, so that a fleet's progress takes few
        # decisions.
        core.retimed.set()

    async def _report_again(self, epoch: types_pb2.Epoch, links: list[Link]) -> None:
        """Queue the newest heartbeats of links that are older than the term."""
        for first in range(0, len(links), LINKS_AT_ONCE):
            await asyncio.sleep(0)
            if self._core.epoch is not epoch:
                return
            for link in links[first : first + LINKS_AT_ONCE]:
                if self._core.links.get(link.node) is link:
                    self._report(link, News.DECIDES, epoch, self._core.clock.now_s())

    def read_pages(self, now_s: float) -> None:
        """Read the status pages of stalled attempts: no event has them."""
        for job in self._core.state.jobs.values():
            every_s = max(PAGES_INTERVAL_S, len(job.slots) / PAGES_NODES_PER_S)
            if now_s - self._pages_at_s.get(job.name, 0.0) < every_s:
                continue
            if hang.is_stalled(job, now_s, self._core.policy):
                self._pages_at_s[job.name] = now_s
                self._core.spawn(self._post_pages(job))

    async def _post_pages(self, job: Job) -> None:
        pages = tuple(await self.status_pages(job))
        self._core.post(PagesRead(self._core.clock.now_s(), job.name, job.attempt, pages))

    async def status_pages(self, job: Job) -> list[RankPages]:
        """The status pages of a job's ranks from the newest heartbeats of its nodes."""
        held = self._core.links
        links = [link for slot in job.slots if (link := held.get(slot.node)) is not None]
        return await pages_of(links, job.name, job.attempt)
