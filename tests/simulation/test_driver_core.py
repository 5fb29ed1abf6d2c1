"""The driver's core in a simulated cluster: random faults, invariants, recovery afterwards."""

from __future__ import annotations

import pytest
from tests.harness.simulated_cluster import SimulatedCluster, demo_job, digest

from megascale_driver.core.values.cluster import Cluster, Disposition
from megascale_driver.core.values.events import (
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    UncordonRequested,
)
from megascale_driver.core.values.job import JobPhase

FAULT_ROUNDS = 25
ROUND_S = 6.0
SETTLE_S = 260.0  # a start deadline, a stop deadline and the slowest verdict about silence
DONE = (JobPhase.RUNNING, JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


class Invariants:
    """What must hold after every round, whatever faults it had."""

    def __init__(self, world: SimulatedCluster) -> None:
        self._world = world
        self._attempts: dict[str, int] = {}
        self._audited = 0
        self._seqs: dict[str, int] = {}

    def check(self) -> None:
        state = self._world.state
        self._nodes_belong_to_one_job(state)
        for job in state.jobs.values():
            assert job.attempt >= self._attempts.get(job.name, 0), "attempt numbers rise"
            assert [record.number for record in job.attempts] == list(range(1, job.attempt + 1))
            self._attempts[job.name] = job.attempt
            ranks = [rank for slot in job.slots for rank in slot.ranks]
            assert not job.slots or ranks == list(range(job.config.layout.world_size))
            for slot in job.slots:
                assert len(slot.ranks) % job.config.parallelism.tp == 0, (
                    "tensor parallelism stays inside a node"
                )
            assert job.reason
            assert job.committed_step <= self._world.committed.get(job.name, 0), (
                "false reports change nothing"
            )
        self._no_two_attempts_run()
        self._log_is_gapless()

    def _nodes_belong_to_one_job(self, state: Cluster) -> None:
        used = [slot.node for job in state.jobs.values() if job.active for slot in job.slots]
        used += [name for job in state.jobs.values() for name in job.spares]
        assert len(used) == len(set(used)), f"a node is in two places: {used}"

    def _no_two_attempts_run(self) -> None:
        """A node that is not given up never runs an older attempt beside the current one."""
        for node in self._world.nodes.values():
            job = self._world.state.jobs.get(node.job)
            if (
                job is None
                or not node.up
                or node.lies
                or job.phase is JobPhase.QUEUED
                or node.attempt >= job.attempt
            ):
                continue
            assert node.name in job.evicted or not node.connected or not node.workers_run(), (
                node,
                job,
            )

    def _log_is_gapless(self) -> None:
        for line in self._world.audit[self._audited :]:
            assert line.seq == self._seqs.get(line.log, 0) + 1, line
            self._seqs[line.log] = line.seq
        self._audited = len(self._world.audit)


def hurt(world: SimulatedCluster) -> None:
    """One random fault."""
    name = world.random.choice(list(world.nodes))
    kind = world.random.choice(
        ["crash", "pause", "partition", "kill", "kill", "failover", "none", "none"]
    )
    if kind == "crash":
        world.crash(name, world.random.uniform(0.5, 40.0))
    elif kind == "pause":
        world.pause(name, world.random.uniform(1.0, 40.0))
    elif kind == "partition":
        world.partition(name, world.random.uniform(0.5, 40.0))
    elif kind == "kill":
        world.kill_worker(name)
    elif kind == "failover":
        world.failover()


def history(seed: int) -> SimulatedCluster:
    """A cluster after some rounds with faults and then some without."""
    world = SimulatedCluster(seed, nodes=7)
    rules = Invariants(world)
    world.nodes["n6"].lies = seed % 2 == 0
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a"), "test"))
    world.feed(JobSubmitted(world.now_s, demo_job("b", dp=1, spares=0), "test"))
    for _ in range(FAULT_ROUNDS):
        hurt(world)
        world.run(world.random.uniform(0.5, ROUND_S))
        rules.check()
    world.nodes["n6"].lies = False
    for _ in range(10):
        world.run(SETTLE_S / 10)
        rules.check()
    return world


def intervene(world: SimulatedCluster) -> None:
    """One random request of an operator, helpful or not."""
    name = world.random.choice(list(world.nodes))
    kind = world.random.choice(
        [CordonRequested, CordonRequested, EvictRequested, UncordonRequested, UncordonRequested]
    )
    world.feed(kind(world.now_s, name, "thinks it best", "ada"))


def seeds(first: int, few: int, last: int) -> list[object]:
    """The first few of them in every run, all in the long one."""
    slow = pytest.mark.slow
    return [
        *range(first, first + few),
        *(pytest.param(n, marks=slow) for n in range(first + few, last)),
    ]


@pytest.mark.parametrize("seed", seeds(100, 4, 112))
def test_jobs_run_again_when_operators_change_faulty_nodes_at_random(seed: int) -> None:
    world = SimulatedCluster(seed, nodes=7)
    rules = Invariants(world)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a"), "test"))
    world.feed(JobSubmitted(world.now_s, demo_job("b", dp=1, spares=0), "test"))
    for _ in range(FAULT_ROUNDS):
        hurt(world)
        intervene(world)
        world.run(world.random.uniform(0.5, ROUND_S))
        rules.check()
    for name in world.nodes:
        world.feed(UncordonRequested(world.now_s, name, "all is well", "ada"))
    for _ in range(10):
        world.run(SETTLE_S / 10)
        rules.check()
    assert all(node.disposition is Disposition.SCHEDULABLE for node in world.state.nodes.values())
    for job in world.state.jobs.values():
        assert job.phase in DONE, (job.phase, job.reason, world.audit[-12:])


@pytest.mark.parametrize("seed", seeds(0, 8, 24))
def test_jobs_run_again_after_any_history_of_faults(seed: int) -> None:
    print(f"seed {seed}: history({seed}) replays it")
    world = history(seed)
    for job in world.state.jobs.values():
        assert job.phase in DONE, (job.phase, job.reason, world.audit[-12:])
    for job_name, _, restore in world.opened:
        if restore.source == "storage":
            assert restore.step <= world.committed[job_name]


def test_a_seed_replays_the_same_history() -> None:
    assert digest(history(5).audit) == digest(history(5).audit)


def running(seed: int, nodes: int, **options: int) -> SimulatedCluster:
    """A world in which job ``a`` runs."""
    world = SimulatedCluster(seed, nodes=nodes, switches=1)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", **options), "test"))
    world.run(10.0)
    assert world.state.jobs["a"].phase is JobPhase.RUNNING
    return world


def times_of(world: SimulatedCluster, reason: str) -> list[float]:
    return [line.at_s for line in world.audit if line.reason == reason]


def test_a_crashed_node_is_found_at_once_and_its_spare_takes_over() -> None:
    world = running(1, nodes=3)
    job = world.state.jobs["a"]
    lost, kept, spare = job.slots[1].node, job.slots[0], job.spares[0]
    at_s = world.now_s
    world.crash(lost, 1000.0)
    world.run(15.0)
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.RUNNING and job.attempt == 2
    assert [slot.node for slot in job.slots] == [kept.node, spare]
    assert job.slots[0].ranks == kept.ranks
    assert times_of(world, "NODE_DEAD")[0] - at_s <= 1.0
    assert job.evicted == (lost,) and job.restarts == 1


def test_a_stopped_node_with_open_sockets_is_dead_within_fifteen_seconds() -> None:
    for seed in range(5):
        world = running(seed, nodes=3)
        world.run(seed * 1.1)
        at_s = world.now_s
        world.pause(world.state.jobs["a"].slots[0].node, 300.0)
        world.run(40.0)
        assert 8.0 <= times_of(world, "NODE_DEAD")[0] - at_s <= 15.0
        assert world.state.jobs["a"].phase is JobPhase.RUNNING


def test_survivors_restore_from_their_own_memory_after_a_worker_died() -> None:
    world = running(3, nodes=2, spares=0)
    world.kill_worker(world.state.jobs["a"].slots[1].node)
    world.run(15.0)
    _, attempt, restore = world.opened[-1]
    assert attempt == 2 and restore.source == "memory"
    assert restore.step >= 5


def test_a_new_leader_adopts_a_running_job_without_a_new_attempt() -> None:
    world = running(4, nodes=3)
    world.failover()
    world.run(60.0)
    assert (world.state.jobs["a"].attempt, world.state.jobs["a"].phase) == (1, JobPhase.RUNNING)


def test_a_driver_that_is_cut_off_does_not_tear_jobs_apart() -> None:
    world = SimulatedCluster(6, nodes=24, switches=4)
    world.run(2.0)
    for number in range(12):
        world.feed(JobSubmitted(world.now_s, demo_job(f"j{number}", dp=1, spares=0), "test"))
    world.run(10.0)
    held = [slot.node for job in world.state.jobs.values() for slot in job.slots]
    for name in held:
        world.pause(name, 100.0)
    world.run(90.0)

    def taken_apart() -> int:
        return sum(line.reason == "NODE_EVICTED" for line in world.audit)

    assert len(held) == 12 and taken_apart() == 0 and times_of(world, "BREAKER_TRIPPED")
    world.failover()
    assert world.state.breaker.tripped_at_s, "the breaker survives a change of leader"
    world.run(500.0)
    assert times_of(world, "BREAKER_RESET") and taken_apart() == 0
    assert all(job.phase is JobPhase.RUNNING for job in world.state.jobs.values())


def test_an_evicted_node_gets_no_work_and_its_job_continues_elsewhere() -> None:
    world = running(7, nodes=3)
    victim = world.state.jobs["a"].slots[0].node
    world.feed(EvictRequested(world.now_s, victim, "bad fan", "operator"))
    world.run(20.0)
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.RUNNING and victim not in [slot.node for slot in job.slots]
    assert world.state.nodes[victim].disposition is Disposition.QUARANTINED
    assert job.restarts == 0, "an operator's request costs the job no restart"
    world.failover()
    assert world.state.nodes[victim].disposition is Disposition.QUARANTINED


def test_a_job_that_fails_without_progress_ends_with_the_reason() -> None:
    world = running(8, nodes=2, spares=0, max_restarts_without_progress=2)
    world.run(20.0)
    for _ in range(6):
        for node in world.nodes.values():
            world.kill_worker(node.name)
        world.steps["a"] = (0, 0, world.now_s + 1e6)  # no further step is completed
        world.run(15.0)
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.FAILED
    assert "max_restarts_without_progress" in job.reason and "SIGKILL" in job.reason
