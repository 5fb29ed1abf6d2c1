"""Jobs whose stored rows this build cannot read: they are left as they are, in etcd and on nodes.

A later build may have written the rows, or a disk has damaged them. The job may be in training, and
its workers need no driver: they go on, and their nodes get no other work and no order, until
somebody starts a build that reads the rows, restores them, or deletes the job. Which nodes these
are is known from their own reports, since the rows may not say.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale_driver.core.values.state import AttemptPhase, Disposition, Node

_JOBS = "jobs/"
_MANUAL = "manual"  # the policy of what operators order


def key_of(job: str) -> str:
    """The key of a job among the rows that cannot be read."""
    return f"{_JOBS}{job}"


def sentence(job: str, problem: str) -> str:
    """What is wrong with the job, what the driver does about it, and what its operator may do."""
    return (
        f"the stored rows of job {job} cannot be read by this build, so its workers go on and "
        f"nothing is ordered: {problem}; start the build that wrote them, or restore them from a "
        f"backup, or stop its workers and remove its rows with `megascale delete {job}`"
    )


def job_on(unreadable: Mapping[str, str], node: Node) -> str:
    """The unreadable job that the node runs by its own report; "" if it runs none."""
    report = node.report
    if report is None or report.phase is AttemptPhase.IDLE or key_of(report.job) not in unreadable:
        return ""
    return report.job


def withheld(unreadable: Mapping[str, str], node: Node) -> bool:
    """Whether a node that no job holds gets no order now.

    It runs such a job, or has not said yet what it runs. One that an operator has evicted gets its
    order: to stop.
    """
    if not any(key.startswith(_JOBS) for key in unreadable):
        return False
    if node.disposition is Disposition.QUARANTINED and node.disposition_policy == _MANUAL:
        return False
    return node.report is None or bool(job_on(unreadable, node))
