"""Self-check: the host has room for the job's training state (on CPU) and for its staging slots.

What is counted is exact: parameters, gradients and optimizer states from the parameter table.
Activations and the interpreter are not counted, so too little here is certainly too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale_common.job.config import JobConfig
from megascale_common.sizes.parameter_table import DEFAULT_STATES, STATE_BYTES, parameter_table
from megascale_executor.diagnostics.finding import Finding

NAME = "memory_room"
MIN_STAGING_SLOTS = 2
# Below this share of what is available after the job has its own, the host is likely to swap or to
# kill.
DEGRADED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that the ranks of this node need together."""

    state_bytes: int
    staging_bytes: int


def need(config: JobConfig, ranks: Sequence[int]) -> MemoryNeed:
    """What ``ranks`` of the job hold: parameters, fp32 gradients and optimizer shards; and two
    staging slots each.

    Raises:
        ValueError: the job's sizes do not fit its layout.
    """
    parameter_bytes = 2 if config.training.precision == "bf16" else 4
    state = staging = 0
    for rank in ranks:
        table = parameter_table(config, rank)
        elements = sum(buffer.elements for buffer in table.buffers)
        shard_bytes = len(DEFAULT_STATES) * STATE_BYTES * table.shard_elements
        state += elements * (parameter_bytes + STATE_BYTES) + shard_bytes
        staging += MIN_STAGING_SLOTS * shard_bytes if config.checkpoint.uri else 0
    return MemoryNeed(state, staging)


def check_host(wanted: MemoryNeed, available_bytes: int, *, on_cpu: bool) -> Finding:
    """Host memory: the state lives there on CPU; the staging slots do so always (tmpfs is memory)."""
    bytes_needed = wanted.staging_bytes + (wanted.state_bytes if on_cpu else 0)
    return _judge(
        "host",
        bytes_needed,
        available_bytes,
        "free memory on the host or give the node fewer ranks",
    )


def check_staging(
    wanted: MemoryNeed, free_bytes: int, mount: str, *, already_held: bool
) -> Finding:
    """Room for staging slots; slots of the same job that the daemon still holds are used again."""
    if wanted.staging_bytes == 0:
        return Finding(NAME, mount, "SKIPPED", "the job writes no checkpoints")
    if already_held:
        return Finding(NAME, mount, "PASS", "the daemon holds the job's slots already")
    return _judge(
        mount, wanted.staging_bytes, free_bytes, f"enlarge {mount} or give the node fewer ranks"
    )


def _judge(target: str, needed: int, available: int, remedy: str) -> Finding:
    detail = f"needs {_mib(needed)} of {_mib(available)}"
    if needed > available:
        return Finding(NAME, target, "FAIL", f"{detail}: {remedy}")
    if needed > DEGRADED_SHARE * available:
        return Finding(
            NAME, target, "DEGRADED", f"{detail}: little is left for activations and caches"
        )
    return Finding(NAME, target, "PASS", detail)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
