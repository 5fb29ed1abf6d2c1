"""Jobs as they really train: gangs of workers, snapshots in memory, commits on storage.

A gang is one attempt of one job. It trains as long as all its workers are there, whatever drivers
do. Its steps are a function of time, so nothing has to happen for each of them. A job's storage is
its commit log: OPEN fences all earlier attempts, COMMIT makes a checkpoint exist.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.world import World

SNAPSHOT_STEPS = 10
COMMIT_DELAY_S = 20.0
MEET_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 600.0
# An order to save and end: of the step whose votes carry it, and of the commit that is waited for.
STEPS_AHEAD = 2
SAVE_S = 8.0
COPY_S = (0.5, 4.0)  # a snapshot's way to another node


@dataclass
class Storage:
    """The checkpoints of one job on shared storage."""

    opened: int = 0  # newest attempt that was opened
    answers: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # attempt: plan
    commits: list[tuple[int, int]] = field(default_factory=list)  # (step, attempt), as appended

    @property
    def committed(self) -> tuple[int, int]:
        """(step, attempt) of the newest commit; (0, 0) before the first."""
        return self.commits[-1] if self.commits else (0, 0)

    def newest(self, above: int, refused: Container[int]) -> tuple[int, int]:
        """(step, attempt) of the newest commit that is not refused, or (0, 0) as for none.

        The log is read backwards, down to the first commit that is not ``above`` this step.
        """
        for step, by in reversed(self.commits):
            if step <= above:
                break
            if step not in refused:
                return step, by
        return 0, 0


class Gang:
    """The workers of one attempt on all its nodes."""

    def __init__(
        self,
        world: World,
        job: str,
        attempt: int,
        ranks: int,
        restore: int,
        steps: int,
        *,
        stored: bool,
    ) -> None:
        self.world, self.job, self.attempt = world, job, attempt
        self.ranks, self.steps = ranks, steps
        self.nodes: set[str] = set()  # all that have ever joined
        self.members: dict[str, SimNode] = {}
        self.base = restore
        self.stored = not restore or stored  # whether what was restored is committed
        self.running = self.broken = self.finished = False
        self.broken_at_s = 0.0
        self.sealed = 0
        self.committed = 0
        self.last = steps  # the step after which the workers end
        self.step_s = world.step_s(job)
        # To save and end: rank 0's order, the one that a vote has carried, the one that failed.
        self._order = self._voted_order = self._failed = ""
        self._present = 0  # ranks that are there
        self._pace: tuple[bool, float] | None = None  # stalled, slowness; None: look again
        self._mark_s = 0.0
        self._still_since_s = 0.0
        self._done = float(restore)
        self.peers: dict[str, str] = {}  # the address of each node's replica server, if it has one
        self._copies: dict[int, int] = {}  # nodes whose snapshot of a step has a replica
        world.later(MEET_TIMEOUT_S, self._meeting_overdue)

    @property
    def key(self) -> tuple[str, int]:
        """(job, attempt)."""
        return self.job, self.attempt

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return self._present == self.ranks

    @property
    def failed_order(self) -> str:
        """The order to save and end that could not be carried out; "" if none failed."""
        return self._failed if not self.finished else ""

    @property
    def first(self) -> SimNode | None:
        """The node of rank 0, if it is there."""
        return next((node for node in self.members.values() if 0 in node.ranks), None)

    @property
    def pace_s(self) -> float:
        """How long a step takes now."""
        return self.step_s * self._look()[1]

    @property
    def stalled(self) -> bool:
        """Whether a worker holds the others up."""
        return self._look()[0]

    def moved(self) -> None:
        """A node has changed how it works: bring the steps up to now, and look again."""
        self.settle()
        self._pace = None
        if self.stalled:  # their status pages show it
            for node in self.members.values():
                node.rest.end()

    def _look(self) -> tuple[bool, float]:
        """Whether a worker holds the others up, and how slow the slowest is."""
        if self._pace is None:
            key, nodes = self.key, self.members.values()
            held = any(node.holds_up(key) for node in nodes)
            held = held or self.world.invariants.hidden.slow(self.members)
            self._pace = held, max((node.slowness for node in nodes), default=1.0)
        return self._pace

    @property
    def gone(self) -> bool:
        """Whether no worker of it is left."""
        return self.finished or (self.broken and not self.members)

    @property
    def settled(self) -> bool:
        """Whether nothing but steps would happen to it."""
        if self.gone:
            return True
        leaves = self.last < self.steps or self._order not in ("", self._failed)
        return self.running and not (self.broken or self.stalled or leaves)

    def report_now(self) -> None:
        """Have rank 0's node report the newest step, as after a stretch that was skipped."""
        first = self.first
        if first is not None and self.running and not self.broken and not self.stalled:
            first.report_step(self)

    def step(self) -> int:
        """The newest completed step now."""
        return min(self.last, int(self._now_done() + 1e-9))

    def join(self, node: SimNode) -> None:
        """A node's workers have started."""
        if self.broken:
            node.worker_failed(self, "COLLECTIVE", 1, "connection closed by peer")
            return
        self._present += len(node.ranks)
        self.members[node.name] = node
        self.nodes.add(node.name)
        if target := node.replica_target:
            self.peers[node.name] = target
        self._pace = None
        if self.complete and not self.running:
            self.world.later(self.world.draw(1.0, 3.0), self._run)

    def leave(self, node: SimNode, *, loud: bool = True) -> None:
        """A node's workers are gone; ``loud``: their peers see closed connections."""
        if self.members.get(node.name) is not node:
            return
        self.settle()
        del self.members[node.name]
        self._present -= len(node.ranks)
        self._pace = None
        if loud:
            self._break()

    def settle(self) -> None:
        """Bring steps, seals and commits up to now; call it before anything changes the pace."""
        self._done = self._now_done()
        self._mark_s = self.world.now_s
        newest = min(self.last, int(self._done + 1e-9))
        sealed = newest - newest % SNAPSHOT_STEPS
        if newest >= self.last:
            sealed = self.last
        if sealed > max(self.sealed, self.base):
            self.sealed = sealed
            for node in self.members.values():
                self._seal(node, sealed)
        self._commit()

    def _seal(self, node: SimNode, step: int) -> None:
        """A node's ranks have a snapshot, which goes to the node's peer if it has one."""
        snapshot = self.attempt, step
        node.memory.seal(self.job, snapshot, node.ranks, holds=bool(self.peers))
        if node.name in self.peers:
            self.world.later(node.draw(*COPY_S), self._copied, node, node.boots, step)

    def _copied(self, node: SimNode, boots: int, step: int) -> None:
        """A snapshot has reached the peer; with the last of them the older ones may go."""
        peer, of = self.world.node_at(self.peers[node.name])
        if not (node.up and node.boots == boots and peer.up and peer.boots == of):
            return
        peer.memory.keep(self.job, (self.attempt, step), node.ranks)
        self._copies[step] = self._copies.get(step, 0) + 1
        if self._copies[step] == len(self.nodes):
            for name in self.nodes:
                self.world.nodes[name].memory.drop_before(self.job, (self.attempt, step))

    def still_s(self) -> float:
        """For how long no worker has advanced."""
        return max(0.0, self.world.now_s - self._still_since_s)

    def fenced(self) -> bool:
        """Whether a later attempt was opened, so that nothing more can be committed."""
        return self.world.storage_of(self.job).opened > self.attempt

    def _commit(self) -> None:
        """Commit what was sealed long enough ago, unless a later attempt is open."""
        storage = self.world.storage_of(self.job)
        until = self._done - COMMIT_DELAY_S / self.step_s
        step = int(until) - int(until) % SNAPSHOT_STEPS
        if self.finished:
            step = self.last
        # What was restored from memory and is not stored yet is committed, too.
        new = step > self.committed and (step > self.base or not self.stored)
        if new and step >= self.base and step and not self.broken and not self.fenced():
            self.committed = step
            self.stored = True
            storage.commits.append((step, self.attempt))
            if self.first is not None:
                self.first.rest.end()

    def _now_done(self) -> float:
        if not self.running or self.broken or self.stalled or not self._mark_s:
            return self._done
        passed_s = self.world.now_s - self._mark_s
        return min(float(self.last), self._done + passed_s / (self.step_s * self._look()[1]))

    def _run(self) -> None:
        if self.broken or self.running or not self.complete:
            return
        self.running = True
        self._mark_s = self.world.now_s
        for node in list(self.members.values()):
            node.workers_run(self)
        self.world.invariants.gang_runs(self)
        self.world.invariants.hidden.joined(self)
        self._report()
        self._watch_end(self.last)

    def _report(self) -> None:
        """Rank 0's node reports the newest step, about once per step."""
        if self.broken or self.finished:
            return
        self.settle()
        first = self.first
        if first is not None and not self.stalled:
            first.report_step(self)
        self.world.later(max(2.0, self.step_s), self._report)

    def _watch_end(self, last: int) -> None:
        if self.broken or self.finished or last != self.last:
            return
        left_s = (last - self._now_done()) * self.step_s
        if left_s > 1e-6:  # how often it was settled must not change by what sums are rounded
            self.world.at(self.world.now_s + max(1.0, left_s), self._watch_end, last)
            return
        self.settle()
        self.world.touched()  # its end is under way
        self.world.later(SAVE_S if last < self.steps else 3.0, self._finish, last)

    def _finish(self, last: int) -> None:
        if self.broken or self.finished or last != self.last:
            return
        if last < self.steps and not self._can_save():
            self.settle()
            self._failed, self.last = self._voted_order, self.steps
            self.world.invariants.standby.save_failed(self, self._failed)
            if self.first is not None:
                self.first.changed()
            self._watch_end(self.last)
            return
        self.finished = True
        self._commit()
        for node in list(self.members.values()):
            node.workers_finished(self)

    def ordered(self, order: str) -> None:
        """Rank 0's workers have this order to save and end, or none: it rides in their next vote.

        The step of that vote is known on all ranks; so is the one after which they end, and nothing
        takes it back. If that cannot be saved, they train on, and the order has failed.
        """
        if order == self._order:
            return
        self._order = order
        if order and order != self._failed:
            self.world.later(self.step_s, self._voted, order)

    def _voted(self, order: str) -> None:
        ends = self.broken or self.finished or self.last < self.steps
        if order != self._order or order == self._failed or ends:
            return
        self.settle()
        self._voted_order = order
        self.last = min(self.steps, self.step() + STEPS_AHEAD)
        self._watch_end(self.last)

    def _can_save(self) -> bool:
        """Whether the checkpoint of the last step is committed."""
        first = self.first
        away = first is None or first.draw(0.0, 1.0) < self.world.open_failures
        return not (away or self.fenced())

    def lose_peers(self) -> None:
        """The connections between its workers break, for no reason that any of them has."""
        self._break()

    def _meeting_overdue(self) -> None:
        if not self.running and not self.broken:
            self._break()

    def stands_still(self) -> None:
        """A worker has begun to hold up the others: their collectives time out at last."""
        self.settle()
        at_s = self._still_since_s = self.world.now_s

        def overdue() -> None:
            over = self.world.now_s - at_s >= COLLECTIVE_TIMEOUT_S - 1.0
            if over and not self.broken and (self.stalled or not self.complete):
                self._break()

        self.world.later(COLLECTIVE_TIMEOUT_S, overdue)

    def _break(self) -> None:
        """Peers lose a connection: their collectives fail, one after the other."""
        if self.broken or self.finished:
            return
        self.settle()
        self.broken, self.broken_at_s = True, self.world.now_s
        for name in sorted(self.members):
            node = self.members[name]
            self.world.later(
                node.draw(0.3, 2.0),
                node.worker_failed,
                self,
                "COLLECTIVE",
                1,
                "connection closed by peer",
            )
