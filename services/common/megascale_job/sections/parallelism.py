"""A job's section ``trainer.parallelism``, and the checks of the layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.layout import RankLayout
from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, bounds
from megascale_job.sections.model import ExpertsConfig, ModelConfig
from megascale_job.visible import counted

MAX_WORLD_SIZE = 2**17  # ranks of a job; above the largest that has been reported
_MAX_STAGES = 4096

Recompute = Literal["none", "selective", "full"]
PipelineSchedule = Literal["1f1b", "zero_bubble"]
ExpertExchange = Literal["rows", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapConfig:
    """Dimensions that overlap their communication with computation, with the same losses.

    Ranks that cannot reach each other's memory use their communicator, and their log reports it.
    """

    tp: bool = True
    pp: bool = True
    dp: bool = True
    peer_edges: bool = field(default=False, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig:
    """Sizes of the parallel axes.

    ``stage_layers`` has the number of layers of each virtual stage in the order of the model, pp *
    virtual_stages numbers: virtual stage i runs on pipeline stage i mod pp. Empty means an even
    split. ``pipeline_schedule`` zero_bubble computes weight gradients while a stage would wait.
    ``ep`` is folded over the tp * cp * dp ranks of a pipeline stage: a group is ``ep`` consecutive
    ranks, all on one node unless ``ep_across_nodes``.
    """

    tp: int = field(default=1, metadata=bounds(1))
    cp: int = field(default=1, metadata=bounds(1))
    dp: int = field(default=1, metadata=bounds(1))
    pp: int = field(default=1, metadata=bounds(1))
    ep: int = field(default=1, metadata=bounds(1))
    virtual_stages: int = field(default=1, metadata=bounds(1, 4096))
    stage_layers: tuple[int, ...] = ()
    recompute: Recompute = "none"
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    pipeline_schedule: PipelineSchedule = field(default="1f1b", metadata=ADDED)
    ep_across_nodes: bool = field(default=False, metadata=ADDED)
    expert_exchange: ExpertExchange = field(default="rows", metadata=ADDED)

    @property
    def node_group(self) -> int:
        """Consecutive ranks that share a node: whole groups of tp, and of ep unless it may cross.

        A job's ranks are whole groups, because tp and ep divide the ranks of a pipeline stage.
        """
        return self.tp if self.ep_across_nodes else math.lcm(self.tp, self.ep)

    @property
    def layout(self) -> RankLayout:
        """The rank layout of these sizes."""
        return RankLayout(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep)


def world_problems(sizes: ParallelismConfig) -> Iterator[JobProblem]:
    """Layouts that are too large for the driver to compute with."""
    if sizes.tp * sizes.cp * sizes.dp * sizes.pp > MAX_WORLD_SIZE or sizes.ep > MAX_WORLD_SIZE:
        yield JobProblem(
            "trainer.parallelism",
            f"tp * cp * dp * pp is above {MAX_WORLD_SIZE} ranks",
            "use fewer ranks",
        )
    if len(sizes.stage_layers) > _MAX_STAGES:
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{len(sizes.stage_layers)} entries",
            "give one per stage",
        )


def parallelism_problems(model: ModelConfig, parallel: ParallelismConfig) -> Iterator[JobProblem]:
    """Layouts that do not divide the model."""
    divided = {
        "trainer.model.heads": model.heads,
        "trainer.model.kv_heads": model.kv_heads,  # 0: as many as heads, which are above
        "trainer.model.hidden_size": model.hidden_size,
        "trainer.model.sequence_length": model.sequence_length,
    }
    for name, value in divided.items():
        if value % parallel.tp:
            why = " (sequence parallelism splits it)" if name.endswith("sequence_length") else ""
            yield JobProblem(
                "trainer.parallelism.tp",
                f"{name} = {value} is not a multiple of tp = {parallel.tp}{why}",
                f"use a tp that divides {value}",
            )
    if parallel.cp > 1:
        yield from _context_problems(model, parallel)
    if model.qk_norm_over == "projection" and parallel.tp > 1:
        yield JobProblem(
            "trainer.parallelism.tp",
            f"{parallel.tp} with trainer.model.qk_norm_over: projection, a norm over all heads, "
            "which tp splits",
            "use 1, and more of pp, dp or ep",
        )
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        yield JobProblem(
            "trainer.parallelism.virtual_stages",
            f"{parallel.virtual_stages} at pp = 1: there is nothing to interleave",
            "use 1",
        )
    if parallel.pipeline_schedule != "1f1b" and parallel.pp == 1:
        yield JobProblem(
            "trainer.parallelism.pipeline_schedule",
            f"{parallel.pipeline_schedule} at pp = 1: there is no bubble to fill",
            "use 1f1b",
        )
    stages, virtual_stages = parallel.stage_layers, parallel.pp * parallel.virtual_stages
    if stages and len(stages) != virtual_stages:
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{'1 entry' if len(stages) == 1 else f'{len(stages)} entries'} for "
            f"pp * virtual_stages = {virtual_stages}",
            "give one per virtual stage, in the order of the model",
        )
    elif stages and (min(stages) < 1 or sum(stages) != model.layers):
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{list(stages)} adds up to {sum(stages)}, trainer.model.layers is {model.layers}",
            "give positive numbers that add up to trainer.model.layers",
        )
    elif not stages and model.layers < virtual_stages:
        yield JobProblem(
            "trainer.parallelism.virtual_stages"
            if model.layers >= parallel.pp
            else "trainer.parallelism.pp",
            f"trainer.model.layers = {model.layers} is too few for pp * virtual_stages = "
            f"{virtual_stages}",
            "use fewer stages: each holds at least one layer",
        )


def _context_problems(model: ModelConfig, parallel: ParallelismConfig) -> Iterator[JobProblem]:
    """Layouts in which ranks of cp cannot exchange whole heads or have equal parts."""
    ranks = parallel.tp * parallel.cp
    divided = {
        "trainer.model.heads": (model.heads, "each rank attends whole heads"),
        "trainer.model.kv_heads": (model.key_value_heads, "each rank attends whole heads"),
        "trainer.model.sequence_length": (model.sequence_length, "each rank has an equal part"),
    }
    for name, (value, why) in divided.items():
        if value % ranks:
            yield JobProblem(
                "trainer.parallelism.cp",
                f"{name} = {value} is not a multiple of tp * cp = {ranks} ({why})",
                f"use a cp that divides {value // math.gcd(value, parallel.tp)}, or fewer of tp",
            )


def expert_parallelism_problems(
    experts: ExpertsConfig, parallel: ParallelismConfig
) -> Iterator[JobProblem]:
    """Expert parallelism that does not divide the experts or the ranks of a pipeline stage."""
    field, ep, ranks = (
        "trainer.parallelism.ep",
        parallel.ep,
        parallel.tp * parallel.cp * parallel.dp,
    )
    if ep == 1:
        return
    if not experts.count:
        yield JobProblem(
            field,
            f"{ep}, and the model has no experts",
            "use 1, or give trainer.model.experts.count",
        )
        return
    common = math.gcd(experts.count, ranks)
    remedy = f"use a divisor of {common}" if common > 1 else "use 1"
    if experts.count % ep:
        yield JobProblem(
            field,
            f"trainer.model.experts.count = {experts.count} is not a multiple of ep = {ep}",
            f"{remedy}, which divides experts and ranks of a stage",
        )
    elif ranks % ep:
        yield JobProblem(
            field,
            f"tp * cp * dp = {ranks}, the ranks of a pipeline stage, is not a multiple of ep = "
            f"{ep}",
            f"{remedy}, which divides experts and ranks of a stage",
        )


def exchange_problems(parallel: ParallelismConfig, *, deterministic: bool) -> Iterator[JobProblem]:
    """A way to experts whose sums have another order for each ep, in a job that wants one."""
    if parallel.expert_exchange == "tokens" and deterministic:
        yield JobProblem(
            "trainer.parallelism.expert_exchange",
            "tokens with trainer.training.deterministic: ranks add up the results of their experts",
            "use rows, or leave deterministic out",
        )


def ep_node_problem(
    parallel: ParallelismConfig, devices: int, nodes: str, larger: str
) -> JobProblem | None:
    """The problem of an expert-parallel group on nodes with at most so many devices, or None.

    Args:
        nodes: words before the number of devices, such as "no known node has more than".
        larger: words that ask for larger nodes.
    """
    tp, ep, group = parallel.tp, parallel.ep, parallel.node_group
    if group <= devices or tp > devices or parallel.ep_across_nodes:
        return None
    # Divisors of ep divide the experts and the ranks of a stage as well.
    fitting = max(
        n
        for n in range(1, min(ep, MAX_WORLD_SIZE) + 1)
        if ep % n == 0 and math.lcm(tp, n) <= devices
    )
    whole = f"an expert-parallel group of {ep} stays"
    if group > ep:
        whole = f"whole groups of tp = {tp} and of ep = {ep}, {counted(group, 'rank')}, stay"
    return JobProblem(
        "trainer.parallelism.ep",
        f"{whole} within a node, and {nodes} {counted(devices, 'device')}",
        f"use an ep of {fitting}, {larger}, or set trainer.parallelism.ep_across_nodes: true",
    )
