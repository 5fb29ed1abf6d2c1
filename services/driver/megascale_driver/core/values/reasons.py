"""The reasons of lines of the audit log.

The rules whose verdicts an operator may have observed instead of enforced.

In OBSERVE a rule only writes what it would have done. A rule that is about a fact (a dead process,
a failed self-check) is enforced unless somebody says otherwise; one that may cost good nodes their
work (over-eviction) is observed until somebody has it enforced.

Which lines of the audit log alert somebody, and how urgently: one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

# Every reason of a line of the audit log; docs/operations.md has what to do for each.
Reason = Literal[
    "LEADER_ELECTED",
    "ROW_UNREADABLE",
    "MESSAGE_REFUSED",
    "SUBMITTED",
    "PLACED",
    "ATTEMPT_PREPARING",
    "ATTEMPT_OPENED",
    "ATTEMPT_STARTED",
    "ATTEMPT_STOPPED",
    "WORKER_EXITED",
    "WORKER_OUT_OF_MEMORY",
    "KERNEL_FAULT",
    "LOG_ROOT_FOUND",
    "HANG_SUSPECTED",
    "HANG_STACKS",
    "WORKERS_MISSING",
    "LOSS_DIVERGED",
    "STRAGGLER",
    "TRAFFIC_STOPPED",
    "TRAFFIC_DECLINED",
    "TRAFFIC_FLUCTUATES",
    "SLOWER_THAN_PLAN",
    "AS_PLANNED",
    "SPARE_ASSIGNED",
    "SPARES_SHORT",
    "CHECKPOINT_COMMITTED",
    "CHECKPOINT_REFUSED",
    "RESUME_DIFFERS",
    "CHECKPOINT_FAILED",
    "CHECKPOINT_SKIPPED",
    "SNAPSHOT_DAMAGED",
    "CHECKPOINT_DAEMON_RESTARTED",
    "REPLICA_FAILED",
    "PROFILE_REQUESTED",
    "PROFILE_WRITTEN",
    "PROFILE_MISSED",
    "PROFILE_CANCELLED",
    "CANCEL_REQUESTED",
    "RESTART_REQUESTED",
    "UPDATE_REQUESTED",
    "JOB_WAITS",
    "SUSPEND_REQUESTED",
    "PREEMPTION_ORDERED",
    "LEAVE_WITHDRAWN",
    "JOB_SUSPENDED",
    "JOB_PREEMPTED",
    "JOB_RESUMED",
    "JOB_DELETED",
    "JOB_SUCCEEDED",
    "JOB_FAILED",
    "JOB_CANCELLED",
    "NODE_JOINED",
    "NODE_RESTARTED",
    "NODE_SUSPECT",
    "NODE_DEAD",
    "NODE_FORGOTTEN",
    "NODE_EVICTED",
    "NODE_DRAINING",
    "NODE_CORDONED",
    "NODE_UNCORDONED",
    "SOFTWARE_SUSPECTED",
    "CHECK_REPEATED",
    "GROUP_CHECK_STARTED",
    "GROUP_CHECK_ENDED",
    "GROUP_OVER_EVICTED",
    "LINK_SUSPECTED",
    "SWITCH_LOST",
    "POLICY_SET",
    "QUOTA_SET",
    "ALERTS_SILENCED",
    "SILENCE_ENDED",
    "BREAKER_TRIPPED",
    "BREAKER_RESET",
]


Mode = Literal["ENFORCE", "OBSERVE"]
# Every rule with what it does when it is enforced.
RULES: Mapping[str, str] = {
    "silence": "a node without a sign of life is declared dead, and its job leaves it",
    "switch-lost": "the silent nodes of a switch are given up together",
    "hang": "an attempt of which no rank advances is ended",
    "no-workers": "an attempt of which no node reports workers for ten minutes is ended",
    "self-check": "a node that fails a self-check is quarantined",
    "repeated-check": "a node that is slower than the fleet in a check twice in a row is evicted",
    "group-check": "a node that fails checks with good partners is quarantined",
    "kernel-log": "a node whose kernel log has a fatal fault of its hardware is quarantined",
    "log-root": "a job leaves a node whose workers' logs show a fault of its hardware or driver",
    "straggler": "a job leaves a node whose ranks take longer than others for the same work",
    "traffic": "an attempt between whose nodes no byte moves while its ranks wait is ended",
    "over-eviction": "a job leaves the group of nodes that shares an unknown culprit",
    "repeated-failure": "a job leaves a node on which it fails again and again",
    "stop-deadline": "a node that does not stop an attempt is quarantined",
}
# Rules that are observed unless an operator has them enforced.
OBSERVED: frozenset[str] = frozenset(
    {"over-eviction", "log-root", "straggler", "traffic", "repeated-check"}
)


def mode_of(modes: Mapping[str, str], rule: str) -> Mode:
    """How the rule is applied now."""
    default = "OBSERVE" if rule in OBSERVED else "ENFORCE"
    return "OBSERVE" if modes.get(rule, default) == "OBSERVE" else "ENFORCE"


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
