"""Which checks the next attempt begins with, by the cause of the last one's end: one table.

They run on all its nodes beside those of every attempt (MegaScale section 4.3), so only where the
cause asks for them: what a hang or a symptom without a root calls for is the search among nodes
(:mod:`megascale_driver.core.recovery.searching`), and a process that was killed says nothing of
hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from megascale_driver.analysis.logs.correlation import Verdict
from megascale_driver.core.values.attempt import FaultKind
from megascale_driver.core.values.state import Job

Cause = Literal["communication", "numeric", "storage", "device"]
# Names of diagnostics of the agent, by what broke the attempt.
CHECKS: Final[Mapping[Cause, tuple[str, ...]]] = {
    "communication": ("interface_pairs", "path_mtu", "rdma_pairs", "all_to_all"),
    "numeric": ("bitwise", "gemm"),
    "storage": ("disk_speed",),
    "device": ("memory_bandwidth", "bitwise"),
}
# How much longer than without them an attempt may prepare: the agent ends them after 100 s.
EXTRA_S: Final = 110.0
# Errors of kernels on a device, which software or the device may cause.
_DEVICE: Final = frozenset(
    {"cuda_illegal_access", "gpu_mmu_fault", "gpu_sm_exception", "gpu_channel_error"}
)


def cause_of(job: Job, root: Verdict | None) -> Cause | None:
    """What broke the attempt that has stopped; ``root``: what its logs name."""
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


def after(job: Job, root: Verdict | None) -> tuple[str, ...]:
    """Names of the checks that the next attempt begins with."""
    cause = cause_of(job, root)
    return CHECKS[cause] if cause is not None else ()
