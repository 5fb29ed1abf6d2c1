"""Which lines of the audit log alert somebody, and how urgently: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from megascale_driver.core.values.reasons import Reason

Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)  # the least urgent first

# critical: a person is needed now; warning: the system deals with it, a person should know; info:
# nothing is wrong. What is not here alerts nobody.
ALERTS: Final[Mapping[Reason, Severity]] = {
    "JOB_FAILED": "critical",
    "BREAKER_TRIPPED": "critical",
    "ROW_UNREADABLE": "critical",
    "SWITCH_LOST": "critical",
    "CHECKPOINT_REFUSED": "critical",
    "CHECKPOINT_FAILED": "critical",
    "SPARES_SHORT": "warning",
    "NODE_DEAD": "warning",
    "NODE_EVICTED": "warning",
    "HANG_SUSPECTED": "warning",
    "WORKERS_MISSING": "warning",
    "LOSS_DIVERGED": "warning",
    "STRAGGLER": "warning",
    "TRAFFIC_STOPPED": "warning",
    "TRAFFIC_DECLINED": "warning",
    "TRAFFIC_FLUCTUATES": "warning",
    "SLOWER_THAN_PLAN": "warning",
    "KERNEL_FAULT": "warning",
    "LOG_ROOT_FOUND": "warning",
    "WORKER_OUT_OF_MEMORY": "warning",
    "SNAPSHOT_DAMAGED": "warning",
    "REPLICA_FAILED": "warning",
    "SOFTWARE_SUSPECTED": "warning",
    "CHECK_REPEATED": "warning",
    "GROUP_OVER_EVICTED": "warning",
    "LINK_SUSPECTED": "warning",
    "MESSAGE_REFUSED": "warning",
    "CHECKPOINT_DAEMON_RESTARTED": "warning",
    "RESUME_DIFFERS": "warning",
    "JOB_SUCCEEDED": "info",
    "JOB_SUSPENDED": "info",
    "JOB_PREEMPTED": "info",
    "LEADER_ELECTED": "info",
    "BREAKER_RESET": "info",
}


def severity_of(reason: str) -> Severity | None:
    """None: the line alerts nobody."""
    return ALERTS.get(reason)  # type: ignore[call-overload, no-any-return]


def rank_of(severity: Severity) -> int:
    """Higher is more urgent."""
    return SEVERITIES.index(severity)
