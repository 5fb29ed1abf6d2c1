"""What must hold at every event, by the numbers of reference/control-plane.md (I1 to I11).

The world calls in here from the etcd (each write), the drivers (each committed decision) and the
nodes (each order, start and stop), and compares with what is true. The first rule that breaks ends
the history.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.harness.fake_etcd import Connection
from tests.simulation.shell.bounds import Bounds
from tests.simulation.shell.figures import Figures
from tests.simulation.shell.nodes import PREPARING

from megascale.v1 import checkpoint_pb2, link_pb2
from megascale_common.etcd import rpc_pb2
from megascale_driver.core.events import Audit
from megascale_driver.core.state import Cluster, Disposition, JobPhase, Liveness
from megascale_driver.journal import records

if TYPE_CHECKING:
    from tests.simulation.shell.drivers import SimDriver
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

LEADER = b"driver/leader"
# Of one fault: detection, a stop that is not confirmed, the next attempt.
AFTERMATH_S = 300.0
NAMED_S = 6.0  # after the grace of a new leader, until its next look at the queue


class Invariants:
    """The rules, and what they remember of the history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.broken = ""
        self.figures = Figures(world)
        self.bounds = Bounds(world)
        self.log: list[str] = []  # the decision log
        self._epochs: dict[str, tuple[int, int]] = {}  # of each term
        self._seqs: dict[str, int] = {}
        self._tables: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._restored: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._heads: dict[str, int] = {}
        self._inferred: list[tuple[float, str]] = []
        self.excused_s: dict[str, float] = {}  # jobs that an order or a fault stops

    def breaks(self, rule: str, what: str) -> None:
        """A rule is broken."""
        if not self.broken:
            at_s = self._world.now_s - self._world.started_s
            self.broken = f"{rule} at {at_s:.1f} s: {what}"

    # --- etcd

    def writes(self, connection: Connection, request: Any) -> None:
        """I1: whoever writes state holds the leader key at that revision."""
        keys = _keys_put(request)
        if not keys or all(key.endswith(LEADER) for key in keys):
            return
        leader = next((key for key in keys if key.endswith(LEADER)), None)
        store = self._world.etcd.store
        holder = store.get(_prefix(keys[0]) + LEADER)
        name = connection.owner.partition("#")[0]
        if isinstance(request, rpc_pb2.TxnRequest) and not _would_apply(store, request):
            return
        if holder is None:
            self.breaks("I1", f"{connection.owner} writes {keys[0]!r} and nobody leads")
        elif json.loads(holder.value)["address"] != f"{name}:1" and leader is None:
            self.breaks("I1", f"{connection.owner} writes {keys[0]!r} in the term of another")
        elif isinstance(request, rpc_pb2.TxnRequest) and not _is_fenced(request, holder):
            self.breaks("I1", f"{connection.owner} writes {keys[0]!r} without the fence")

    def written(self, connection: Connection, request: Any, answer: Any) -> None:
        """Remember what is durable of each job's head."""
        if not isinstance(answer, rpc_pb2.TxnResponse) or not answer.succeeded:
            return
        for operation in request.success:
            if not operation.HasField("request_put"):
                continue
            put = operation.request_put
            parts = put.key.split(b"/")
            if parts[-1] == b"head":
                self._heads[parts[-2].decode()] = _attempt_of(put.value)
            elif len(parts) > 2 and parts[-2] == b"log" and parts[-1].isdigit():
                log = "" if parts[-3] == b"v1" else parts[-3].decode()
                self._numbered(log, int(parts[-1]), len(records.lines_of(put.value, "record")))

    def _numbered(self, log: str, seq: int, lines: int) -> None:
        """I10: the records of a log follow one another, and none is written twice."""
        known = self._seqs.get(log, 0)
        if seq != known + 1:
            self.breaks("I10", f"log {log!r} goes from {known} to {seq}")
        self._seqs[log] = seq + lines - 1

    # --- drivers

    def driver_failed(self, driver: SimDriver, error: Exception) -> None:
        """The driver's own task ended: in production its process would be gone."""
        self.breaks("driver", f"{driver.name} ends by {type(error).__name__}: {error}")
        driver.crash()

    def request_failed(self, method: str, error: Exception) -> None:
        """A request must be answered or refused, never fail inside."""
        self.breaks("request", f"{method} fails by {type(error).__name__}: {error}")

    def committed(
        self, driver: SimDriver, old: Cluster, new: Cluster, audit: tuple[Audit, ...]
    ) -> None:
        """The rules on decisions, at each commit."""
        world = self._world
        if any(line.reason != "CHECKPOINT_COMMITTED" for line in audit):
            world.touched()
        for line in audit:
            self.log.append(f"{line.log} {line.seq} {line.reason} {line.subject} {line.attempt}")
            if line.reason == "BREAKER_RESET" and line.policy == "manual":
                self._inferred.clear()
            self._line(line, new)
            if line.reason == "PREEMPTION_ORDERED":
                self._preempted(line.log, new)
        self.bounds.committed(driver, old, new, audit)
        if old.jobs is not new.jobs or old.nodes is not new.nodes:
            self._spares_ready(driver, new)
        if old.jobs is not new.jobs:
            places = [_places(state) for state in (old, new)]
            if places[0] != places[1]:
                self._one_place_each(new)
            for name, job in new.jobs.items():
                before = old.jobs.get(name)
                if before is not job:
                    self._job(before, job)

    def _line(self, line: Audit, new: Cluster) -> None:
        world = self._world
        if line.reason in ("NODE_EVICTED", "NODE_DEAD", "NODE_CORDONED", "HANG_SUSPECTED"):
            complete = line.actor and line.subject and line.message
            if not complete or (line.reason == "NODE_DEAD" and not line.evidence):
                self.breaks("I6", f"{line.reason} of {line.subject} without its evidence: {line}")
        node = world.nodes.get(line.subject.removeprefix("nodes/"))
        if node is None:
            return
        if line.reason == "NODE_DEAD" and line.policy == "silence":
            silent_s = float(line.evidence[0].digest.split()[-2])
            limit_s = world.policy.dead_uncorroborated_after_s
            if silent_s < limit_s and len(line.evidence) < 2:
                self.breaks("I8", f"{node.name} is dead after {silent_s} s on one signal")
            if line.log:
                self._mass(line, new)
        lost = line.reason in ("NODE_EVICTED", "NODE_DEAD") and line.policy != "manual"
        if lost and line.log and node.trouble_until_s < world.now_s and world.calm:
            self.figures.false_evictions += 1
            if not self._touched_lately(line.log):
                self.breaks("I8", f"{node.name} is healthy: {line.message}")

    def _preempted(self, job: str, state: Cluster) -> None:
        """I11: a job is displaced only for one of higher priority that waits."""
        mine = state.jobs[job].config.priority
        if not any(
            j.phase is JobPhase.QUEUED and j.config.priority > mine for j in state.jobs.values()
        ):
            self.breaks("I11", f"{job} is displaced, and nobody of higher priority waits")
        self.excused_s[job] = self._world.now_s + 600.0

    def _mass(self, line: Audit, new: Cluster) -> None:
        """I5: inferred deaths of nodes that run jobs stay within the breaker's limit."""
        world = self._world
        # By the clocks of the drivers: one that is set forward ends the window.
        since_s = line.at_s - world.policy.breaker_window_s + 10.0
        name = line.subject.removeprefix("nodes/")
        # The nodes of a switch that is lost count as one.
        if world.nodes[name].switch in {trip.switch for trip in new.breaker.switches if trip.lost}:
            name = world.nodes[name].switch
        self._inferred = [item for item in self._inferred if item[0] > since_s]
        self._inferred.append((line.at_s, name))
        limit = max(int(world.policy.breaker_share * len(world.nodes)), world.policy.breaker_nodes)
        lost = {who for _, who in self._inferred}
        if len(lost) > limit:
            self.breaks("I5", f"{sorted(lost)} are dead by silence: {line.message}")

    def _one_place_each(self, state: Cluster) -> None:
        """I4: a node is active or a spare, of one job only."""
        active = [s.node for job in state.jobs.values() if job.active for s in job.slots]
        spares = [name for job in state.jobs.values() for name in job.spares]
        places = active + spares
        if len(places) != len(set(places)):
            twice = sorted({name for name in places if places.count(name) > 1})
            self.breaks("I4", f"in two places: {twice}")

    def _spares_ready(self, driver: SimDriver, state: Cluster) -> None:
        """I4: a spare could start now; a new leader has time to find out that it is alive."""
        alive = self._world.now_s + driver.clock_offset_s < state.grace_until_s + NAMED_S
        for name in (name for job in state.jobs.values() for name in job.spares):
            node = state.nodes.get(name)
            if node is None or node.disposition in (Disposition.QUARANTINED, Disposition.DRAINING):
                self.breaks("I4", f"spare {name} is {node and node.disposition}")
            elif not alive and not (node.liveness is Liveness.ALIVE and node.connected):
                self.breaks("I4", f"spare {name} is {node.liveness}, linked: {node.connected}")

    def _job(self, before: Any, job: Any) -> None:
        figures = self.figures
        was = before.phase if before is not None else None
        if job.attempt < self._attempts.get(job.name, 0):
            self.breaks("I3", f"{job.name}: attempt {job.attempt} after {self._attempts[job.name]}")
        self._attempts[job.name] = job.attempt
        if was is not job.phase:
            figures.phase(job, was)
            self._world.touched()
            if not job.reason:
                self.breaks("I9", f"{job.name} is {job.phase} without a reason")
        if job.phase is JobPhase.PREPARING and was is not JobPhase.PREPARING:
            self._placement(job)

    def _placement(self, job: Any) -> None:
        """A new attempt is on nodes that could start: schedulable, and idle in truth."""
        leader = self._world.leader()
        for slot in job.slots:
            node = leader.engine.state.nodes.get(slot.node) if leader is not None else None
            if node is not None and node.disposition is not Disposition.SCHEDULABLE:
                self.breaks("I4", f"{job.name} is placed on {slot.node}: {node.disposition}")
            real = self._world.nodes[slot.node]
            if real.incarnation == slot.incarnation and real.job:
                held = f"attempt {real.attempt} of {real.job} in phase {real.phase}"
                self.breaks("I4", f"{job.name} is placed on {slot.node}, which has {held}")

    def _touched_lately(self, job: str) -> bool:
        return self.excused_s.get(job, 0.0) > self._world.now_s

    # --- nodes

    def ordered(self, node: SimNode, desired: link_pb2.DesiredState) -> None:
        """I6: nothing leaves a driver before it is durable. I2: epochs name one term each."""
        epoch = (desired.epoch.cluster_generation, desired.epoch.create_revision)
        if not all(epoch):
            self.breaks("I2", f"{node.name} is ordered by epoch {epoch}")
        if node.link is not None:
            term = node.link.term
            if any(e == epoch and t != term for t, e in self._epochs.items()):
                self.breaks("I2", f"epoch {epoch} is of two drivers")
            self._epochs[term] = epoch
        wanted = desired.assignment
        if wanted.job and wanted.attempt > self._heads.get(wanted.job, 0):
            self.breaks("I6", f"{node.name} is ordered attempt {wanted.attempt}, not committed")

    def started(self, node: SimNode, desired: link_pb2.DesiredState) -> None:
        """I3: one rank table per attempt, and no older attempt on a node that can be reached."""
        world, wanted = self._world, desired.assignment
        key = wanted.job, wanted.attempt
        table = (wanted.rank_table_digest, wanted.restore.step, wanted.store_endpoint)
        if self._tables.setdefault(key, table) != table:
            self.breaks("I3", f"attempt {key} has two rank tables")
        if world.storage_of(wanted.job).opened != wanted.attempt:
            self.breaks("I3", f"{node.name} starts attempt {key}, which is not open")
        older = [gang for gang in world.gangs_of(wanted.job) if gang.attempt < wanted.attempt]
        # Of a gang whose workers have ended after a save the members stay known.
        members = [each for gang in older for each in gang.members.values() if each.gang is gang]
        for other in members:
            link = other.link
            reachable = other.up and not other.paused and link is not None and link.greeted
            well = reachable and other.trouble_until_s < world.now_s and world.calm
            if other is not node and other.trains and well:
                self.breaks("I3", f"{other.name} still runs attempt {other.attempt} beside {key}")

    def opened(
        self, request: checkpoint_pb2.OpenAttemptRequest, plan: tuple[str, int, int]
    ) -> None:
        """I7: what is restored is the newest that exists, and never goes back behind a commit."""
        world, (source, step, _) = self._world, plan
        storage = world.storage_of(request.job)
        if step < storage.committed[0]:
            self.breaks("I7", f"{request.job} restores {step}, committed is {storage.committed[0]}")
        if source == "memory":
            leader = world.leader()
            job = leader.engine.state.jobs.get(request.job) if leader is not None else None
            if job is not None and job.attempt == request.attempt:
                for slot in job.slots:
                    held = world.nodes[slot.node].sealed.get(request.job)
                    wanted = (request.sealed_by_attempt, request.sealed_step)
                    node = world.nodes[slot.node]
                    if held != wanted and node.up and node.trouble_until_s < world.now_s:
                        self.breaks("I7", f"{slot.node} holds {held}, not {wanted}")
        key = request.job, request.attempt
        late = [
            n.name for n in world.nodes.values() if (n.job, n.attempt, n.phase) == (*key, PREPARING)
        ]
        if late:
            self.breaks("I7", f"attempt {key} opens while {late} still prepare")
        if request.attempt > self._heads.get(request.job, 0):
            self.breaks("I6", f"attempt {request.attempt} opens before it is committed")

    def gang_runs(self, gang: Gang) -> None:
        """I3: two attempts of a job never train at once, except where the older one is fenced."""
        for other in self._world.gangs_of(gang.job):
            trains = other.running and not other.broken and not other.finished
            free = other.attempt >= gang.attempt or not other.fenced()
            if other is not gang and trains and free:
                self.breaks("I3", f"attempts {other.attempt} and {gang.attempt} both train")

    def stopped(self, node: SimNode, gang: Gang) -> None:
        """I11, I8: workers that train well are stopped only for a reason that exists."""
        if gang.broken or gang.finished or not gang.running or gang.stalled:
            return
        if not self._world.calm or self._touched_lately(gang.job):
            return
        if any(self._world.nodes[name].trouble_until_s > self._world.now_s for name in gang.nodes):
            return
        self.breaks("I11", f"attempt {gang.key} trained and was stopped on {node.name}")


def _places(state: Cluster) -> list[tuple[int, int]]:
    """Changes when the nodes of an active job, or its spares, do."""
    return [(id(job.slots) * job.active, id(job.spares)) for job in state.jobs.values()]


def _keys_put(request: Any) -> list[bytes]:
    """Keys that a write may change."""
    if isinstance(request, rpc_pb2.PutRequest | rpc_pb2.DeleteRangeRequest):
        return [request.key]
    if isinstance(request, rpc_pb2.TxnRequest):
        puts = [op.request_put.key for op in request.success if op.HasField("request_put")]
        gone = [
            op.request_delete_range.key
            for op in request.success
            if op.HasField("request_delete_range")
        ]
        return puts + gone
    return []


def _prefix(key: bytes) -> bytes:
    """The cluster's prefix of a key."""
    return key[: key.index(b"/v1/") + 4]


def _would_apply(store: Any, request: rpc_pb2.TxnRequest) -> bool:
    """Whether every compare of a transaction holds now."""
    return all(store.holds(item) for item in request.compare)


def _is_fenced(request: rpc_pb2.TxnRequest, holder: rpc_pb2.KeyValue) -> bool:
    """Whether the transaction compares the leader key's create revision."""
    return any(
        item.key.endswith(LEADER)
        and item.target == rpc_pb2.Compare.CREATE
        and item.create_revision == holder.create_revision
        for item in request.compare
    )


def _attempt_of(head: bytes) -> int:
    """The attempt that a job's stored head names."""
    return int(json.loads(head).get("attempt", 0))
