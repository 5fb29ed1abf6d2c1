"""The presence lane between a test's events and the core, as the shell has it.

A test feeds every heartbeat as a NodeReport; silence and the status pages of attempts that stand
still reach the core as they do in a driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megascale.v1 import link_pb2
from megascale_driver.core.signs import hang
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import (
    Event,
    LeaderStarted,
    NodeHello,
    NodeReport,
    PagesRead,
    RankPages,
    StreamReset,
    Tick,
)
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence.arrival import Arrival, parsed
from megascale_driver.presence.lane import Lane


def arrived(beat: link_pb2.Heartbeat) -> Arrival:
    """A heartbeat as its stream brings it."""
    found = parsed(link_pb2.ConnectRequest(heartbeat=beat).SerializeToString())
    assert found is not None
    return found


class Presence:
    """Turns a test's events into those that the core gets."""

    def __init__(self, policy: Policy) -> None:
        self.lane = Lane(policy)
        self._policy = policy
        self._incarnations: dict[str, str] = {}
        self._pages: dict[str, tuple[str, int, RankPages]] = {}

    def events(self, event: Event, state: Cluster) -> Iterator[Event]:
        """What the core gets for ``event``."""
        if isinstance(event, LeaderStarted):
            self.lane.begin(event.now_s, state.nodes)
        elif isinstance(event, NodeHello):
            self._incarnations[event.node] = event.identity.incarnation
            self.lane.opened(event.now_s, event.node, event.identity.incarnation)
        elif isinstance(event, StreamReset):
            self.lane.closed(event.node, event.incarnation)
        elif isinstance(event, NodeReport):
            self._heard(event)
        if not isinstance(event, Tick):
            yield event
            return
        yield replace(event, silent=self.lane.due(event.now_s, state.nodes))
        for job in state.jobs.values():
            if hang.is_stalled(job, event.now_s, self._policy):
                known = (self._pages.get(slot.node) for slot in job.slots)
                pages = tuple(
                    found[2] for found in known if found and found[:2] == (job.name, job.attempt)
                )
                yield PagesRead(event.now_s, job.name, job.attempt, pages)

    def _heard(self, event: NodeReport) -> None:
        if self._incarnations.get(event.node) == event.incarnation:
            self.lane.beat(event.now_s, event.node, object())
            report = event.report
            pages = RankPages(event.node, event.incarnation, event.now_s, report.statuses)
            self._pages[event.node] = (report.job, report.attempt, pages)
