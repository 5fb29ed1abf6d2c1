"""How many staging slots a rank needs: the contract of trainer, daemon and planner.

A slot holds the whole state of a rank.
"""

from __future__ import annotations

from megascale_job.config import CheckpointConfig

# Beside those in flight: the newest sealed one, and the one that is being persisted.
KEPT_SLOTS, LEAST_SLOTS, MOST_SLOTS = 2, 2, 8
# At another node, for each rank of a job with checkpoint.replicas: a whole replica stands while the
# next one arrives. As long, its own node holds the same two states in slots of their own.
REPLICA_SLOTS, HELD_FOR_REPLICAS = 2, 2


def snapshots_in_flight(interval_steps: int) -> int:
    """Snapshots that are reserved, copied or unsettled at once; ``interval_steps`` apart.

    On CUDA the slot of step s + 1 is reserved while s waits for its copy and s - 1 for its result.
    """
    return {1: 3, 2: 2}.get(interval_steps, 1)


def wanted_slots(checkpoint: CheckpointConfig) -> int:
    """Slots of a rank where memory allows; 0 for a job without checkpoints."""
    if not checkpoint.uri:
        return 0
    in_flight = snapshots_in_flight(checkpoint.memory_interval_steps)
    held = HELD_FOR_REPLICAS if checkpoint.replicas else 0
    return checkpoint.slots or in_flight + KEPT_SLOTS + held


def wanted_replica_slots(checkpoint: CheckpointConfig) -> int:
    """Slots that another node keeps for the replicas of a rank of this job."""
    return REPLICA_SLOTS if checkpoint.uri and checkpoint.replicas else 0
