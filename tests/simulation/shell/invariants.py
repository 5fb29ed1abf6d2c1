"""What must hold at every event, by the numbers of reference/control-plane.md (I1 to I11).

The world calls in here from the etcd (each write), the drivers (each committed decision) and the
nodes (each order, start and stop), and compares with what is true. The first rule that breaks ends
the history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.harness.fake_etcd import Connection
from tests.simulation.shell.advance import Advance
from tests.simulation.shell.bounds import Bounds
from tests.simulation.shell.figures import Figures
from tests.simulation.shell.hidden import Hidden
from tests.simulation.shell.nodes import PREPARING
from tests.simulation.shell.ordered import Ordered
from tests.simulation.shell.standby import Standby

from megascale.v1 import checkpoint_pb2, link_pb2, types_pb2
from megascale_common.etcd import rpc_pb2
from megascale_driver.core.values.cluster import Cluster, Disposition, Liveness, usable
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.overlay import changed_keys
from megascale_driver.journal import records
from megascale_executor.agent.run.assignment import job_of
from megascale_job.loading import to_json

if TYPE_CHECKING:
    from tests.simulation.shell.drivers import SimDriver
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

LEADER = b"driver/leader"
# Of one fault: detection, a stop that is not confirmed, the next attempt.
AFTERMATH_S = 300.0
LEARNED_S = 30.0  # without a disturbance, after which a driver knows what its nodes have
NAMED_S = 6.0  # after the grace of a new leader, until its next look at the queue


class Invariants:
    """The rules, and what they remember of the history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.broken = ""
        self.figures = Figures(world)
        self.bounds = Bounds(world)
        self.advance = Advance(world)
        self.orders = Ordered(world)
        self.hidden = Hidden(world)
        self.standby = Standby(world)
        self.log: list[str] = []  # the decision log
        self._epochs: dict[str, tuple[int, int]] = {}  # of each term
        self._seqs: dict[str, int] = {}
        self._tables: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._specs: dict[tuple[str, int], bytes] = {}  # of each attempt, as it was ordered
        self._attempts: dict[str, int] = {}
        self._heads: dict[str, int] = {}
        self._named: tuple[Any, ...] = ()  # what the spares were looked at for last
        self._spares: dict[str, None] = {}
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
            self.orders.decided(line)
            if line.reason == "PLACED":
                self.orders.placed(line.log, new)
        self.bounds.committed(driver, old, new, audit)
        self.hidden.committed(old, new, audit)
        self.standby.committed(old, new, audit)
        if old.jobs is not new.jobs or old.nodes is not new.nodes:
            self._spares_ready(driver, old, new)
        if old.jobs is not new.jobs:
            places = [_places(state) for state in (old, new)]
            if places[0] != places[1]:
                self._one_place_each(new)
            for name, job in new.jobs.items():
                before = old.jobs.get(name)
                if before is not job:
                    self._job(before, job, old, new)

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

    def _spares_ready(self, driver: SimDriver, old: Cluster, state: Cluster) -> None:
        """I4: a spare could start now; a new leader has time to find out that it is alive.

        Spares that are named as before are looked at again where their nodes have changed.
        """
        alive = self._world.now_s + driver.clock_offset_s < state.grace_until_s + NAMED_S
        named = driver.term_of, alive, [job.spares for job in state.jobs.values()]
        if named != self._named:
            self._named = named
            self._spares = {name: None for job in state.jobs.values() for name in job.spares}
            names: Iterable[str] = self._spares
        else:
            names = [n for n in changed_keys(old.nodes, state.nodes) if n in self._spares]
        for name in names:
            node = state.nodes.get(name)
            if node is None or node.disposition in (Disposition.QUARANTINED, Disposition.DRAINING):
                self.breaks("I4", f"spare {name} is {node and node.disposition}")
            elif not alive and not (node.liveness is Liveness.ALIVE and node.connected):
                self.breaks("I4", f"spare {name} is {node.liveness}, linked: {node.connected}")

    def _job(self, before: Any, job: Any, old: Cluster, state: Cluster) -> None:
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
            self._placement(job, old, state)
            self._left_nodes(job, state)

    def _placement(self, job: Any, old: Cluster, state: Cluster) -> None:
        """A new attempt is on nodes that could start: schedulable, and idle in truth.

        It is on none that the job has left, as long as there are others for it.
        """
        for slot in job.slots:
            node, before = state.nodes.get(slot.node), old.nodes.get(slot.node)
            # One that is cordoned in the same commit may have been placed before that.
            both = [each for each in (node, before) if each is not None]
            if node and not any(each.disposition is Disposition.SCHEDULABLE for each in both):
                self.breaks("I4", f"{job.name} is placed on {slot.node}: {node.disposition}")
            real = self._world.nodes[slot.node]
            if real.incarnation == slot.incarnation and real.job:
                held = f"attempt {real.attempt} of {real.job} in phase {real.phase}"
                self.breaks("I4", f"{job.name} is placed on {slot.node}, which has {held}")

    def _left_nodes(self, job: Any, state: Cluster) -> None:
        back = [slot.node for slot in job.slots if slot.node in job.evicted]
        if not back or any(other.phase is JobPhase.QUEUED for other in state.jobs.values()):
            return
        taken = {name for other in state.jobs.values() for name in (*other.spares, *other.evicted)}
        taken |= {s.node for other in state.jobs.values() if other.active for s in other.slots}
        free = [
            name
            for name, node in state.nodes.items()
            if usable(node) and name not in taken and not self._world.nodes[name].job
        ]
        if len(free) >= len(back):
            self.breaks("I4", f"{job.name} is back on {back}, which it has left; {free} are free")

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
        key = wanted.job, wanted.attempt
        if wanted.job:
            spec = to_json(job_of(wanted))
            if self._specs.setdefault(key, spec) != spec:
                self.breaks("I3", f"attempt {key} has two configurations")
        if wanted.job and wanted.attempt > self._heads.get(wanted.job, 0):
            self.breaks("I6", f"{node.name} is ordered attempt {wanted.attempt}, not committed")

    def started(self, node: SimNode, desired: link_pb2.DesiredState) -> None:
        """I3: one rank table per attempt, and no older attempt on a node that can be reached."""
        world, wanted = self._world, desired.assignment
        key = wanted.job, wanted.attempt
        table = (wanted.rank_table_digest, wanted.restore.step, wanted.store_endpoint)
        if key not in self._tables:
            self.orders.started(wanted)
        self._replicas(node, wanted)
        if self._tables.setdefault(key, table) != table:
            self.breaks("I3", f"attempt {key} has two rank tables")
        opened = world.storage_of(wanted.job).opened
        # A node that stood still obeys first what it was ordered before.
        behind = wanted.attempt < opened and node.trouble_until_s >= world.now_s
        if opened != wanted.attempt and not behind:
            self.breaks("I3", f"{node.name} starts attempt {key}, and {opened} is open")
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
        world, (source, step, by) = self._world, plan
        self.orders.restored(request.job, step, by)
        self._newest(request, step)
        if source == "memory":
            self._in_memory(request, plan)
        key = request.job, request.attempt
        late = [
            n.name for n in world.nodes.values() if (n.job, n.attempt, n.phase) == (*key, PREPARING)
        ]
        if late:
            self.breaks("I7", f"attempt {key} opens while {late} still prepare")
        if request.attempt > self._heads.get(request.job, 0):
            self.breaks("I6", f"attempt {request.attempt} opens before it is committed")

    def _in_memory(
        self, request: checkpoint_pb2.OpenAttemptRequest, plan: tuple[str, int, int]
    ) -> None:
        """I7: every rank of the attempt has the step in memory, as one attempt left it.

        A node that was lost or restarted since it was placed ends the attempt anyway.
        """
        leader = self._world.leader()
        job = leader.engine.state.jobs.get(request.job) if leader is not None else None
        if job is None or job.attempt != request.attempt:
            return
        _, step, by = plan
        for slot in job.slots:
            node = self._world.nodes[slot.node]
            if not node.up or node.incarnation != slot.incarnation:
                continue
            missing = set(slot.ranks) - node.memory.own(request.job, (by, step))
            for name in sorted(self._world.nodes) if missing else ():
                other = self._world.nodes[name]
                missing -= other.memory.copies(request.job, (by, step)) if other.up else set()
            if missing:
                what = f"ranks {sorted(missing)}: {slot.node} has {node.memory.sealed}"
                self.breaks("I7", f"step {step} of attempt {by} is in no memory for {what}")

    def _newest(self, request: checkpoint_pb2.OpenAttemptRequest, step: int) -> None:
        """I7: no newer snapshot lies in memory for every rank, if drivers have long been there."""
        world, leader = self._world, self._world.leader()
        job = leader.engine.state.jobs.get(request.job) if leader is not None else None
        if job is None or job.attempt != request.attempt or job.rollbacks:
            return
        if self.bounds.undisturbed_s() < LEARNED_S or world.network.cut_lately(LEARNED_S):
            return
        members = [world.nodes[slot.node] for slot in job.slots]
        if any(not node.up or node.log_storm for node in members):
            return
        first = members[0].memory
        held = {*first.sealed.get(job.name, {}), *first.replicas.get(job.name, {})}
        for by, other in sorted(held):
            missing = set(range(job.config.layout.world_size))
            for slot, node in zip(job.slots, members, strict=True):
                missing -= node.memory.own(job.name, (by, other)) & {*slot.ranks}
                missing -= node.memory.copies(job.name, (by, other))
            if other > step and not missing and other not in request.refused_steps:
                what = f"all have step {other} of attempt {by}"
                self.breaks("I7", f"{job.name} restores {step}, and {what} in memory")

    def _replicas(self, node: SimNode, wanted: link_pb2.AttemptAssignment) -> None:
        """I7: what a node is to restore from memory is there, or where it is sent for it."""
        plan, snapshot = wanted.restore, (wanted.restore.written_by_attempt, wanted.restore.step)
        if plan.source != types_pb2.RESTORE_SOURCE_MEMORY:
            return
        missing = set(wanted.ranks) - node.memory.own(wanted.job, snapshot)
        for source in wanted.replica_sources:
            other, boots = self._world.node_at(source.endpoint)
            if other.boots != boots or not other.up:
                missing.discard(source.rank)  # it was lost since then, which ends the attempt
            missing -= other.memory.copies(wanted.job, snapshot) & {source.rank}
        if missing:
            what = f"{sorted(missing)} of {wanted.job} on {node.name} from {wanted.replica_sources}"
            self.breaks("I7", f"ranks {what} do not get step {plan.step} of {snapshot[0]}")

    def newest_attempt(self, job: str) -> int:
        """The newest attempt of a job that was decided, whether anybody knows it or not."""
        return self._heads.get(job, 0)

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
