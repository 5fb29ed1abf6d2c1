"""All limits of the driver's decisions, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_driver.analysis.progress import HangLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Limits, times in seconds. They must satisfy heartbeat < suspect < dead < uncorroborated.

    A silent node is SUSPECT, then DEAD with one corroboration (broken stream, failed probe, a
    platform that does not reach it, job without progress), and much later DEAD without any.
    ``breaker_*`` limit evictions in a window (:mod:`megascale_driver.core.faults.breaker`).
    """

    heartbeat_interval_s: float = 5.0
    suspect_after_s: float = 8.0
    dead_after_s: float = 14.0
    dead_uncorroborated_after_s: float = 60.0
    probe_interval_s: float = 2.0
    # Limit for a running job that completes no step while no node reports workers of its attempt.
    # Long: a driver that is cut off from all its nodes must not end what trains.
    no_workers_after_s: float = 600.0
    # Validity of a platform report that a node is unreachable; it is repeated every few seconds.
    platform_report_s: float = 30.0
    # A step record proves that all nodes of its job were alive this long before it arrived.
    step_proof_lag_s: float = 2.0
    # A job counts as stalled after this many of its step intervals without a completed step.
    still_intervals: float = 3.0
    # Agents need this long to link to a new leader; before that, a missing node is no evidence.
    leader_grace_s: float = 10.0
    # As long as nodes that the last leader knew keep linking, the grace period is extended to half
    # its length after each, up to this total.
    leader_grace_max_s: float = 60.0
    # The sum of what an agent can take in turn: starting its template (90 s) and its daemon (20 s),
    # forking the self-checks (90 s) and running them (61 s on GPUs), NVML (20 s), disks and memory.
    prepare_timeout_s: float = 300.0
    # Counted from the moment when all nodes are prepared: ``open_attempts`` calls of 22 s and the
    # pauses between them.
    open_timeout_s: float = 90.0
    # The rendezvous (120 s) and a large restore from storage.
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 15.0
    # Additional wait for a live node that still runs the last attempt: killing workers that hold a
    # GPU takes up to half a minute.
    fence_timeout_s: float = 45.0
    # Time after the end of all workers in which a node can report the commit that one of them saw.
    commit_report_s: float = 10.0
    open_attempts: int = 3
    open_retry_s: float = 1.0
    # A job leaves a node after this many worker failures in a row there, without progress of the
    # job.
    node_failures: int = 3
    # The window of `recovery.max_restarts`, which holds for each cause.
    restart_window_s: float = 21_600.0
    # Wait before the third attempt in a row that fails alike, doubled for each further one.
    backoff_s: float = 1.0
    backoff_max_s: float = 300.0
    # When a job with all processes alive counts as hung, and after how many hangs in a row it
    # leaves a node.
    hang: HangLimits = field(default_factory=HangLimits)
    node_hangs: int = 2
    # The search for an unnamed culprit: total time, and time of one round. The limits of the nodes
    # come first: 60 s for the collective on GPUs, after the start of a process on each device.
    search_cap_s: float = 300.0
    group_check_timeout_s: float = 120.0
    # A profile starts this long after the newest step: time for etcd and the links, in addition to
    # the steps in progress.
    profile_lead_s: float = 2.0
    # The steps of a profile can be at most this far ahead.
    profile_ahead_s: float = 3600.0
    # Added to the expected time until the steps, after which a rank skips the trace; then the time
    # that writing a trace can take.
    profile_patience_s: float = 60.0
    profile_write_s: float = 600.0
    # Added to the time until which a rank can begin: by then the report that it did not must be
    # here.
    profile_grace_s: float = 30.0
    # Interval at which a job's steps, last record and goodput are stored while nothing else
    # changes.
    mark_interval_s: float = 10.0
    # The queue (megascale_driver.placement.queue_values.Rules): whether a higher priority displaces
    # jobs that can save; the wait after which a gang holds every node that it could use; the time
    # for which a job that lost nodes keeps the others; devices of each tenant, no entry: not
    # limited.
    preempt: bool = True
    backfill_s: float = 1800.0
    survivors_s: float = 600.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    # A job that could not save is not asked again for this long.
    save_again_s: float = 600.0
    # Ended jobs that are kept: at most this many, and none for longer.
    keep_ended_jobs: int = 1000
    keep_ended_s: float = 30 * 86_400.0
    # Nodes that have been dead for longer, and that no job needs, are forgotten.
    forget_dead_s: float = 24 * 3600.0
    breaker_share: float = 0.02
    breaker_nodes: int = 4
    breaker_window_s: float = 300.0
    # A switch with fewer nodes than this has no limit of its own.
    switch_nodes: int = 4
    # A self-check that fails alike on this many nodes within the window is not about the nodes;
    # neither is the same failure of workers on `software_nodes` nodes.
    software_checks: int = 3
    software_nodes: int = 2
    software_share: float = 0.01  # of the job's nodes, where that is more
    software_window_s: float = 3600.0
    request_memory_s: float = 86_400.0

    def __post_init__(self) -> None:
        ladder = (
            self.heartbeat_interval_s,
            self.suspect_after_s,
            self.dead_after_s,
            self.dead_uncorroborated_after_s,
        )
        if list(ladder) != sorted(set(ladder)):
            raise ValueError(
                f"required: heartbeat_interval_s < suspect < dead < uncorroborated; got {ladder}"
            )

    @classmethod
    def for_interval(cls, heartbeat_interval_s: float, hang: HangLimits | None = None) -> Policy:
        """The default limits, scaled up for heartbeats slower than the default of 5 s."""
        scale = max(1.0, heartbeat_interval_s / 5.0)
        return cls(
            heartbeat_interval_s=heartbeat_interval_s,
            suspect_after_s=8.0 * scale,
            dead_after_s=14.0 * scale,
            dead_uncorroborated_after_s=60.0 * scale,
            hang=hang or HangLimits(),
        )
