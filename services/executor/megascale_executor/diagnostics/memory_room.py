"""Self-check: the host has room for the job's training state (on CPU), staging slots and replicas.

Parameters, gradients and optimizer states are counted exactly, from the parameter table.
Activations and the interpreter are not counted, so a job that fails this check certainly does not
fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megascale_common.node import host
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_job.config import JobConfig
from megascale_job.sizes.memory import wanted_replica_slots
from megascale_job.sizes.parameter_table import (
    DEFAULT_STATES,
    STATE_BYTES,
    ParameterTable,
    parameter_table,
)

NAME = "memory_room"
MIN_STAGING_SLOTS = 2
# Above this share of the available memory the host is likely to swap or to kill processes.
DEGRADED_SHARE = 0.8


class MemoryRoom(Diagnostic):
    """Checks the host's memory and the staging file system against an attempt's job."""

    name = NAME
    on_demand = False  # without a job there is nothing to compare with

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the host, one for the staging mount."""
        assert node.attempt is not None
        job, staging = node.attempt.job, host.STAGING_MOUNT
        # In a thread, because the parameter table of a large job takes a while.
        wanted = await asyncio.to_thread(need, job, node.attempt.ranks)
        on_cpu = node.devices[0].kind == "cpu"
        held = node.holds_slots(job.name)
        return [
            check_host(wanted, host.memory_bytes("MemAvailable"), on_cpu=on_cpu),
            check_staging(wanted, host.free_bytes(staging), str(staging), already_held=held),
        ]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that the ranks of this node need together."""

    state_bytes: int
    staging_bytes: int


def need(config: JobConfig, ranks: Sequence[int]) -> MemoryNeed:
    """Parameters, fp32 gradients, optimizer shards and two staging slots for each of ``ranks``.

    With `checkpoint.replicas` also the slots for another node's ranks, of the smallest stage.

    Raises:
        ValueError: the job's sizes do not fit its layout.
    """
    parameter_bytes = 4 if config.training.precision == "fp32" else 2
    # A node keeps replicas of about as many ranks of another node as it has itself, whichever stage
    # they are of: a stage of dense layers can be far smaller than one of experts. A job on one node
    # has no replicas.
    alone = len(ranks) == config.layout.world_size
    replicas = 0 if alone else wanted_replica_slots(config.checkpoint)
    replica_bytes = replicas * _smallest_shard_bytes(config) if replicas else 0
    state = staging = 0
    for rank in ranks:
        table = parameter_table(config, rank)
        elements = sum(buffer.elements for buffer in table.buffers)
        shard_bytes = _shard_bytes(table)
        state += elements * (parameter_bytes + STATE_BYTES) + shard_bytes
        if config.checkpoint.uri:
            staging += MIN_STAGING_SLOTS * shard_bytes + replica_bytes
    return MemoryNeed(state, staging)


def _smallest_shard_bytes(config: JobConfig) -> int:
    """Optimizer states of a rank of the smallest stage."""
    stages = config.layout.members(0, "pp")
    return min(_shard_bytes(parameter_table(config, rank)) for rank in stages)


def _shard_bytes(table: ParameterTable) -> int:
    return len(DEFAULT_STATES) * STATE_BYTES * table.shard_elements


def check_host(wanted: MemoryNeed, available_bytes: int, *, on_cpu: bool) -> Finding:
    """Host memory, which holds the staging slots (tmpfs is memory) and on CPU also the state."""
    bytes_needed = wanted.staging_bytes + (wanted.state_bytes if on_cpu else 0)
    remedy = "free memory on the host or give the node fewer ranks"
    return _evaluate("host", bytes_needed, available_bytes, remedy)


def check_staging(
    wanted: MemoryNeed, free_bytes: int, mount: str, *, already_held: bool
) -> Finding:
    """Room for staging slots; slots of the job that the daemon already holds are reused."""
    if wanted.staging_bytes == 0:
        return Finding(NAME, mount, "SKIPPED", "the job writes no checkpoints")
    if already_held:
        return Finding(NAME, mount, "PASS", "the daemon holds the job's slots already")
    return _evaluate(
        mount, wanted.staging_bytes, free_bytes, f"enlarge {mount} or give the node fewer ranks"
    )


def _evaluate(target: str, needed: int, available: int, remedy: str) -> Finding:
    detail = f"needs {_mib(needed)} of {_mib(available)}"
    if needed > available:
        return Finding(NAME, target, "FAIL", f"{detail}: {remedy}")
    if needed > DEGRADED_SHARE * available:
        detail += ": little is left for activations and caches"
        return Finding(NAME, target, "DEGRADED", detail)
    return Finding(NAME, target, "PASS", detail)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
