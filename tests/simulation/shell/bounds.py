"""What a driver must find out within a bound of time, and what it must not believe too early.

The world knows what is true: which node beats, which one is cut off, whose workers stand still.
While anything is wrong, every second the leader's state is compared with that. A bound holds while
one driver leads and neither it nor its etcd is disturbed; else its clock starts anew.

The bounds are those of the policy (a silent node is SUSPECT after 8 s and DEAD after 14 s, since a
probe of it fails, too; a rank that stands still is decided on after max(60 s, 5 x p99)), and on top
a few seconds for the decision, a probe, and the grid of these looks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from megascale.v1 import link_pb2
from megascale_driver.core.values.cluster import AttemptPhase, Cluster, Disposition, Liveness, Node
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import JobPhase

if TYPE_CHECKING:
    from tests.simulation.shell.drivers import SimDriver
    from tests.simulation.shell.network import Link
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

LOOK_S = 1.0
SETTLED_S = 60.0  # without any fault, after which there is nothing more to look at
UNDISTURBED_S = 15.0  # after a fault of drivers or etcd, before a new term is nobody's fault
# Above the limits of the policy: the next tick, the commit, a hold after a reset of the breaker.
LATE_S = 3.0
PROBED_S = 8.0  # above the limit of DEAD: a probe takes 4 s, and the next begins 2 s after it
HANG_LATE_S = 30.0
# Of an agent that answers probes and says nothing: its first silence, and the hold of a new term.
MUTE_LATE_S = 25.0
WORKERLESS_LATE_S = 30.0
# A node whose link is dead finds that out after 30 s, and then dials the drivers in turn.
LINKED_S = 50.0
# A node that has just started dials at once, and is refused for 8 s at most: as long as another
# agent under its name was heard so lately.
STARTED_S = 17.0
REPORTED_S = 15.0  # a heartbeat that is lost is followed by the next
LED_S = 40.0  # a crashed driver is started again within 20 s, and a lease ends after 10 s
OPENED_S = 30.0  # a call that is answered takes milliseconds, and a lost one 22 s
NEW_TERM_S = 30.0  # a lost lease, and the campaign
ALIKE_S = 0.3  # two times of the same thing, on both sides of the network
_AT_WORK = (JobPhase.PREPARING, JobPhase.STARTING, JobPhase.RUNNING)
_SILENT = (Liveness.SUSPECT, Liveness.DEAD)
_PHASES = {number: name for name, number in link_pb2.AttemptPhase.items()}


class Bounds:
    """The clocks of what is wrong at present."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disturbed = 0  # faults of drivers, etcd and the network that last now
        self._disturbed_until_s = 0.0
        self._ended_s = 0.0  # the newest fault
        self._looks = False
        self._term: tuple[str, int, int] | None = None
        self._term_since_s = 0.0
        self._skipped_s = 0.0
        self._starts: dict[str, int] = {}  # of each driver, at the newest election
        self._heard_s: dict[str, deque[float]] = {}  # the newest heartbeats of a node
        self._heard_by: dict[str, str] = {}  # the process that they reached
        self._well_since_s: dict[str, float] = {}
        self._boots: dict[str, int] = {}
        self._started_s: dict[str, float] = {}
        self._since_s: dict[tuple[str, str], float] = {}  # (what, node): wrong since
        # What was right of a node at the newest look, and need not be looked at again: what the
        # core had of it, and what it did.
        self._right: dict[str, tuple[Node | None, tuple[str, int, int]]] = {}

    # --- what happens

    def heard(self, link: Link, at_s: float) -> None:
        """A heartbeat has reached a driver."""
        name = link.node.name
        if self._heard_by.get(name) != link.term:
            self._heard_by[name] = link.term
            self._heard_s[name] = deque(maxlen=8)
        self._heard_s[name].append(at_s)

    def unheard(self, link: Link, unread: int) -> None:
        """The newest messages of a link were lost before its driver read them."""
        name = link.node.name
        if self._heard_by.get(name) == link.term:
            for _ in range(min(unread, len(self._heard_s[name]))):
                self._heard_s[name].pop()
            if not self._heard_s[name]:
                del self._heard_s[name], self._heard_by[name]

    def begin(self, disturbs: bool) -> None:
        """A fault begins: look until all has been well for a while.

        ``disturbs``: nothing is expected of drivers as long as it lasts.
        """
        if disturbs:
            self._world.wake()
        self._disturbed += disturbs
        if not self._looks:
            self._looks = True
            self._term, self._term_since_s = None, self._world.now_s
            self._world.later(LOOK_S, self._look)

    def end(self, disturbs: bool) -> None:
        """A fault has ended."""
        self._disturbed -= disturbs
        self._ended_s = self._world.now_s
        if disturbs:
            self._disturbed_until_s = self._ended_s + UNDISTURBED_S

    @property
    def disturbed(self) -> bool:
        """Whether a fault of drivers, etcd or the network lasts."""
        return bool(self._disturbed)

    def undisturbed_s(self) -> float:
        """For how long one driver has led, and nothing has disturbed it or its etcd."""
        leader = self._world.leader()
        if self._disturbed or leader is None or leader.process.paused:
            return 0.0
        led_since_s = leader.engine.state.leader_since_s - leader.clock_offset_s
        return self._world.now_s - max(self._disturbed_until_s, led_since_s)

    def committed(
        self, driver: SimDriver, old: Cluster, new: Cluster, audit: tuple[Audit, ...]
    ) -> None:
        """No decision rests on what is not so."""
        # After whose verdict the next incarnation is known, in the same commit.
        joined = {line.subject for line in audit if line.reason == "NODE_JOINED"}
        for line in audit:
            name = line.subject.removeprefix("nodes/")
            decided_s = line.at_s - driver.clock_offset_s
            if line.reason == "LEADER_ELECTED":
                self._world.wake()
                self._elected()
            elif line.reason == "NODE_SUSPECT":
                self._silent_so_long(driver, old, name, decided_s, suspect=True)
            if line.reason in ("NODE_DEAD", "NODE_JOINED"):
                self._job_stops(new, name)
            if line.reason == "NODE_DEAD" and line.policy == "silence":
                self._silent_so_long(driver, old, name, decided_s, suspect=False)
                if line.log:
                    self._not_the_network(old, new, name)
            elif line.reason == "NODE_DEAD" and line.policy == "mute":
                self._without_workers(name)
            elif line.reason == "NODE_DEAD" and line.subject not in joined:
                self._process_gone(new, name)
            elif line.reason == "ATTEMPT_STOPPED":
                self._nothing_runs(old, new, line)

    # --- what must not be believed

    def _elected(self) -> None:
        """A term ends for a reason: its driver, its key, etcd or the way to it."""
        world = self._world
        starts = {driver.name: driver.starts for driver in world.drivers}
        died = starts != self._starts or any(not driver.alive for driver in world.drivers)
        self._starts = starts
        if not died and not self._disturbed and world.now_s > self._disturbed_until_s + NEW_TERM_S:
            world.invariants.breaks("term", "a new one begins, and nothing has ended the last")

    def _silent_so_long(
        self, driver: SimDriver, old: Cluster, name: str, decided_s: float, *, suspect: bool
    ) -> None:
        """I8: a node is SUSPECT or DEAD by silence only if its beats and steps were away so long.

        ``decided_s``: when, by the world's clock.
        """
        policy, node = self._world.policy, old.nodes.get(name)
        limit_s = policy.suspect_after_s if suspect else policy.dead_after_s
        signs_s = [old.leader_since_s - driver.clock_offset_s]
        if self._heard_by.get(name) == driver.term_of:
            signs_s += [at_s for at_s in self._heard_s[name] if at_s < decided_s - ALIKE_S]
        if node is not None and (proof_s := _proven_s(old, name, policy.step_proof_lag_s)):
            signs_s.append(proof_s - driver.clock_offset_s)
        silent_s = decided_s - max(signs_s)
        if silent_s < limit_s - ALIKE_S:
            what = "SUSPECT" if suspect else "DEAD"
            self._world.invariants.breaks("I8", f"{name} is {what} after {silent_s:.1f} s")

    def _not_the_network(self, old: Cluster, new: Cluster, name: str) -> None:
        """I5: no job loses a node by silence while half of several switches are silent."""
        if min(_silent_switches(self._world, state) for state in (old, new)) > 1:
            rules = self._world.invariants
            rules.breaks("I5", f"{name} is given up while several switches are silent")

    def _process_gone(self, new: Cluster, name: str) -> None:
        """I8: a process that is declared gone does not run."""
        known, node = new.nodes.get(name), self._world.nodes.get(name)
        if known is None or node is None:
            return
        if node.up and known.identity.incarnation == node.incarnation:
            rules = self._world.invariants
            rules.breaks("I8", f"{name} is dead by a refused port, and {node.incarnation} runs")

    def _without_workers(self, name: str) -> None:
        """I8: an agent that is given up for what it said itself has no workers."""
        node = self._world.nodes.get(name)
        if node is not None and node.up and node.trains:
            self._world.invariants.breaks("I8", f"{name} has no workers, it is said, and trains")

    def _job_stops(self, new: Cluster, name: str) -> None:
        """I9: with a node that is dead or was restarted its attempt ends, in the same commit."""
        node = new.nodes.get(name)
        for job in new.jobs.values():
            slot = job.slot_of(name) if job.phase in _AT_WORK else None
            if slot is None or node is None:
                continue
            if node.liveness is Liveness.DEAD or node.identity.incarnation != slot.incarnation:
                what = f"{name} is {node.liveness}, {node.identity.incarnation}"
                self._world.invariants.breaks("I9", f"job {job.name} is {job.phase}, and {what}")

    def _nothing_runs(self, old: Cluster, new: Cluster, line: Audit) -> None:
        """I3: an attempt has stopped when all its nodes that answer are idle."""
        job = old.jobs.get(line.log)
        after = new.jobs.get(line.log)
        if job is None or after is None:
            return
        for slot in job.slots:
            node, known = self._world.nodes[slot.node], new.nodes.get(slot.node)
            if known is None or known.liveness is Liveness.DEAD or slot.node in after.evicted:
                continue
            if known.disposition is Disposition.QUARANTINED or not node.up:
                continue
            if (node.job, node.attempt) == (job.name, job.attempt) and (
                known.identity.incarnation == node.incarnation
            ):
                self._world.invariants.breaks(
                    "I3", f"attempt {job.attempt} of {job.name} has stopped, {node.name} still"
                    f" has it in phase {node.phase}",
                )  # fmt: skip

    # --- what must be found out

    def _look(self) -> None:
        world = self._world
        now_s = world.now_s
        if not world.active_faults and not self._since_s and now_s > self._ended_s + SETTLED_S:
            self._looks = False
            return
        world.later(LOOK_S, self._look)
        if world.skipped_s != self._skipped_s:  # nothing was wrong meanwhile
            self._skipped_s = world.skipped_s
            self._term, self._term_since_s = None, now_s
        leader = self._undisturbed()
        if leader is None:
            if self._term is None and now_s - self._term_since_s > LED_S:
                world.invariants.breaks("bound", f"nobody leads for {LED_S:g} s")
            return
        if len(leaders := [driver.name for driver in world.drivers if driver.leads]) > 1:
            world.invariants.breaks("bound", f"{leaders} lead at once")
        self._note_all(leader)
        state = leader.engine.state
        offset_s = leader.clock_offset_s
        held = now_s < state.silence_hold_until_s - offset_s + LATE_S
        holders = {s.node: job for job in state.jobs.values() if job.active for s in job.slots}
        right, known_of, well = self._right, state.nodes.get, self._well_since_s
        for name, node in world.nodes.items():
            if not (held or node.rest):
                self._must_be_silent(leader, state, node, holders.get(name))
            self._must_not_be_mute(state, node, holders.get(name))
            if name in well:
                known, doing = known_of(name), (node.job, node.attempt, node.phase)
                if (was := right.get(name)) is None or was[0] is not known or was[1] != doing:
                    right.pop(name, None)
                    if self._must_be_linked(state, node):
                        right[name] = known, doing
        for gang in world.gangs.values():
            self._must_be_over(state, gang)
        for job in state.jobs.values():
            self._must_have_workers(state, job)
            if job.phase is JobPhase.PREPARING:
                self._must_open(state, job)

    def _undisturbed(self) -> SimDriver | None:
        """The leader, if it has led for some time and nothing hinders it; else clocks restart."""
        world = self._world
        leader = world.leader()
        term = leader.engine.term if leader is not None else None
        key = None
        if leader is not None and term is not None and not leader.process.paused:
            key = leader.name, leader.starts, term.leadership.create_revision
        dead = not any(driver.alive for driver in world.drivers)
        disturbed = self._disturbed or world.now_s < self._disturbed_until_s or dead
        if disturbed or key != self._term:
            self._term, self._term_since_s = key, world.now_s
            self._well_since_s.clear()
            self._since_s.clear()
            return None
        return leader if key is not None else None

    def _note_all(self, leader: SimDriver) -> None:
        """Note every node of which anything may have changed since the newest look."""
        world, well, boots = self._world, self._well_since_s, self._boots
        whole = not world.network.cuts
        for name, node in world.nodes.items():
            as_before = name in well and boots[name] == node.boots
            if not (whole and as_before and node.up and not (node.paused or node.is_mute)):
                self._note(node, leader)

    def _note(self, node: SimNode, leader: SimDriver) -> None:
        """Since when the node has been well, and when it was started."""
        now_s, name = self._world.now_s, node.name
        if self._boots.get(name, node.boots) != node.boots:
            self._started_s[name] = now_s
        self._boots[name] = node.boots
        well = node.up and not (node.paused or node.is_mute)
        well = well and self._world.network.open(name, leader.name)
        if not well:
            self._well_since_s.pop(name, None)
        else:
            self._well_since_s.setdefault(name, now_s)

    def _must_be_silent(self, leader: SimDriver, state: Cluster, node: SimNode, job: Any) -> None:
        """A node that is silent is SUSPECT and then DEAD, whatever it ran."""
        world, known = self._world, state.nodes.get(node.name)
        if known is None:
            return
        policy, offset_s = world.policy, leader.clock_offset_s
        if known.liveness is Liveness.UNKNOWN:
            # Nodes that link one after the other are all waited for, but not for ever.
            latest_s = state.leader_since_s + policy.leader_grace_max_s
            if world.now_s + offset_s < min(state.grace_until_s, latest_s) + LATE_S:
                return
        signs_s = [self._term_since_s, known.last_seen_s - offset_s]
        if self._heard_by.get(node.name) == leader.term_of:
            signs_s.append(self._heard_s[node.name][-1])
        if proof_s := _proven_s(state, node.name, policy.step_proof_lag_s):
            signs_s.append(proof_s - offset_s)
        silent_s = world.now_s - max(signs_s)
        if silent_s > policy.suspect_after_s + LATE_S and known.liveness not in _SILENT:
            self._late(node, f"is silent for {silent_s:.1f} s and {known.liveness}")
        overdue = silent_s > policy.dead_after_s + PROBED_S and known.liveness is not Liveness.DEAD
        # Of a node that runs a job the breaker may hold the verdict back.
        overdue = overdue and (job is None or not _held_back(world, state))
        since_s = self._wrong_since("dead", node.name, overdue)
        if since_s and world.now_s - since_s > LATE_S:
            self._late(node, f"is silent for {silent_s:.1f} s and not DEAD")

    def _must_be_linked(self, state: Cluster, node: SimNode) -> bool:
        """A node that is well is linked and ALIVE, and the core has its newest phase.

        False: something of that is not so yet.
        """
        now_s, name, known = self._world.now_s, node.name, state.nodes.get(node.name)
        well_s = self._well_since_s[name]
        linked = known is not None and known.connected and known.liveness is Liveness.ALIVE
        since_s = self._wrong_since("link", name, not linked)
        bound_s = STARTED_S if self._started_s.get(name, 0.0) >= well_s - LOOK_S else LINKED_S
        if since_s and now_s - max(since_s, well_s) > bound_s:
            what = "unknown" if known is None else f"{known.liveness}, linked: {known.connected}"
            self._late(node, f"is well for {now_s - well_s:.1f} s, and {what}")
        report = known.report if known is not None else None
        mine = node.job, node.attempt, _PHASES[node.phase].removeprefix("ATTEMPT_PHASE_")
        same = report is not None and (report.job, report.attempt, report.phase.value) == mine
        since_s = self._wrong_since("report", name, linked and not same and not node.log_storm)
        if since_s and now_s - max(since_s, well_s) > REPORTED_S:
            what = f"{report.job} {report.attempt} {report.phase}" if report else "nothing"
            self._late(node, f"is in phase {mine}, and the core has {what}")
        return linked and same

    def _must_be_over(self, state: Cluster, gang: Gang) -> None:
        """A hang is decided on within its limit, if all nodes are there to show it."""
        world, job = self._world, state.jobs.get(gang.job)
        if job is None or (job.attempt, job.phase) != (gang.attempt, JobPhase.RUNNING):
            return
        if "OBSERVE" in state.breaker.modes.values():
            return  # an operator has rules observed
        if not gang.running or gang.broken or gang.finished or not gang.stalled:
            return
        if gang.step() <= gang.base + 1:
            return  # before the first steps the limit is that of a start
        limit_s = world.policy.hang.of("STEP", job.step_times)
        well_s = [self._well_since_s.get(name, world.now_s) for name in gang.members]
        still_s = gang.still_s()
        if min(still_s, world.now_s - max(well_s)) > limit_s + HANG_LATE_S:
            world.invariants.breaks("bound", f"attempt {gang.key} stands still for {still_s:.1f} s")

    def _must_have_workers(self, state: Cluster, job: Any) -> None:
        """A job is not RUNNING without any worker for long, whatever became of its nodes."""
        world, policy = self._world, self._world.policy
        if "OBSERVE" in state.breaker.modes.values():
            return
        mine = [world.nodes[slot.node] for slot in job.slots]
        there = [node for node in mine if (node.job, node.attempt) == (job.name, job.attempt)]
        running = job.phase is JobPhase.RUNNING
        gone = running and not any(node.trains and node.up for node in there)
        since_s = self._wrong_since("workers", job.name, gone)
        if since_s and world.now_s - since_s > policy.no_workers_after_s + WORKERLESS_LATE_S:
            what = f"job {job.name} is RUNNING without a worker"
            world.invariants.breaks("bound", f"{what} for {world.now_s - since_s:.0f} s")

    def _must_not_be_mute(self, state: Cluster, node: SimNode, job: Any) -> None:
        """An agent that answers probes, says nothing and has no worker does not keep its job."""
        world, policy = self._world, self._world.policy
        running = job is not None and job.phase is JobPhase.RUNNING
        mute = running and node.is_mute and node.up and not node.trains
        mute = mute and "OBSERVE" not in state.breaker.modes.values()
        since_s = self._wrong_since("mute", node.name, mute)
        limit_s = policy.dead_uncorroborated_after_s + policy.dead_after_s + MUTE_LATE_S
        if since_s and world.now_s - since_s > limit_s:
            self._late(node, f"answers without a worker for {world.now_s - since_s:.0f} s")

    def _must_open(self, state: Cluster, job: Any) -> None:
        """An attempt whose nodes are all prepared opens, unless the storage is away."""
        world, ready = self._world, not self._world.open_failures
        for slot in job.slots:
            node, known = world.nodes[slot.node], state.nodes.get(slot.node)
            report = known.report if known is not None else None
            mine = report is not None and (report.job, report.attempt) == (job.name, job.attempt)
            prepared = mine and report is not None and report.phase is AttemptPhase.PREPARED
            ready = ready and prepared and node.name in self._well_since_s
        since_s = self._wrong_since("open", job.name, ready)
        if since_s and world.now_s - since_s > OPENED_S:
            what = f"attempt {job.attempt} of {job.name} is prepared and not open"
            world.invariants.breaks("bound", f"{what} for {OPENED_S:g} s")

    def _wrong_since(self, what: str, name: str, wrong: bool) -> float:
        """When this became so, at the first look that found it; 0 if it is not."""
        if not wrong:
            self._since_s.pop((what, name), None)
            return 0.0
        return self._since_s.setdefault((what, name), self._world.now_s)

    def _late(self, node: SimNode, what: str) -> None:
        self._world.invariants.breaks("bound", f"{node.name} {what}")


def _proven_s(state: Cluster, node: str, lag_s: float) -> float:
    """Until when the steps of its job prove a node alive, by the driver's clock; 0: no job's do."""
    for job in state.jobs.values():
        if job.phase is JobPhase.RUNNING and job.slot_of(node) is not None:
            return job.current.last_step_at_s - lag_s if job.current.last_step_at_s else 0.0
    return 0.0


def _held_back(world: World, state: Cluster) -> bool:
    """Whether the breaker may hold verdicts on nodes of jobs back, or an operator does."""
    breaker = state.breaker
    if "OBSERVE" in breaker.modes.values():
        return True
    lost = len(breaker.evictions) >= world.policy.breaker_nodes
    return bool(breaker.tripped_at_s or breaker.switches or lost)


def _silent_switches(world: World, state: Cluster) -> int:
    """How many switches there are of which at least half of the nodes are silent."""
    members: dict[str, list[bool]] = {}
    for name, node in world.nodes.items():
        known = state.nodes.get(name)
        silent = known is not None and known.liveness in _SILENT
        members.setdefault(node.switch, []).append(silent)
    return sum(
        len(found) >= world.policy.switch_nodes and 2 * sum(found) >= len(found)
        for found in members.values()
    )
