"""The main job trains as long as the fleet has nodes for it, whatever fails meanwhile.

Its newest step is no measure of that: an operator may have it go back by hours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.shell.figures import MAIN_JOB

from megascale_driver.core.values.cluster import Disposition, Liveness
from megascale_driver.core.values.job import JobPhase

if TYPE_CHECKING:
    from tests.simulation.shell.training import Gang
    from tests.simulation.shell.world import World

    from megascale_driver.core.values.cluster import Cluster

LOOK_S = 600.0
# Some twenty restarts; at the published rates 1,536 nodes have one fault in two hours.
STANDS_S = 3 * 3600.0


class Advance:
    """Since when the main job has not trained, without a reason for that."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s = self._looked_s = world.now_s

    def look(self) -> None:
        """Look now and then; a job that trains at no look for too long breaks the rule."""
        world = self._world
        if world.now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = world.now_s
        trains = any(_trains(gang) for gang in world.gangs_of(MAIN_JOB))
        leader = world.leader()
        wanted = self._wanted(leader.engine.state) if leader is not None else 0
        well = self._well(leader.engine.state) if leader is not None else 0
        disturbed = world.invariants.bounds.disturbed
        if trains or disturbed or not wanted or well < wanted:
            self._since_s = world.now_s
        elif world.now_s - self._since_s > STANDS_S:
            world.invariants.breaks(
                "advance",
                f"{MAIN_JOB} has not trained for {(world.now_s - self._since_s) / 3600:.1f} h,"
                f" and {well} nodes are well, of which it needs {wanted}",
            )

    def _well(self, state: Cluster) -> int:
        """The nodes that the driver may use and that would train."""
        usable = (
            name
            for name, node in state.nodes.items()
            if node.liveness is Liveness.ALIVE and node.disposition is Disposition.SCHEDULABLE
        )
        nodes = self._world.nodes
        return sum(nodes[n].up and not (nodes[n].paused or nodes[n].gpu_lost) for n in usable)

    def _wanted(self, state: Cluster) -> int:
        """How many nodes the main job trains on; 0 while it is not to train."""
        job = state.jobs.get(MAIN_JOB)
        if job is None or job.terminal or job.phase is JobPhase.SUSPENDED:
            return 0
        return job.config.layout.world_size // self._world.devices


def _trains(gang: Gang) -> bool:
    return gang.running and not (gang.broken or gang.stalled or gang.finished)
