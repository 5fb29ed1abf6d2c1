"""The needs of a job for `megascale plan`, computed without a cluster, and reasons to refuse it.

All numbers come from the formulas that the services use: the parameter table, the memory estimate,
the FLOP count, the batch arithmetic and the rules of placement. Pure: the caller reads the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megascale_job.config import JobConfig
from megascale_job.problems import JobProblem
from megascale_job.sections.parallelism import ep_node_problem
from megascale_job.sizes.failures import advised_spares, best_interval_s, mtbf_s, wanted_spares
from megascale_job.sizes.flops import (
    active_parameters,
    flops_per_token,
    ideal_bubble,
    scaled_batch,
)
from megascale_job.sizes.memory import (
    RankMemory,
    largest_rank_memory,
    rank_memory,
    wanted_replica_slots,
    wanted_slots,
)
from megascale_job.sizes.parameter_table import checkpoint_bytes, parameter_counts
from megascale_job.visible import counted

_LARGER_BATCHES = (2, 4, 8)  # times the job's batch; the paper's change to LAMB used 4


@dataclasses.dataclass(frozen=True, slots=True)
class JobNeeds:
    """``facts``: plain values by name, sizes in bytes. ``refused``: reasons why it cannot run."""

    facts: dict[str, Any]
    refused: list[JobProblem]


def job_needs(
    config: JobConfig,
    problems: Sequence[JobProblem],
    devices_per_node: int,
    device_memory_bytes: int,
) -> JobNeeds:
    """The needs of a job; ``problems``: reasons to refuse it that are already known.

    For a refused job only the facts that can be computed are present. ``device_memory_bytes`` 0:
    the memory of a device is not checked.
    """
    found = list(problems)
    facts: dict[str, Any] = {"name": config.name}
    try:
        memory = [rank_memory(config, rank) for rank in config.layout.members(0, "pp")]
        facts |= _model(config) | _batch(config) | _larger_batches(config)
    except (ValueError, ArithmeticError, IndexError) as error:  # sizes that are problems themselves
        unnamed = JobProblem("trainer", str(error), "change the sizes that are named")
        return JobNeeds(facts, found or [unnamed])
    nodes, refused = _nodes(config, devices_per_node)
    facts |= nodes | _memory(config, memory) | _auto_interval(config)
    if not found:
        facts |= _faster(config, device_memory_bytes)
    if not found + refused and config.model.experts.count:
        facts |= _predicted(config, devices_per_node)
    found += refused + _too_large(config, memory, device_memory_bytes)
    return JobNeeds(facts, found)


def _model(config: JobConfig) -> dict[str, Any]:
    sizes = {
        name: size
        for name, size in parameter_counts(config).items()
        if not name.endswith(".router.load")  # counts of choices, which are saved too
    }
    embeddings = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    flops = flops_per_token(config.model)
    tokens = (
        config.training.steps * config.training.global_batch_size * config.model.sequence_length
    )
    return {
        "parameters": sum(sizes.values()),
        **_experts(config),
        "parameters_outside_layers": embeddings,
        "flops_per_token_causal": flops.exact,
        "flops_per_token_full": flops.full,
        "flops_of_the_run_causal": flops.exact * tokens,
        "tokens_of_the_run": tokens,
        "checkpoint_bytes": checkpoint_bytes(config),
    }


def _experts(config: JobConfig) -> dict[str, Any]:
    """Active parameters, and where the experts are; nothing for a dense model."""
    model, ep = config.model, config.parallelism.ep
    if not model.experts.count:
        return {}
    facts = {
        "count": model.experts.count,
        "top_k": model.experts.top_k,
        "layers": model.layers - model.experts.dense_layers,
        "ep": ep,
        "of_a_rank": model.experts.count // ep,
    }
    return {"active_parameters": active_parameters(config), "experts": facts}


def _batch(config: JobConfig) -> dict[str, Any]:
    parallel, training = config.parallelism, config.training
    bubble = ideal_bubble(config)
    return {
        "micro_batches": config.micro_batches,
        "tokens_per_step": training.global_batch_size * config.model.sequence_length,
        "tokens_per_step_of_a_rank": training.global_batch_size
        * config.model.sequence_length
        // parallel.dp,
        "pipeline_bubble": bubble / (1 + bubble),
    }


def _larger_batches(config: JobConfig) -> dict[str, Any]:
    """Steps and learning rates for larger batches with LAMB over the same tokens."""
    if config.optimizer.name != "lamb":
        return {}
    rows = (scaled_batch(config, factor) for factor in _LARGER_BATCHES)
    return {"larger_batches": [dataclasses.asdict(row) for row in rows]}


def _nodes(config: JobConfig, devices_per_node: int) -> tuple[dict[str, Any], list[JobProblem]]:
    """The number of nodes of ``devices_per_node`` devices, and spares.

    A node takes only whole tensor-parallel groups, and whole expert-parallel ones unless the job
    allows them on several nodes.
    """
    world_size, tp = config.layout.world_size, config.parallelism.tp
    group = config.parallelism.node_group
    per_node = devices_per_node // group * group
    base = {"world_size": world_size, "devices_per_node": devices_per_node}
    too_wide = ep_node_problem(
        config.parallelism, devices_per_node, "a node has", "plan larger nodes (--devices-per-node)"
    )
    if too_wide is not None:
        return base, [too_wide]
    if not per_node:
        problem = (
            f"a tensor-parallel group of {tp} does not fit on a node of "
            f"{counted(devices_per_node, 'device')}"
        )
        remedy = f"use a tp of at most {devices_per_node}, or larger nodes (--devices-per-node)"
        return base, [JobProblem("trainer.parallelism.tp", problem, remedy)]
    nodes = -(-world_size // per_node)
    spares = wanted_spares(config, nodes, per_node)
    found = {
        "nodes": nodes,
        "spare_nodes": spares,
        "spare_nodes_advised": advised_spares(config, nodes, per_node),
        "nodes_wanted": nodes + spares,
    }
    return {**base, **found}, []


def _memory(config: JobConfig, stages: list[RankMemory]) -> dict[str, Any]:
    state_bytes, slots = (
        max(need.optimizer_bytes for need in stages),
        wanted_slots(config.checkpoint),
    )
    kept = wanted_replica_slots(config.checkpoint)
    return {
        "memory_of_a_rank": [
            {**dataclasses.asdict(need), "total_bytes": need.total_bytes} for need in stages
        ],
        "staging_bytes_of_a_rank": state_bytes * (slots + kept),
        "replica_bytes_of_a_rank": state_bytes * kept,
    }


def _auto_interval(config: JobConfig) -> dict[str, Any]:
    """Intervals between saves with `checkpoint.interval: auto`, for three costs of a save.

    The running job measures its own cost.
    """
    checkpoint, devices = config.checkpoint, config.layout.world_size
    if checkpoint.interval != "auto":
        return {}
    failure_s = mtbf_s(checkpoint.device_mtbf_hours, devices)
    costs = {"0_1": 0.1, "1": 1.0, "10": 10.0}
    found = {
        f"interval_s_at_cost_{name}_s": best_interval_s(cost_s, failure_s)
        for name, cost_s in costs.items()
    }
    return {"checkpoint_interval": {"mtbf_s": failure_s, **found}}


def _faster(config: JobConfig, device_memory_bytes: int) -> dict[str, Any]:
    """Layers per stage, and a schedule, with which the job is predicted to train faster."""
    try:
        from megascale_planner.job_plan import job_balance, zero_bubble_gain
        from megascale_planner.workload import Refused
    except ModuleNotFoundError as error:
        if error.name != "numpy":  # comes with the extra `plan`
            raise
        return {}

    def need(**changes: Any) -> int:
        changed = dataclasses.replace(config.parallelism, **changes)
        other = dataclasses.replace(config, parallelism=changed)
        return largest_rank_memory(other).total_bytes

    def fits(**changes: Any) -> bool:
        return not device_memory_bytes or need(**changes) <= device_memory_bytes

    found: dict[str, Any] = {}
    try:
        balance = job_balance(config, lambda split: fits(stage_layers=split))
        gain = zero_bubble_gain(config)
    except Refused:
        return found
    if balance is not None:
        largest = need(stage_layers=balance.stage_layers)
        found["balanced_stages"] = {**dataclasses.asdict(balance), "largest_rank_bytes": largest}
    schedule = {"pipeline_schedule": "zero_bubble"}
    if gain and fits(**schedule):
        largest = need(**schedule)
        found["faster_schedule"] = {**schedule, "gain": gain, "largest_rank_bytes": largest}
    return found


def _predicted(config: JobConfig, devices_per_node: int) -> dict[str, Any]:
    """The step of a job with experts; nothing where the planner has no prediction."""
    try:
        from megascale_planner.job_plan import job_prediction
        from megascale_planner.workload import Refused
    except ModuleNotFoundError as error:
        if error.name != "numpy":  # comes with the extra `plan`
            raise
        return {}
    try:
        return {"predicted_step": dataclasses.asdict(job_prediction(config, devices_per_node))}
    except Refused:
        return {}


def _too_large(
    config: JobConfig, stages: list[RankMemory], device_memory_bytes: int
) -> list[JobProblem]:
    stage, need = max(enumerate(stages), key=lambda item: item[1].total_bytes)
    if not device_memory_bytes or need.total_bytes <= device_memory_bytes:
        return []
    problem = (
        f"a rank of pipeline stage {stage} needs about {need.total_bytes / 2**30:.1f} GiB, "
        f"the device has {device_memory_bytes / 2**30:.1f} GiB"
    )
    smaller = (
        "raise tp or pp"
        if config.training.micro_batch_size == 1
        else "raise tp or pp, lower micro_batch_size"
    )
    return [JobProblem("trainer.parallelism", problem, f"{smaller}, or recompute activations")]
