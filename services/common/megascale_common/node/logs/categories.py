"""The fixed vocabulary of log classification: categories, roles, actions, domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["root", "secondary", "teardown", "advice", "benign"]
Action = Literal["none", "alert", "restart", "evict_restart", "stop"]
Domain = Literal["node", "network", "storage", "software", "config", "unknown"]
Severity = Literal["info", "warning", "error", "critical"]

# Each category has one domain: where its remedy lies.
DOMAINS: dict[str, Domain] = {
    "unknown": "unknown",
    "gpu_ecc_uncorrectable": "node",
    "gpu_row_remap": "node",
    "gpu_fallen_off_bus": "node",
    "gpu_mmu_fault": "software",
    "gpu_sm_exception": "software",
    "gpu_ctxsw_timeout": "node",
    "gpu_pmu_halt": "node",
    "gpu_init_failed": "node",
    "gpu_busy": "node",
    "gpu_channel_error": "node",
    "gpu_recovery_action": "node",
    "gsp_rpc_timeout": "node",
    "driver_mismatch": "config",
    "nvlink_error": "node",
    "fabric_manager_failure": "node",
    "host_dimm_ce": "node",
    "host_dimm_ue": "node",
    "host_hardware_error": "node",
    "host_lockup": "node",
    "host_hung_task": "node",
    "host_disk_failed": "node",
    "host_oom": "software",
    "pcie_error": "node",
    "cuda_oom": "software",
    "cuda_illegal_access": "software",
    "cuda_device_assert": "software",
    "watchdog_stuck": "software",
    "collective_timeout": "unknown",
    "collective_mismatch": "software",
    "config_duplicate_gpu": "config",
    "config_version_drift": "config",
    "port_in_use": "config",
    "profiler_conflict": "config",
    "numeric_nan": "software",
    "rdma_qp_setup_failed": "network",
    "rdma_retry_exceeded": "network",
    "rdma_local_protection": "software",
    "rdma_remote_error": "network",
    "rdma_flush_secondary": "network",
    "rdma_link_flap": "network",
    "rdma_device_fatal": "node",
    "rdma_mr_limit": "config",
    "memlock_limit": "config",
    "shm_exhausted": "config",
    "file_limit": "config",
    "shm_attach_failed": "software",
    "rendezvous_timeout": "network",
    "rendezvous_closed": "network",
    "storage_write_failed": "storage",
    "storage_quota": "storage",
    "storage_stale_handle": "storage",
    "storage_unreachable": "storage",
    "scheduler_preempted": "config",
    "scheduler_ended": "config",
    "sigkill_unknown": "unknown",
    "peer_closed_secondary": "network",
    "teardown_secondary": "software",
    "benign": "unknown",
}

# Categories for which no log text may evict a node, because faults elsewhere cause them too.
NEVER_EVICT = frozenset(
    {
        "unknown", "cuda_oom", "cuda_illegal_access", "cuda_device_assert", "collective_timeout",
        "collective_mismatch", "config_duplicate_gpu", "watchdog_stuck", "peer_closed_secondary",
        "rdma_flush_secondary", "rdma_retry_exceeded", "rdma_remote_error", "sigkill_unknown",
        "teardown_secondary", "rendezvous_timeout", "rendezvous_closed", "numeric_nan", "host_oom",
        "gpu_mmu_fault", "gpu_sm_exception", "shm_exhausted", "memlock_limit", "benign",
    }
)  # fmt: skip

_ROLES: tuple[Role, ...] = ("root", "secondary", "teardown", "advice", "benign")
_SEVERITIES: dict[Action, Severity] = {
    "none": "info",
    "alert": "warning",
    "restart": "error",
    "stop": "error",
    "evict_restart": "critical",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """The classification of all lines that one signature matches.

    ``name`` identifies the signature and is the fingerprint of its lines on every node.
    ``weak`` marks a line that only wraps or repeats a failure reported by another line.
    ``kernel`` marks a line of the kernel's log, which outranks text of the workers.
    """

    name: str
    category: str
    role: Role
    action: Action
    kernel: bool = False
    weak: bool = False

    def __post_init__(self) -> None:
        if self.category not in DOMAINS:
            raise ValueError(f"category: {self.category!r} is not in the vocabulary; add it there")
        if self.action == "evict_restart" and self.category in NEVER_EVICT:
            raise ValueError(f"action: {self.category} never evicts; use restart or stop")

    @classmethod
    def reported(
        cls, name: str, category: str, role: str, action: str, *, kernel: bool, weak: bool
    ) -> Kind:
        """The kind that another build reports; values unknown to this build never evict a node."""
        known = category if category in DOMAINS else "unknown"
        what: Action = next((one for one in _SEVERITIES if one == action), "alert")
        if what == "evict_restart" and known in NEVER_EVICT:
            what = "restart"
        part: Role = next((one for one in _ROLES if one == role), "secondary")
        return cls(name, known, part, what, kernel=kernel, weak=weak)

    @property
    def severity(self) -> Severity:
        """Severity of a line of this kind, which follows from its action."""
        return _SEVERITIES[self.action]

    @property
    def domain(self) -> Domain:
        """The domain in which this kind has its remedy."""
        return DOMAINS[self.category]
