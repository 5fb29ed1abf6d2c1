"""Every limit that the driver's decisions rest on, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from megascale_driver.analysis.progress import HangLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Times in seconds. The ladder holds: beat < suspect < dead < dead without corroboration.

    A silent node is SUSPECT, then DEAD with one corroboration (broken stream, failed probe, job
    standing still), and DEAD without any much later. ``breaker_*`` bound evictions in a window
    (:mod:`megascale_driver.core.breaker`).
    """

    heartbeat_interval_s: float = 5.0
    suspect_after_s: float = 8.0
    dead_after_s: float = 14.0
    dead_uncorroborated_after_s: float = 60.0
    probe_interval_s: float = 2.0
    # A step completed this long before now still proves that all nodes of its job were there.
    step_proof_lag_s: float = 2.0
    # A job stands still when it has completed no step for so many of its step intervals.
    still_intervals: float = 3.0
    # Reconnecting executors need this long after a change of leader; before, absence says nothing.
    leader_grace_s: float = 10.0
    # What an agent may take one after another: its template (90 s), its daemon (20 s), the forks of
    # the self-check (90 s) and its answers (61 s on GPUs), and the room of shared disks and memory.
    prepare_timeout_s: float = 300.0
    # From the moment in which all nodes are prepared: ``open_attempts`` calls of 22 s, and the
    # pauses between them.
    open_timeout_s: float = 90.0
    # The rendezvous (120 s), and a large restore from storage.
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 15.0
    open_attempts: int = 3
    open_retry_s: float = 1.0
    # Worker failures in a row on one node, without progress of the job, after which the node is
    # evicted.
    node_failures: int = 3
    # A job that stands still with all processes alive, and hangs in a row after which its node is
    # evicted.
    hang: HangLimits = field(default_factory=HangLimits)
    node_hangs: int = 2
    # A profile begins so long after the newest step: time for etcd and the links, not counting the
    # steps under way.
    profile_lead_s: float = 2.0
    # Steps may be named so far ahead.
    profile_ahead_s: float = 3600.0
    # Added to the expected time of the steps, after which no rank begins; and what writing a trace
    # may take then.
    profile_patience_s: float = 60.0
    profile_write_s: float = 600.0
    breaker_share: float = 0.02
    breaker_nodes: int = 4
    breaker_window_s: float = 300.0
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
                f"heartbeat_interval_s < suspect < dead < uncorroborated must hold, got {ladder}"
            )

    @classmethod
    def for_interval(cls, heartbeat_interval_s: float, hang: HangLimits | None = None) -> Policy:
        """The default ladder, stretched where heartbeats are slower than the default; ``hang``
        None: its defaults.
        """
        scale = max(1.0, heartbeat_interval_s / 5.0)
        return cls(
            heartbeat_interval_s=heartbeat_interval_s,
            suspect_after_s=8.0 * scale,
            dead_after_s=14.0 * scale,
            dead_uncorroborated_after_s=60.0 * scale,
            hang=hang or HangLimits(),
        )
