"""Defects that no fault names: bad links, and nodes that only fail together with others.

On a link that drops, the collectives of an attempt fail on all its nodes; on one that is slow none
of them advances. A flaky node passes its own checks and breaks what it computes with others. The
nodes check each other for these, so every search must end with what is true.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from megascale_driver.core.values.cluster import Cluster, Disposition
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import JobPhase

if TYPE_CHECKING:
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

Pair = frozenset[str]
LATELY_S = 300.0  # after its repair a verdict may still be about a defect
SETTLED_S = 60.0  # without a disturbance of drivers, before a search must have come to its end
ABLE = 3  # nodes among which one defect can be told apart


class Hidden:
    """The defects that exist now, and the rules about what is said of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.links: dict[Pair, bool] = {}  # bad ones: whether they drop (or are slow)
        self.flaky: set[str] = set()
        self._since_s: dict[Pair, float] = {}
        self._ended_s: dict[Pair, float] = {}
        self._broke: dict[tuple[str, int], float] = {}  # attempts that a defect has ended
        self._begun_s: dict[tuple[str, int], float] = {}  # searches
        self._searched: set[tuple[str, int]] = set()

    # --- defects

    def begin(self, nodes: Collection[str], *, drops: bool = True) -> None:
        """A link between two nodes is bad from now on, or one node is flaky."""
        key, gangs = frozenset(nodes), list(self._world.gangs.values())
        for gang in gangs:
            gang.settle()
        self._since_s.setdefault(key, self._world.now_s)
        if len(key) == 1:
            self.flaky |= key
        else:
            self.links[key] = drops
        for gang in gangs:
            gang.moved()
            if gang.running:
                self.joined(gang)

    def end(self, nodes: Collection[str]) -> None:
        """It is repaired."""
        key, gangs = frozenset(nodes), list(self._world.gangs.values())
        for gang in gangs:
            gang.settle()
        self.flaky -= key if len(key) == 1 else frozenset()
        self.links.pop(key, None)
        self._since_s.pop(key, None)
        self._ended_s[key] = self._world.now_s
        for gang in gangs:
            gang.moved()

    def slow(self, nodes: Collection[str]) -> bool:
        """Whether a link among these nodes is so slow that none of them advances."""
        return any(not drops and pair <= {*nodes} for pair, drops in self.links.items())

    def joined(self, gang: Gang) -> None:
        """An attempt begins to train, or a defect begins while it does."""
        if gang.broken or gang.finished or not self._in(gang.nodes):
            return
        if self.slow(gang.nodes):
            self._broke.setdefault(gang.key, self._world.now_s)
            gang.stands_still()
        else:
            self._world.later(self._world.draw(1.0, 6.0), self._drop, gang)

    def _drop(self, gang: Gang) -> None:
        if gang.running and not gang.broken and not gang.finished and self._in(gang.nodes):
            self._broke.setdefault(gang.key, self._world.now_s)
            gang.lose_peers()

    def fails(self, name: str, others: Collection[str]) -> bool:
        """Whether the check of a node with these others fails."""
        return name in self.flaky or any(frozenset((name, each)) in self.links for each in others)

    def _in(self, nodes: Collection[str]) -> list[Pair]:
        """The defects among some nodes."""
        found = [*self.links, *(frozenset((name,)) for name in sorted(self.flaky))]
        return [defect for defect in found if defect <= {*nodes}]

    # --- rules

    def committed(self, old: Cluster, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """The rules on decisions about unknown culprits."""
        for line in audit:
            key = line.log, line.attempt
            if line.reason == "GROUP_CHECK_STARTED":
                self._begun_s[key] = self._world.now_s
            elif line.reason == "LINK_SUSPECTED":
                self._link(line)
            elif line.reason == "NODE_EVICTED" and line.policy == "group-check":
                self._evicted(line)
            elif line.reason == "GROUP_CHECK_ENDED":
                self._searched.add(key)
                self._found(line, new, audit)
            elif line.reason == "GROUP_OVER_EVICTED":
                self._left(line, old, new)
            elif line.reason == "PLACED":
                self._must_be_searched(line, new)

    def _link(self, line: Audit) -> None:
        """I8: a link that is named is bad, or was a moment ago."""
        named = {line.subject.removeprefix("nodes/")}
        named |= {each.source.removeprefix("nodes/") for each in line.evidence}
        if not self._lately(frozenset(named)):
            self._breaks("I8", f"the link of {sorted(named)} is good: {line.message}")

    def _evicted(self, line: Audit) -> None:
        """I8: a node that leaves for failed checks is flaky, or has trouble of its own."""
        node = self._world.nodes[line.subject.removeprefix("nodes/")]
        excused = node.gpu_lost or node.trouble_until_s > self._world.now_s
        if not excused and self._clear() and not self._lately(frozenset((node.name,))):
            self._breaks("I8", f"{node.name} works well with others: {line.message}")

    def _found(self, line: Audit, new: Cluster, audit: tuple[Audit, ...]) -> None:
        """A search among nodes that answer finds the one defect that there is."""
        job, begun_s = new.jobs.get(line.log), self._begun_s.get((line.log, line.attempt))
        if job is None or begun_s is None or not self._clear():
            return
        if any(not self._well(node) for node in self._world.nodes.values()):
            return
        if "given up" in line.message or "could not be checked" in line.message:
            self._breaks("I9", f"all nodes answer, and a search has no end: {line.message}")
        defects = self._in([slot.node for slot in job.slots])
        if len(defects) != 1 or self._since_s[defects[0]] > begun_s or len(job.slots) < ABLE:
            return
        (defect,) = defects
        wanted = "LINK_SUSPECTED" if len(defect) > 1 else "NODE_EVICTED"
        enforced = self._world.invariants.orders.enforced("group-check")
        enforced = enforced and not (new.breaker.tripped_at_s or new.breaker.evictions[1:])
        for each in audit:
            if enforced and each.mode != "ENFORCE":
                continue
            if each.log == line.log and each.reason == wanted:
                named = [each.subject, *(item.source for item in each.evidence)]
                if defect <= {name.removeprefix("nodes/") for name in named}:
                    return
        self._breaks("I9", f"the search does not find {sorted(defect)}: {line.message}")

    def _left(self, line: Audit, old: Cluster, new: Cluster) -> None:
        """I11: a group is left where the rule is enforced and enough nodes stand by; else not."""
        job = new.jobs[line.log]
        suspects = {each.source.removeprefix("nodes/") for each in line.evidence}
        others = {name for j in new.jobs.values() if j is not job for name in j.spares}
        held = {slot.node for each in old.jobs.values() if each.active for slot in each.slots}
        free = [
            node.name
            for node in self._world.nodes.values()
            if self._well(node) and node.name not in (others | held) and not node.job
            and new.nodes[node.name].disposition is Disposition.SCHEDULABLE
        ]  # fmt: skip
        if line.mode == "ENFORCE":
            if len(free) < len(suspects) and self._clear():
                what = f"{line.log} leaves {sorted(suspects)}"
                self._breaks("I11", f"{what}, and only {free} stand by")
            if not suspects <= {*job.evicted}:
                self._breaks("I11", f"{line.log} was to leave {sorted(suspects)}, and does not")
        elif self._world.invariants.orders.enforced("over-eviction"):
            held_back = new.breaker.tripped_at_s or new.breaker.evictions
            if len(free) >= len(suspects) and not held_back and self._clear():
                self._breaks("I11", f"{line.log} stays on {sorted(suspects)}: {line.outcome}")

    def _must_be_searched(self, line: Audit, new: Cluster) -> None:
        """I9: after an attempt that a hidden defect has ended, its nodes have been checked."""
        before = (line.log, line.attempt - 1)
        ended_s, job = self._broke.get(before), new.jobs[line.log]
        if ended_s is None or before in self._searched or not self._clear():
            return
        gang = self._world.gangs.get(before)
        excused = self._world.invariants.excused_s.get(line.log, 0.0) > ended_s
        if gang is None or excused or job.phase is not JobPhase.PREPARING:
            return
        if all(self._well(self._world.nodes[name]) for name in gang.nodes):
            self._breaks("I9", f"attempt {before} broke for no known cause, and nobody looked")

    def _lately(self, defect: Pair) -> bool:
        ended_s = self._ended_s.get(defect, -LATELY_S)
        return defect in self._since_s or self._world.now_s - ended_s < LATELY_S

    def _well(self, node: SimNode) -> bool:
        return node.up and not node.gpu_lost and node.trouble_until_s < self._world.now_s

    def _clear(self) -> bool:
        """Whether drivers and network have been left alone for long enough."""
        bounds = self._world.invariants.bounds
        return bounds.undisturbed_s() > SETTLED_S and not self._world.network.cut_lately(SETTLED_S)

    def _breaks(self, rule: str, what: Any) -> None:
        self._world.invariants.breaks(rule, str(what))
