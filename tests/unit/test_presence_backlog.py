"""A driver that is behind with reading heartbeats does not take its nodes for silent."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.harness.presence import arrived

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.clock import VirtualClock
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import Cluster, Device, Identity, Liveness
from megascale_driver.core.values.policy import Policy
from megascale_driver.nodes.open_links import Link
from megascale_driver.presence.lane import MAX_BEHIND_S, SAMPLES_PER_S, WINDOW_S, Backlog
from megascale_driver.shell.engine import Engine, Term

TICK_S = 0.25
NODES = 40
NS = 1_000_000_000


class Driver:
    """An engine whose heartbeats come as late as the test says; nothing is stored."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = Engine(Policy(), self.clock, "token", "here")
        nothing = cast(Any, None)
        self.began_s = self.clock.now_s()
        epoch = types_pb2.Epoch(create_revision=1)
        self.engine.term = Term(nothing, nothing, epoch, self.began_s)
        self.state = Cluster()
        self.suspected: set[str] = set()
        self.dead_at_s: dict[str, float] = {}
        self._waiting: list[tuple[float, float, str]] = []  # (read at, sent at, node)
        self._acked: dict[str, tuple[float, float]] = {}  # (received, sent back) of the newest
        self._links = {}
        for number in range(NODES):
            name = f"n{number}"
            identity = Identity(f"{name}-1", devices=(Device(0, "cpu"),))
            self._links[name] = Link(name, identity, self.began_s)
            self.engine.links.add(self._links[name])
            self.engine.heartbeats.opened(self._links[name])

    def run(self, seconds: float, delay_s: Any, gone: frozenset[str] = frozenset()) -> None:
        """Nodes beat every 5 s; a heartbeat sent at second t is read ``delay_s(t)`` later."""
        since_s = self.clock.now_s()
        until_s, step = since_s + seconds, 0
        while self.clock.now_s() < until_s:
            for number, name in enumerate(self._links):
                if name not in gone and (step - number) % 20 == 0:
                    sent_s = self.clock.now_s()
                    read_s = sent_s + delay_s(sent_s - since_s)
                    self._waiting.append((read_s, sent_s, name))
            self.clock.advance(TICK_S)
            step += 1
            self._read()
            self.engine.post(self.engine.steps.tick(self.clock.now_s(), blocked=False))
            self._decide()

    def _read(self) -> None:
        now_s = self.clock.now_s()
        for item in sorted(item for item in self._waiting if item[0] <= now_s):
            self._waiting.remove(item)
            _, sent_s, name = item
            beat = link_pb2.Heartbeat(seq=1, phase=link_pb2.ATTEMPT_PHASE_IDLE)
            beat.sent_at.FromNanoseconds(int(sent_s * NS))
            if name in self._acked:
                received_s, answered_s = self._acked[name]
                beat.ack_driver_received_at.FromNanoseconds(int(received_s * 1e9))
                beat.ack_driver_sent_at.FromNanoseconds(int(received_s * 1e9))
                beat.ack_received_at.FromNanoseconds(int(answered_s * NS))
            self._acked[name] = now_s, now_s + 0.001
            self.engine.heartbeats.heard(self._links[name], arrived(beat), now_s)

    def _decide(self) -> None:
        for entry in self.engine.requests.clear():
            self.state, _ = machine.step(self.state, entry.event, self.engine.policy)
        self.engine.state = self.state
        for name, node in self.state.nodes.items():
            if node.liveness is Liveness.SUSPECT:
                self.suspected.add(name)
            if node.liveness is Liveness.DEAD:
                self.dead_at_s.setdefault(name, self.clock.now_s())


def test_nodes_whose_heartbeats_wait_unread_are_not_suspected() -> None:
    driver = Driver()
    driver.run(40.0, lambda at_s: 0.01)
    # From now on reading takes twice as long as there is time for, up to 12 s behind.
    driver.run(60.0, lambda at_s: min(12.0, at_s))
    assert not driver.suspected and not driver.dead_at_s


def test_a_node_that_is_gone_is_still_declared_dead_when_all_others_are_late() -> None:
    driver = Driver()
    driver.run(40.0, lambda at_s: 0.01)
    driver.run(40.0, lambda at_s: min(12.0, at_s))
    gone_s = driver.clock.now_s()
    limit_s = Policy().dead_uncorroborated_after_s + MAX_BEHIND_S + 5.0
    driver.run(limit_s + 5.0, lambda at_s: 12.0, gone=frozenset({"n7"}))
    assert set(driver.dead_at_s) == {"n7"} == driver.suspected
    assert driver.dead_at_s["n7"] - gone_s < limit_s


def test_deadlines_move_by_no_more_than_the_bound() -> None:
    backlog = Backlog()
    for second in range(20):
        backlog.note(1000.0 + second / 4, 500.0)
    assert backlog.behind_s(1005.0) == MAX_BEHIND_S
    assert backlog.behind_s(1005.0 + WINDOW_S) == 0.0, "what was long ago says nothing"


def test_one_clock_that_was_set_says_nothing_about_the_others() -> None:
    backlog = Backlog()
    for second in range(20):
        backlog.note(1000.0 + second / 4, 3600.0 if second % 5 == 0 else 0.02)
    assert backlog.behind_s(1005.0) == pytest.approx(0.02)
    for second in range(20):
        backlog.note(1010.0 + second / 4, -7.0)
    assert backlog.behind_s(1015.0) == 0.0
    assert backlog.next_sample_s == pytest.approx(1014.75 + 1.0 / SAMPLES_PER_S)
