"""The working copy of the state that the core changes during one event.

The functions of the core take a draft and change it; :meth:`Draft.finish` freezes it again. So a
state is replaced as a whole or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megascale_driver.core import accounting
from megascale_driver.core.desired import desired_of
from megascale_driver.core.events import Audit, Effect, Evidence, Outcome, Reason
from megascale_driver.core.policy import Policy
from megascale_driver.core.state import Breaker, Cluster, Job, Node, Request

DRIVER = "driver"


class Draft:
    """A mutable copy of one :class:`Cluster`, used for one event."""

    def __init__(self, state: Cluster, policy: Policy, now_s: float) -> None:
        self.policy = policy
        self.now_s = now_s
        self.state = state
        self.nodes: dict[str, Node] = dict(state.nodes)
        self.jobs: dict[str, Job] = dict(state.jobs)
        self.requests: dict[str, Request] = dict(state.requests)
        self.breaker: Breaker = state.breaker
        self.refusal, self.refusal_detail = "", ""
        self._log_seq = state.log_seq
        self._values: dict[str, Any] = {}
        self._effects: list[Effect] = []
        self._audit: list[Audit] = []
        self._commanded: dict[str, None] = {}

    def set(self, **values: Any) -> None:
        """Set fields of the cluster other than nodes, jobs, requests and breaker."""
        self._values.update(values)

    def cluster(self, name: str) -> Any:
        """A field of the cluster as changed so far, other than nodes, jobs, requests, breaker."""
        return self._values.get(name, getattr(self.state, name))

    def node(self, name: str, **changes: Any) -> Node:
        """Change a node."""
        node = replace(self.nodes[name], **changes)
        self.nodes[name] = node
        return node

    def job(self, name: str, **changes: Any) -> Job:
        """Change a job; a change of phase restarts its timer."""
        old = self.jobs[name]
        if changes.get("phase", old.phase) != old.phase:
            changes.setdefault("timer_s", self.now_s)
            changes["updated_at_s"] = self.now_s
        job = replace(old, **changes)
        if job.phase is not old.phase:
            job = replace(job, goodput=accounting.phase_entered(job, self.nodes, self.now_s))
        self.jobs[name] = job
        return job

    def holder_of(self, node: str) -> Job | None:
        """The job whose attempt holds the node, in this draft."""
        return next(
            (job for job in self.jobs.values() if job.active and job.slot_of(node) is not None),
            None,
        )

    def holders(self) -> dict[str, Job]:
        """Every node that an attempt holds, with its job; one pass for callers that need many."""
        return {slot.node: job for job in self.jobs.values() if job.active for slot in job.slots}

    def command(self, node: str) -> None:
        """Send the node's desired state after the commit, even if it has not changed."""
        self._commanded[node] = None

    def refuse(self, refusal: str, detail: str = "") -> None:
        """Refuse the request; ``detail`` explains it with the numbers of this case."""
        self.refusal, self.refusal_detail = refusal, detail

    def ask(self, effect: Effect) -> None:
        """Have an effect performed after the commit."""
        self._effects.append(effect)

    def log(
        self,
        reason: Reason,
        message: str,
        *,
        subject: str,
        job: str = "",
        actor: str = DRIVER,
        policy: str = "",
        mode: str = "ENFORCE",
        attempt: int = 0,
        evidence: tuple[Evidence, ...] = (),
        outcome: str = "",
    ) -> None:
        """Write a line of the audit log: the job's log or, without a job, the cluster's."""
        if job:
            seq = self.jobs[job].log_seq + 1
            self.job(job, log_seq=seq)
        else:
            self._log_seq += 1
            seq = self._log_seq
        self._audit.append(
            Audit(
                job,
                seq,
                self.now_s,
                actor,
                subject,
                reason,
                message,
                policy,
                mode,
                attempt,
                evidence,
                outcome,
            )
        )

    def finish(self) -> tuple[Cluster, Outcome]:
        """The new state, with every node's desired state up to date, and what follows from it."""
        self._refresh_desired()
        state = replace(
            self.state,
            nodes=self.nodes,
            jobs=self.jobs,
            requests=self.requests,
            breaker=self.breaker,
            log_seq=self._log_seq,
            **self._values,
        )
        follows = (tuple(self._effects), tuple(self._commanded), tuple(self._audit))
        return state, Outcome(*follows, self.refusal, self.refusal_detail)

    def _refresh_desired(self) -> None:
        # Only the nodes of jobs that have changed, and nodes with a new identity: this runs for
        # every event, and most change nothing that a node would do.
        touched: dict[str, None] = {}
        for name, job in self.jobs.items():
            old = self.state.jobs.get(name)
            if old is None or _role(old) != _role(job):
                touched.update(
                    (slot.node, None)
                    for held in (old, job)
                    if held is not None
                    for slot in held.slots
                )
        for name, node in self.nodes.items():
            before = self.state.nodes.get(name)
            if before is not node and (before is None or before.identity is not node.identity):
                touched[name] = None
        if not touched:
            return
        holders = self.holders()
        for name in touched:
            if name in self.nodes:
                wanted = desired_of(self.nodes[name], holders.get(name))
                if wanted != self.nodes[name].desired:
                    self.node(
                        name, desired=wanted, desired_version=self.nodes[name].desired_version + 1
                    )
                    self.command(name)


def _role(job: Job) -> tuple[object, ...]:
    """The part of a job that decides its nodes' desired state."""
    return (
        job.phase,
        job.attempt,
        job.slots,
        job.store_endpoint,
        job.restore,
        job.committer_endpoint,
        job.replica_orders,
        job.failure_count,
        job.profile,
    )
