"""The working copy of the state that the core changes during one event.

The functions of the core take a draft and change it; :meth:`Draft.finish` freezes it again. So a
state is replaced as a whole or not at all.

Jobs whose stored rows this build cannot read are left as they are, in etcd and on their nodes. A
later build may have written the rows, or a disk has damaged them, and the job may be training. Its
workers need no driver: they continue, and their nodes get no other work and no order until an
operator starts a build that reads the rows, restores them, or deletes the job. The rows may not
name these nodes, so they are found from their own reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict, Unpack

from megascale_driver.core.values import accounting
from megascale_driver.core.values.attempt import Attempt, Fault
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Breaker,
    Cluster,
    Disposition,
    Node,
    Request,
    Root,
    Tenant,
    desired_of,
)
from megascale_driver.core.values.events import Audit, Effect, Evidence, Finding, Outcome
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.overlay import Working
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.reasons import Reason
from megascale_driver.core.values.rules import mode_of

DRIVER = "driver"
MANY = 64  # nodes with something new in one event


class AuditFields(TypedDict, total=False):
    """Fields of a line of the audit log that have defaults, as in :class:`Audit`."""

    actor: str  # who decided; the driver by default
    policy: str
    mode: str
    evidence: tuple[Evidence, ...]
    outcome: str


class Draft:
    """A working copy of one :class:`Cluster`, used for one event; it copies what is touched."""

    def __init__(self, state: Cluster, policy: Policy, now_s: float) -> None:
        self.policy = policy
        self.now_s = now_s
        self.state = state
        self.nodes: Working[Node] = Working(state.nodes)
        self.jobs: Working[Job] = Working(state.jobs)
        self.requests: Working[Request] = Working(state.requests)
        self.tenants: Working[Tenant] = Working(state.tenants)
        self.breaker: Breaker = state.breaker
        self.leader_since_s = state.leader_since_s
        self.grace_until_s = state.grace_until_s
        self.silence_hold_until_s = state.silence_hold_until_s
        # Silent nodes by switch, found once in an event (faults.breaker).
        self.silent_switches: dict[str, list[str]] | None = None
        self.queue_due_s = state.queue_due_s
        self.queue_decided_s = state.queue_decided_s
        self.forget_due_s = state.forget_due_s
        self.unreadable = state.unreadable
        self.refusal = ""
        self.refusal_detail = ""
        self._log_seq = state.log_seq
        self._effects: list[Effect] = []
        self._audit: list[Audit] = []
        self._commanded: dict[str, None] = {}

    def put_node(self, node: Node) -> Node:
        """Replace a node by a changed copy."""
        self.nodes[node.name] = node
        return node

    def put_job(self, job: Job) -> Job:
        """Replace a job by a changed copy; a change of phase restarts its timer."""
        if job.phase is not self.jobs[job.name].phase:
            job = replace(job, timer_s=self.now_s, updated_at_s=self.now_s)
            job = replace(job, goodput=accounting.phase_entered(job, self.nodes, self.now_s))
        self.jobs[job.name] = job
        return job

    def put_attempt(self, name: str, attempt: Attempt) -> Job:
        """Replace the newest attempt of a job by a changed copy."""
        return self.put_job(replace(self.jobs[name], current=attempt))

    def fault(self, name: str, fault: Fault) -> Job:
        """Record what broke the newest attempt of a job."""
        attempt = self.jobs[name].current
        return self.put_attempt(name, replace(attempt, faults=(*attempt.faults, fault)))

    @property
    def only_nodes_changed(self) -> bool:
        """True if only nodes have changed, and nothing follows from that."""
        return not (
            self.jobs.touched or self._audit or self._effects or self._commanded or self.refusal
        )

    def enforced(self, rule: str) -> bool:
        """True if the rule's verdicts take effect (:mod:`megascale_driver.core.values.reasons`)."""
        return mode_of(self.breaker.modes, rule) == "ENFORCE"

    def remember_roots(self, roots: tuple[Root, ...]) -> None:
        """Keep recent findings of self-checks."""
        self.breaker = replace(self.breaker, roots=roots)

    def holder_of(self, node: str) -> Job | None:
        """The job whose attempt holds the node, in this draft."""
        return next(
            (job for job in self.jobs.values() if job.active and job.slot_of(node) is not None),
            None,
        )

    def holders(self) -> dict[str, Job]:
        """Every node that an attempt holds, with its job; for callers that need many."""
        return {slot.node: job for job in self.jobs.values() if job.active for slot in job.slots}

    def command(self, node: str) -> None:
        """Send the node's desired state after the commit, even if it has not changed."""
        self._commanded[node] = None

    def refuse(self, refusal: str, detail: str = "") -> None:
        """Refuse the request; ``detail`` explains it with the numbers of this case."""
        self.refusal = refusal
        self.refusal_detail = detail

    def known_job(self, name: str) -> Job | None:
        """The job of a request; None, with the request refused, if it is not in the state."""
        if (job := self.jobs.get(name)) is None:
            self.refuse_unknown_job(name)
        return job

    def refuse_unknown_job(self, name: str) -> None:
        """Refuse the request for a job that is not in the state."""
        problem = self.unreadable.get(unreadable_key(name))
        if problem is None:
            self.refuse("JOB_NOT_FOUND")
        else:
            self.refuse("JOB_UNREADABLE", unreadable_sentence(name, problem))

    def ask(self, effect: Effect) -> None:
        """Have an effect performed after the commit."""
        self._effects.append(effect)

    def running(self, found: Finding) -> Job | None:
        """The job of a finding; None if that attempt no longer runs."""
        job = self.jobs.get(found.job)
        if job is None or job.attempt != found.attempt or job.phase is not JobPhase.RUNNING:
            return None
        return job

    def once(self, job: Job, line: str) -> bool:
        """True the first time that ``line`` is named in an attempt; a new leader starts over.

        So detectors that see the same thing repeatedly write one line about it.
        """
        attempt = self.jobs[job.name].current
        if line in attempt.written:
            return False
        self.put_attempt(job.name, replace(attempt, written=(*attempt.written, line)))
        return True

    def log(
        self, reason: Reason, message: str, *, subject: str, **line: Unpack[AuditFields]
    ) -> None:
        """Write a line of the cluster's audit log."""
        self._log_seq += 1
        self._write("", self._log_seq, reason, message, subject, **line)

    def log_job(
        self,
        job: Job,
        reason: Reason,
        message: str,
        *,
        subject: str = "",
        attempt: int | None = None,
        **line: Unpack[AuditFields],
    ) -> None:
        """Write a line of a job's log, about the job and its newest attempt unless given."""
        seq = self.jobs[job.name].log_seq + 1
        self.put_job(replace(self.jobs[job.name], log_seq=seq))
        number = job.attempt if attempt is None else attempt
        about = subject or f"jobs/{job.name}"
        self._write(job.name, seq, reason, message, about, attempt=number, **line)

    def log_node(
        self, name: str, job: Job | None, reason: Reason, message: str, **line: Unpack[AuditFields]
    ) -> None:
        """Write a line about a node, into the log of ``job`` if there is one."""
        if job is not None:
            self.log_job(job, reason, message, subject=f"nodes/{name}", **line)
        else:
            self.log(reason, message, subject=f"nodes/{name}", **line)

    def _write(
        self,
        log: str,
        seq: int,
        reason: Reason,
        message: str,
        subject: str,
        attempt: int = 0,
        **line: Unpack[AuditFields],
    ) -> None:
        line.setdefault("actor", DRIVER)
        self._audit.append(
            Audit(
                log=log,
                seq=seq,
                at_s=self.now_s,
                subject=subject,
                reason=reason.name,
                message=message,
                attempt=attempt,
                **line,
            )
        )

    def finish(self) -> tuple[Cluster, Outcome]:
        """The new state, with every node's desired state up to date, and what follows from it."""
        # Last, so that several changes of a job in one event give its nodes one new version.
        self._refresh_desired()
        state = replace(
            self.state,
            nodes=self.nodes.frozen(),
            jobs=self.jobs.frozen(),
            requests=self.requests.frozen(),
            tenants=self.tenants.frozen(),
            breaker=self.breaker,
            log_seq=self._log_seq,
            leader_since_s=self.leader_since_s,
            grace_until_s=self.grace_until_s,
            silence_hold_until_s=self.silence_hold_until_s,
            queue_due_s=self.queue_due_s,
            queue_decided_s=self.queue_decided_s,
            forget_due_s=self.forget_due_s,
            unreadable=self.unreadable,
        )
        commanded = tuple(name for name in self._commanded if not self._withheld(name))
        outcome = Outcome(
            effects=tuple(self._effects),
            commanded=commanded,
            audit=tuple(self._audit),
            refusal=self.refusal,
            refusal_detail=self.refusal_detail,
        )
        return state, outcome

    def _withheld(self, name: str) -> bool:
        """True if the node may run an unreadable job: an order would stop its workers."""
        node = self.nodes.get(name)
        return (
            node is not None
            and order_withheld(self.unreadable, node)
            and self.holder_of(name) is None
        )

    def _refresh_desired(self) -> None:
        # Only the nodes of changed jobs, and nodes with a new identity: this runs for every event,
        # and most change nothing that a node would do.
        stale: dict[str, None] = {}
        for name in self.jobs.touched:
            old, job = self.state.jobs.get(name), self.jobs.get(name)
            if old is None or job is None or _role(old) != _role(job):
                stale.update(
                    (slot.node, None)
                    for held in (old, job)
                    if held is not None
                    for slot in held.slots
                )
        for name in self.nodes.touched:
            before, node = self.state.nodes.get(name), self.nodes.get(name)
            if node is not None and (before is None or before.identity is not node.identity):
                stale[name] = None
        # For many nodes one pass: a lookup for a single node goes through all jobs.
        holder_of = self.holders().get if len(stale) > MANY else self.holder_of
        for name in stale:
            known = self.nodes.get(name)
            if known is None:
                continue
            wanted = desired_of(known, holder_of(name))
            if wanted != known.desired:
                version = known.desired_version + 1
                self.put_node(replace(known, desired=wanted, desired_version=version))
                self.command(name)


def _role(job: Job) -> tuple[object, ...]:
    """The part of a job that decides its nodes' desired state."""
    return (
        job.phase,
        job.attempt,
        job.slots,
        job.current.store_endpoint,
        job.current.restore,
        job.current.committer_endpoint,
        job.current.replica_orders,
        job.current.failure_count,
        job.profile,
        job.current.leaving,
    )


_JOBS = "jobs/"
_MANUAL = "manual"  # the policy of what operators order


def unreadable_key(job: str) -> str:
    """The key of a job among the unreadable rows."""
    return f"{_JOBS}{job}"


def unreadable_sentence(job: str, problem: str) -> str:
    """The problem of the job, what the driver does about it, and what its operator can do."""
    return (
        f"the stored rows of job {job} cannot be read by this build, so its workers continue and "
        f"nothing is ordered: {problem}; start the build that wrote them, or restore them from a "
        f"backup, or stop its workers and remove its rows with `megascale delete {job}`"
    )


def unreadable_job_on(unreadable: Mapping[str, str], node: Node) -> str:
    """The unreadable job that the node runs by its own report; "" if it runs none."""
    report = node.report
    if (
        report is None
        or report.phase is AttemptPhase.IDLE
        or unreadable_key(report.job) not in unreadable
    ):
        return ""
    return report.job


def order_withheld(unreadable: Mapping[str, str], node: Node) -> bool:
    """True if a node that no job holds must get no order now.

    It runs an unreadable job, or has not reported yet what it runs. A node that an operator has
    evicted does get its order: to stop.
    """
    if not any(key.startswith(_JOBS) for key in unreadable):
        return False
    if node.disposition is Disposition.QUARANTINED and node.disposition_policy == _MANUAL:
        return False
    return node.report is None or bool(unreadable_job_on(unreadable, node))
