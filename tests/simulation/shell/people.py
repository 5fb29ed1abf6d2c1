"""What operators order in a storm, right and by mistake, beside evictions, cordons and small jobs.

An order may reach the drivers long after it was given, because they were away; what follows from it
(a job that resumes, a node that gets work again) is asked for once the order itself was answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.shell.figures import MAIN_JOB

from megascale.v1 import driver_pb2, types_pb2
from megascale_job.wire import spec as job_spec

if TYPE_CHECKING:
    from tests.simulation.shell.faults import Fault
    from tests.simulation.shell.nodes import SimNode
    from tests.simulation.shell.world import World

TENANT = "default"  # of jobs that name none
SAVING_S = 1200.0  # for which an order that saves first may still stop its job
PEOPLE = (
    ("suspend", 3), ("restart", 3), ("drain", 3), ("drain_mistake", 2), ("evict_now", 2),
    ("update", 3), ("delete", 2), ("observe", 2), ("reset_breaker", 2), ("wrong_orders", 2),
    ("repeated_verbs", 2), ("go_back", 3), ("quota", 2),
)  # fmt: skip
# Rules that somebody tries out; a storm ends with all of them enforced.
TRIED = ("silence", "hang", "self-check", "repeated-failure")


class People:
    """Orders of operators; :class:`tests.simulation.shell.faults.Weather` carries them out."""

    _world: World
    _small_jobs: int

    def _node(self, fault: Fault) -> SimNode:
        raise NotImplementedError

    def _order(self, method: str, then: Callable[[], None] | None = None, **fields: Any) -> None:
        """Send a request, and do something when it was answered."""
        request = getattr(driver_pb2, f"{method}Request")(**{"reason": "by hand", **fields})
        self._world.operators.send(method, request, then)

    def _job(self, fault: Fault) -> str:
        """The main job, or a small one that was submitted lately."""
        if fault.pick % 3 == 0 and self._small_jobs:
            return f"small-{max(1, self._small_jobs - fault.pick // 3 % 2)}"
        return MAIN_JOB

    def _excuse(self, job: str) -> None:
        """From now on somebody's order may stop the job."""
        self._world.invariants.excused_s[job] = self._world.now_s + SAVING_S

    def _excuse_node(self, node: SimNode) -> None:
        node.trouble_until_s = max(node.trouble_until_s, self._world.now_s + SAVING_S)
        for job in self._world.jobs_on(node):
            self._excuse(job)

    def _suspend(self, fault: Fault) -> None:
        """Suspend a job, and resume it, sometimes before it has stopped."""
        world, job = self._world, self._job(fault)
        rest_s = (2.0, 15.0, 90.0, 400.0)[fault.pick // 8 % 4]

        def resume() -> None:
            world.at(world.now_s + rest_s, self._order_job, "ResumeJob", job)

        self._order_job("SuspendJob", job, resume)

    def _order_job(self, method: str, job: str, then: Callable[[], None] | None = None) -> None:
        def answered() -> None:
            self._excuse(job)
            if then is not None:
                then()

        self._excuse(job)
        self._order(method, answered, name=job)

    def _restart(self, fault: Fault) -> None:
        job = self._job(fault)
        self._excuse(job)
        self._order("RestartJob", lambda: self._excuse(job), name=job, now=bool(fault.pick % 2))

    def _update(self, fault: Fault) -> None:
        """New values for the next attempt, which may be asked for at once."""
        job = self._job(fault)
        config = self._world.operators.configs.get(job)
        if config is None:
            return
        recovery = replace(config.recovery, max_restarts_without_progress=900 + fault.pick % 100)
        spec = job_spec.to_proto(replace(config, recovery=recovery))
        self._excuse(job)
        self._order(
            "UpdateJob", lambda: self._excuse(job), spec=spec, restart=bool(fault.pick // 2 % 2)
        )

    def _go_back(self, fault: Fault) -> None:
        """Restart a job from an older checkpoint, by name: or from one that it does not have."""
        job = self._job(fault)
        commits = self._world.storage_of(job).commits
        steps = [step for step, _ in commits[-4:]] or [0]
        step = steps[fault.pick // 8 % len(steps)] + (fault.pick % 5 == 0)
        self._excuse(job)
        self._order("RestartJob", lambda: self._excuse(job), name=job, from_step=step)

    def _quota(self, fault: Fault) -> None:
        """Bound what the jobs of the usual tenant may hold, too low, and lift that later."""
        world = self._world

        def lift() -> None:
            world.at(world.now_s + fault.for_s * 2, self._lift_quota)

        self._order("SetQuota", lift, tenant=TENANT, devices=fault.pick % 12)

    def _lift_quota(self) -> None:
        self._order("SetQuota", tenant=TENANT)

    def _delete(self, fault: Fault) -> None:
        """Delete a small job, which is refused while it has not ended."""
        if self._small_jobs:
            self._order("DeleteJob", name=f"small-{1 + fault.pick % self._small_jobs}")

    def _drain(self, fault: Fault, rest_s: float = 600.0, method: str = "DrainNode") -> None:
        """Empty a node, and give it work again when what was to be done there is done."""
        world, node = self._world, self._node(fault)

        def emptied() -> None:
            self._excuse_node(node)
            world.at(world.now_s + rest_s, self._uncordon, node.name)

        self._excuse_node(node)
        fields = {"now": True} if method == "EvictNode" else {}
        self._order(method, emptied, name=node.name, **fields)

    def _uncordon(self, node: str) -> None:
        self._order("UncordonNode", name=node)

    def _drain_mistake(self, fault: Fault) -> None:
        """The wrong node: it is uncordoned before its job has saved, or soon after."""
        self._drain(fault, (0.5, 5.0, 30.0)[fault.pick // 8 % 3])

    def _evict_now(self, fault: Fault) -> None:
        self._drain(fault, 300.0 + fault.for_s, "EvictNode")

    def _observe(self, fault: Fault) -> None:
        """Try a rule out: its verdicts are only written down for a while."""
        world, rule = self._world, TRIED[fault.pick % len(TRIED)]

        def enforce() -> None:
            world.at(world.now_s + fault.for_s * 4, self._enforce, rule)

        mode = types_pb2.POLICY_MODE_OBSERVE
        self._order("SetPolicy", enforce, rule=rule, mode=mode)

    def _enforce(self, rule: str) -> None:
        self._order("SetPolicy", rule=rule, mode=types_pb2.POLICY_MODE_ENFORCE)

    def _reset_breaker(self, fault: Fault) -> None:
        self._order("ResetBreaker")

    def _wrong_orders(self, fault: Fault) -> None:
        """Names that do not exist, reasons that are missing, orders that make no sense now."""
        for method in ("SuspendJob", "ResumeJob", "RestartJob", "DeleteJob", "DrainNode"):
            self._order(method, name="nobody")
        self._order("ResumeJob", name=MAIN_JOB, reason="")
        self._order("DeleteJob", name=MAIN_JOB, validate_only=True)
        self._order("DrainNode", name="n0", validate_only=True)
        self._order("RestartJob", name=MAIN_JOB, validate_only=True)
        self._order("SetPolicy", rule="weather", mode=types_pb2.POLICY_MODE_OBSERVE)
        self._order("SetPolicy", rule="hang")
        self._order("UpdateJob")

    def _repeated_verbs(self, fault: Fault) -> Callable[[], None]:
        """Orders that somebody in between sends twice."""
        operators = self._world.operators
        operators.repeats = 1.0
        (self._suspend, self._restart, self._drain)[fault.pick % 3](fault)
        return lambda: setattr(operators, "repeats", 0.0)

    def _settle_orders(self) -> None:
        """Take back what is still ordered: all jobs may run, all rules are enforced."""
        for rule in TRIED:
            self._enforce(rule)
        self._lift_quota()
        for name in self._world.operators.configs:
            self._order_job("ResumeJob", name)
