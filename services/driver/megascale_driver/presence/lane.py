"""Presence of nodes: who sends heartbeats, who is silent, and which heartbeats the core has to see.

A heartbeat costs O(1) here. It enters the core only if its evidence differs from what the core
knows of the node, or if the node was reported silent. Deadlines are in a heap and are lazy: a
heartbeat only notes its time; an entry that comes due is compared with the newest heartbeat, and
put back if the node was heard since. No I/O and no clock: the time comes with each call, and
:meth:`Lane.next_deadline_s` is the next moment at which silence alone changes anything.

Note [Silence]
~~~~~~~~~~~~~~
The lane reports a silent node when its silence reaches the limit of SUSPECT, at each further limit
of the policy, and every RECHECK_S in between, until the core has declared it DEAD or it is heard
again. If heartbeats wait before they are read, the newest one of a silent node may be waiting, too:
it counts as later by that delay (:class:`Backlog`). What follows from silence is decided by the
core (:mod:`megascale_driver.core.faults.liveness`), which also knows steps of the job, probes and
the breaker.

Note [Passing]
~~~~~~~~~~~~~~
A node reports each phase of preparing and starting, and each worker that ends while an attempt is
stopped. No decision depends on these, only on their end. Such evidence enters the core only if the
next heartbeat still reports it. Most are over by then, so the start of an attempt costs the core
two reports per node, not four.
"""

from __future__ import annotations

import enum
import heapq
import math
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from megascale_driver.core.values.cluster import Liveness, Node
from megascale_driver.core.values.events import Silence
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence.evidence import UNREAD

RECHECK_S = 1.0
FORGOTTEN_S = 3600.0
# Evidence that only a restart needs (snapshots in the memory of nodes) enters the core at most this
# many times per second over all nodes. Each node has the same share.
SLOW_PER_S = 20.0
MAX_SHARED = 10_000  # remembered facts; a forgotten one enters the core again, which is harmless


class News(enum.Enum):
    """Whether the core has to see a heartbeat: no, for its progress, or because it decides."""

    NONE = enum.auto()
    PROGRESS = enum.auto()
    DECIDES = enum.auto()


@dataclass(slots=True)
class _Presence:
    """One node in the lane; ``due_s``: its valid entry in the heap, all others are outdated."""

    incarnation: str
    last_beat_s: float
    linked: bool = False
    due_s: float = math.inf
    silent: bool = False
    assumed: bool = False
    evidence: object = None
    passing: object = None  # evidence that is news only when it is repeated
    slow: object = None
    slow_at_s: float = -math.inf

    def forget(self) -> None:
        """The core has no evidence of the node any more, so its next heartbeat is news."""
        self.evidence = None
        self.passing = None
        self.slow = None


class Lane:
    """The presence of all nodes; every method takes the time as ``now_s``, Unix seconds."""

    def __init__(self, policy: Policy) -> None:
        self._limits = (
            policy.suspect_after_s,
            policy.dead_after_s,
            policy.dead_uncorroborated_after_s,
        )
        self.backlog = Backlog()
        self._nodes: dict[str, _Presence] = {}
        self._heap: list[tuple[float, str]] = []
        # Facts that every node of a job reports and that count once, in order of arrival.
        self._shared: dict[Hashable, None] = {}
        self._reporters: dict[str, str] = {}  # the reporting node of each job
        # Changes whenever a repeated heartbeat may be news for a reason that is not its own node: a
        # forgotten fact, or a reporter that is gone.
        self.turn = 0
        self._linked = 0

    def begin(self, now_s: float, nodes: Iterable[str]) -> None:
        """A term begins with these nodes stored: each has its full time to be heard.

        The core of the new term has no evidence of any node, so the next heartbeat of each counts.
        Incarnations may have changed while another driver led: the stored ones hold until the links
        report others.
        """
        self._forget_shared()
        for name in nodes:
            self._nodes.setdefault(name, _Presence("", now_s))
        for name, found in self._nodes.items():
            found.last_beat_s = max(found.last_beat_s, now_s)
            found.silent = False
            found.forget()
            found.assumed = False
            found.incarnation = ""
            self._schedule(name, found, now_s)

    def opened(self, now_s: float, node: str, incarnation: str) -> None:
        """The node has opened its link."""
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = _Presence(incarnation, now_s)
        self._linked += not found.linked
        found.incarnation = incarnation
        found.linked = True
        found.last_beat_s = now_s
        found.silent = found.assumed = False
        found.forget()
        self._schedule(node, found, now_s)

    def closed(self, node: str, incarnation: str) -> None:
        """The node's link broke; its silence counts from its newest heartbeat."""
        found = self._nodes.get(node)
        if found is not None and found.linked and found.incarnation == incarnation:
            found.linked = False
            self._linked -= 1
            if found.assumed:
                raise ValueError(f"node {node} is assumed to be heard: doubt it before its link")
            # The core ignores unread reports of this node, so the other nodes of the job have to
            # repeat the shared facts.
            self._forget_shared()

    def beat(
        self,
        now_s: float,
        node: str,
        evidence: object,
        slow: object = None,
        shared: Iterable[Hashable] = (),
        counted: Iterable[tuple[str, Hashable]] = (),
        passing: bool = False,
    ) -> News:
        """Take in a heartbeat of the open link; returns whether the core has to see it.

        Args:
            evidence: decides at once; compared with that of the newest heartbeat seen by the core.
            slow: needed only for a restart; a change counts once per node in a while, and it can be
                UNREAD in between (:meth:`slow_due`).
            shared: facts that all nodes of a job report; only the first report of each is news.
            counted: (job, fact) of facts that all its nodes report and count: only those of one
                node of the job are news, because each node has its own counter.
            passing: evidence that no decision depends on; see Note [Passing].
        """
        found = self._nodes[node]
        found.last_beat_s = now_s
        changed = slow is not UNREAD and found.slow != slow
        slow_due = changed and now_s - found.slow_at_s >= self._linked / SLOW_PER_S
        decides = found.silent or found.evidence != evidence
        # A node that was silent, or that the core knows nothing of, is news in any phase.
        waits = passing and decides and not found.silent and found.evidence is not None
        if waits:  # the next evidence brings the snapshots in memory, too
            decides, slow_due = False, found.passing == evidence
        # Facts are remembered even if the heartbeat decides anyway, so that they are no news from
        # other nodes.
        progress = self._first(node, shared, counted) or slow_due
        found.passing = evidence if waits and not progress else None
        if not (decides or progress):
            return News.NONE
        if found.silent:
            found.silent = False
            self._schedule(node, found, now_s)
        found.evidence = evidence
        if changed:
            found.slow = slow
            found.slow_at_s = now_s
        return News.DECIDES if decides else News.PROGRESS

    def repeats(self, now_s: float, node: str, turn: int) -> bool:
        """Take in a heartbeat that equals the newest one that :meth:`beat` took.

        ``turn``: that of the lane before that heartbeat. False: it may be news all the same, and is
        not taken.
        """
        found = self._nodes[node]
        # Equal bytes are no news only while everything they were compared with is unchanged: the
        # facts of others, the knowledge of the core, the silence of the node.
        if turn != self.turn or found.evidence is None or found.silent or found.passing is not None:
            return False
        found.last_beat_s = now_s
        return True

    def slow_due(self, now_s: float, node: str) -> bool:
        """True if a change of slow evidence of the node would be news now."""
        return now_s - self._nodes[node].slow_at_s >= self._linked / SLOW_PER_S

    def alive(self, now_s: float, node: str) -> News:
        """The node was heard, with the evidence of its last heartbeat."""
        found = self._nodes[node]
        return self.beat(now_s, node, found.evidence, found.slow)

    def forget(self, node: str) -> None:
        """The core did not get the node's newest report: its next heartbeat is news again."""
        found = self._nodes.get(node)
        if found is not None:
            found.forget()
            self._forget_shared()

    def last_beat_s(self, node: str) -> float:
        """When the node was last heard; 0 if it is not known."""
        found = self._nodes.get(node)
        return found.last_beat_s if found is not None else 0.0

    def due(self, now_s: float, nodes: Mapping[str, Node]) -> tuple[Silence, ...]:
        """The nodes whose silence has to be evaluated now; ``nodes``: those of the core.

        Nodes that the core has forgotten are forgotten; DEAD ones wait for their next sign of life.
        """
        silences: list[Silence] = []
        behind_s = self.backlog.behind_s(now_s)
        while self._heap and self._heap[0][0] <= now_s:
            at_s, name = heapq.heappop(self._heap)
            found = self._nodes.get(name)
            if found is None or found.due_s != at_s:
                continue  # replaced by a later entry
            found.due_s = math.inf
            node = nodes.get(name)
            if node is None and not found.linked:
                del self._nodes[name]
                continue
            if node is not None and node.liveness is Liveness.DEAD:
                self._silenced(found)  # its next heartbeat is news
                found.due_s = now_s + FORGOTTEN_S  # by then the core may have forgotten it
                heapq.heappush(self._heap, (found.due_s, name))
                continue
            # Heartbeats of this node may be unread in a socket, for as long as those of all others.
            if now_s - found.last_beat_s - behind_s >= self._limits[0]:
                self._silenced(found)
                last_beat_s = found.last_beat_s + behind_s
                silences.append(Silence(name, found.incarnation, last_beat_s))
            self._schedule(name, found, now_s)
        # Entries are lazy, so the heap is ordered by older heartbeats.
        return tuple(sorted(silences, key=lambda item: (item.last_beat_s, item.node)))

    def next_deadline_s(self) -> float:
        """When :meth:`due` may next return a node, if none is heard before; inf for never."""
        while self._heap:
            at_s, name = self._heap[0]
            found = self._nodes.get(name)
            if found is not None and found.due_s == at_s:
                deadline_s = max(at_s, found.last_beat_s + self._limits[0])
                if deadline_s == at_s:
                    return at_s
                heapq.heappop(self._heap)
                found.due_s = deadline_s
                heapq.heappush(self._heap, (deadline_s, name))
            else:
                heapq.heappop(self._heap)
        return math.inf

    def assume(self, node: str) -> None:
        """Count the node as heard at all times from now on, until :meth:`doubt`.

        For simulations of stretches in which nothing changes: they send no heartbeat that would
        only repeat the one before (Note [Skipping] in :mod:`megascale_driver.presence.intake`).
        """
        found = self._nodes.get(node)
        if found is not None and found.linked:
            found.assumed = True
            found.due_s = math.inf

    def doubt(self, now_s: float, node: str, last_beat_s: float) -> None:
        """The node no longer counts as heard; its newest heartbeat came at ``last_beat_s``."""
        found = self._nodes.get(node)
        if found is not None and found.assumed:
            found.assumed = False
            found.last_beat_s = last_beat_s
            self._schedule(node, found, now_s)

    def _first(
        self, node: str, shared: Iterable[Hashable], counted: Iterable[tuple[str, Hashable]]
    ) -> bool:
        """Remember the facts of a heartbeat; True if one of them is new."""
        new = [fact for fact in shared if fact not in self._shared]
        new += [
            item
            for item in counted
            if self._reports_for(item[0], node) and item not in self._shared
        ]
        for fact in new:
            if len(self._shared) >= MAX_SHARED:
                del self._shared[next(iter(self._shared))]
                self.turn += 1
            self._shared[fact] = None
        return bool(new)

    def _forget_shared(self) -> None:
        self._shared.clear()
        self.turn += 1

    def _silenced(self, found: _Presence) -> None:
        """The node is silent: another one can report for its job."""
        if not found.silent:
            found.silent = True
            self.turn += 1

    def _reports_for(self, job: str, node: str) -> bool:
        """True if this node reports the counters of the job: one node does, while it is there."""
        known = self._nodes.get(self._reporters.get(job, ""))
        if known is None or not known.linked or known.silent:
            if len(self._reporters) >= MAX_SHARED:
                self._reporters.clear()
                self.turn += 1
            self._reporters[job] = node
        return self._reporters[job] == node

    def _schedule(self, name: str, found: _Presence, now_s: float) -> None:
        """Put the node's next deadline into the heap; its earlier entries become invalid."""
        if found.assumed:
            return
        silent_s = now_s - found.last_beat_s
        if silent_s < self._limits[0]:
            due_s = found.last_beat_s + self._limits[0]
        else:
            limits = (found.last_beat_s + limit for limit in self._limits)
            due_s = min([now_s + RECHECK_S, *(at_s for at_s in limits if at_s > now_s)])
        if due_s != found.due_s:
            found.due_s = due_s
            heapq.heappush(self._heap, (due_s, name))


# Backlog: how long heartbeats wait before the driver reads them.
#
# A driver with more work than its processor allows reads each heartbeat some time after it came.
# Then all nodes alike seem silent although their heartbeats are in a socket. Each heartbeat has the
# time at which it was sent, and the offset of its node's clock is known
# (:class:`megascale_driver.presence.intake.ClockOffset`), so those that arrive show how long the
# others may wait. Deadlines of silence move by that delay, but never by more than MAX_BEHIND_S. A
# driver that has not ticked for that long loses its lease, too (``SILENCE_LIMIT_S`` of
# :mod:`megascale_common.etcd.keeper_process`), and one that is further behind must not put off
# verdicts.


MAX_BEHIND_S = 15.0
SAMPLES_PER_S = 32.0  # heartbeats sampled, at most
WINDOW_S = 10.0
MIN_SAMPLES = 3  # a single node whose clock was set must not count for all


class Backlog:
    """The delays of the heartbeats of the last WINDOW_S; times in Unix seconds."""

    def __init__(self) -> None:
        self.next_sample_s = 0.0  # no sample is needed before this time
        self._samples: deque[tuple[float, float]] = deque()  # (when it was read, its delay)

    def note(self, now_s: float, delay_s: float) -> None:
        """A heartbeat was read ``delay_s`` after it was sent."""
        self.next_sample_s = now_s + 1.0 / SAMPLES_PER_S
        self._samples.append((now_s, delay_s))
        self._expire(now_s)

    def behind_s(self, now_s: float) -> float:
        """Median of recent delays, from 0 to MAX_BEHIND_S.

        A median, because up to half of the nodes may have bad clocks. The delay grows while
        heartbeats wait longer, so only the newer half of the samples counts.
        """
        self._expire(now_s)
        if len(self._samples) < MIN_SAMPLES:
            return 0.0
        newer = list(self._samples)[-max(MIN_SAMPLES, len(self._samples) // 2) :]
        return min(MAX_BEHIND_S, max(0.0, statistics.median(delay_s for _, delay_s in newer)))

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def _expire(self, now_s: float) -> None:
        while self._samples and not 0.0 <= now_s - self._samples[0][0] < WINDOW_S:
            self._samples.popleft()
