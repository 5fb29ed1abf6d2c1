"""Faults that the job itself causes, and the checks that the next attempt begins with.

A job that has completed no step would fail the same way again: it ends, and no restart is counted.
A job that has run before ran with this very specification, so something around it has changed (a
mount that is gone for a moment, memory that something else uses): it is retried within its restart
budgets.

Checks: what ended an attempt decides which diagnostics the next one runs on all its nodes, besides
those of every attempt (MegaScale section 4.3). Only some causes ask for any: a hang, or a symptom
without a root, is followed by the search among nodes
(:mod:`megascale_driver.core.recovery.search`), and a killed process shows nothing about hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from megascale_driver.analysis.logs.correlation import Verdict
from megascale_driver.core.draft import Draft
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.rules import Mode
from megascale_job.visible import counted

OUT_OF_MEMORY_PATIENCE = 2  # attempts in a row that run out of memory, without a new step


def has_run(job: Job) -> bool:
    """True if the job has completed a step in any attempt."""
    return max(job.best_step, job.committed_step, job.progress_mark) > 0


def final_fault(job: Job, faults: tuple[Fault, ...]) -> Fault | None:
    """The fault that would break every further attempt; None if another attempt can run."""
    if has_run(job):
        return None
    return next((f for f in faults if f.kind is FaultKind.BAD_JOB), None)


def end(draft: Draft, job: Job, why: str) -> Job:
    """End the job as FAILED when its attempt has stopped; its restart budgets stay as they are."""
    return draft.put_job(replace(draft.jobs[job.name], after_stop=JobPhase.FAILED, stop_reason=why))


def decide_on_size(draft: Draft, job: Job) -> None:
    """End a job that does not fit; if it ran before, it leaves the node instead.

    If it fitted before, something else has taken memory of the node since.
    """
    too_big = [f for f in job.current.faults if f.kind is FaultKind.JOB_TOO_BIG]
    if not has_run(job):
        end(draft, job, too_big[0].message)
        return
    for fault in too_big:
        leave(draft, draft.jobs[job.name], fault, "memory-room", left_by(job))


def decide_on_memory(draft: Draft, job: Job) -> None:
    """Evaluate attempts that ran out of memory; the first one may be due to another process.

    If it is repeated without a new step, the size of the job is the cause: the job ends, or, if it
    ran before, leaves the nodes where it happened.
    """
    exhausted = [f for f in job.current.faults if f.kind is FaultKind.OUT_OF_MEMORY]
    if not exhausted:
        draft.put_job(replace(draft.jobs[job.name], out_of_memory=0))
        return
    # ``restarts_without_progress`` already includes this attempt; 0: the attempt made progress.
    count = job.out_of_memory + 1 if job.restarts_without_progress else 1
    job = draft.put_job(replace(draft.jobs[job.name], out_of_memory=count))
    if count < OUT_OF_MEMORY_PATIENCE:
        return
    if not has_run(job):
        why = f"{counted(count, 'attempt')} in a row ran out of memory: {exhausted[0].message}"
        end(draft, job, why)
        return
    for fault in exhausted:
        leave(draft, draft.jobs[job.name], fault, "out-of-memory", left_by(job))


def leave(
    draft: Draft, job: Job, fault: Fault, policy: str, outcome: str, mode: Mode = "ENFORCE"
) -> None:
    """Take the job off a node that stays in service; ``mode`` is that of ``policy``."""
    if fault.node not in job.evicted:
        draft.put_job(replace(draft.jobs[job.name], evicted=(*job.evicted, fault.node)))
        draft.log_node(
            fault.node,
            job,
            reasons.NODE_EVICTED,
            fault.message,
            policy=policy,
            mode=mode,
            outcome=outcome,
        )


def left_by(job: Job) -> str:
    """Consequence for other jobs when this job leaves a node."""
    return f"job {job.name} takes another node if there is one; other jobs can still use this node"


Cause = Literal["communication", "numeric", "storage", "device"]
# Diagnostics of the agent by the cause that broke the attempt.
CHECKS: Final[Mapping[Cause, tuple[str, ...]]] = {
    "communication": ("interface_pairs", "path_mtu", "rdma_pairs", "all_to_all"),
    "numeric": ("bitwise", "gemm"),
    "storage": ("disk_speed",),
    "device": ("memory_bandwidth", "bitwise"),
}
# Additional time to prepare with these checks: the agent ends them after 100 s.
CHECKS_EXTRA_S: Final = 110.0
# Errors of kernels on a device; software or the device can be the cause.
_DEVICE: Final = frozenset(
    {"cuda_illegal_access", "gpu_mmu_fault", "gpu_sm_exception", "gpu_channel_error"}
)


def check_cause(job: Job, root: Verdict | None) -> Cause | None:
    """The cause of the end of the attempt; ``root``: what its logs name."""
    if job.current.suspects_devices or (root is not None and root.category == "numeric_nan"):
        return "numeric"
    kinds = {fault.kind for fault in job.current.faults}
    if FaultKind.KERNEL_FAULT in kinds:
        return "device"
    if root is not None and root.domain == "network":
        return "communication"
    if root is not None and root.domain == "storage":
        return "storage"
    if root is not None and (root.category in _DEVICE or root.category.startswith("gpu_")):
        return "device"
    return "storage" if FaultKind.CHECKPOINT_CORRUPT in kinds else None


def checks_after(job: Job, root: Verdict | None) -> tuple[str, ...]:
    """Names of the checks that the next attempt begins with."""
    cause = check_cause(job, root)
    return CHECKS[cause] if cause is not None else ()
