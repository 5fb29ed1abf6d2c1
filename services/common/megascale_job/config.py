"""A training job: one frozen tree of dataclasses that every process of the system reads.

A job file (YAML) or ``megascale.v1.JobSpec`` (protobuf) becomes plain values;
:mod:`megascale_job.loading` builds the tree from them, and all code reads the tree. A field that is
absent takes its default from here. Each section has a module in ``sections/`` with its fields,
their bounds, and the checks between fields. :func:`validate` runs all checks: the driver refuses a
bad job with it, and the CLI explains one without a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megascale_job.layout import RankLayout
from megascale_job.names import is_dns_label
from megascale_job.problems import JobProblem
from megascale_job.sections.checkpoint import (
    CheckpointConfig,
    CheckpointInterval,
    CheckpointLoad,
    checkpoint_problems,
)
from megascale_job.sections.code import CodeConfig, EnvironmentConfig, code_problems
from megascale_job.sections.data import (
    BlendRule,
    DataConfig,
    DataSkip,
    DataSource,
    EvaluationConfig,
    Shuffle,
    TokenizerConfig,
    TokenizerKind,
    data_problems,
    evaluation_problems,
)
from megascale_job.sections.fields import ADDED, bound_problems
from megascale_job.sections.model import (
    Block,
    ExpertsConfig,
    ExpertScore,
    Mlp,
    ModelConfig,
    Norm,
    Positions,
    QkNormOver,
    RopeScalingConfig,
    RopeScalingKind,
    model_problems,
    model_values,
    rotation_problems,
    shown_scaling,
    window_problems,
)
from megascale_job.sections.optimizer import LambConfig, OptimizerConfig, optimizer_problems
from megascale_job.sections.parallelism import (
    ExpertExchange,
    OverlapConfig,
    ParallelismConfig,
    PipelineSchedule,
    Recompute,
    exchange_problems,
    expert_parallelism_problems,
    parallelism_problems,
    world_problems,
)
from megascale_job.sections.recovery import (
    DivergenceAction,
    RecoveryConfig,
    SpareRule,
    recovery_problems,
)
from megascale_job.sections.training import (
    Decay,
    FastAccumulation,
    Fp8Config,
    Fp8Format,
    Kernels,
    LossConfig,
    ParameterGather,
    Precision,
    ScheduleConfig,
    Spans,
    TelemetryConfig,
    TrainingConfig,
    batch_problems,
    chunk_problems,
    fp8_problems,
    router_problems,
    schedule_problems,
)

# fmt: off
__all__ = [
    "TRAINER_SECTIONS", "BlendRule", "Block", "CheckpointConfig", "CheckpointInterval",
    "CheckpointLoad", "CodeConfig", "DataConfig", "DataSkip", "DataSource", "Decay",
    "DivergenceAction", "EvaluationConfig", "ExpertExchange", "ExpertScore", "ExpertsConfig",
    "FastAccumulation",
    "Fp8Config", "Fp8Format", "JobConfig", "Kernels", "LambConfig", "LossConfig", "Mlp",
    "ModelConfig", "Norm", "OptimizerConfig", "OverlapConfig", "ParallelismConfig",
    "ParameterGather", "PipelineSchedule", "Positions", "Precision", "QkNormOver", "Recompute",
    "RecoveryConfig", "RopeScalingConfig", "RopeScalingKind", "ScheduleConfig", "Shuffle",
    "Spans", "SpareRule", "TelemetryConfig", "TokenizerConfig", "TokenizerKind",
    "TrainingConfig", "model_values", "rotation_problems", "shown_scaling", "validate",
]
# fmt: on

# The fields of a job that are under `trainer` in a job file; the tree has them at its root.
TRAINER_SECTIONS = (
    "model",
    "parallelism",
    "training",
    "optimizer",
    "schedule",
    "loss",
    "data",
    "evaluation",
    "telemetry",
)
# Relations between sizes are not checked while one of these sections has a size out of range.
_SIZES = ("trainer.model.", "trainer.parallelism", "trainer.training.")
_UNRELATED = ("norm_epsilon", "initializer_std", "rope_theta", "experts.scale", "bias_rate")
_SECTIONS = (*TRAINER_SECTIONS, "checkpoint", "recovery", "code", "environment")
_MAX_LABELS = 64
_MAX_TEXT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A whole job. ``name`` is a DNS-1123 label and the job's key everywhere."""

    name: str
    model: ModelConfig
    training: TrainingConfig
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    code: CodeConfig = field(default_factory=CodeConfig, metadata=ADDED)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig, metadata=ADDED)
    tenant: str = "default"
    owner: str = ""
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> RankLayout:
        """The rank layout of the job."""
        return self.parallelism.layout

    @property
    def fp8_layers(self) -> range:
        """The layers whose matrix products are in FP8; empty for another precision."""
        if self.training.precision != "fp8":
            return range(0)
        return self.training.fp8.layers_of(self.model.layers)

    @property
    def gathers_fp8(self) -> bool:
        """Whether the weights of FP8 layers are gathered over dp as FP8 bytes."""
        return bool(self.fp8_layers) and self.training.fp8.parameter_gather == "fp8"

    @property
    def evaluates(self) -> bool:
        """Whether the job measures its loss on held-out data."""
        return bool(self.evaluation.sources) and self.evaluation.interval_steps > 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel replica runs in a step."""
        return self.training.global_batch_size // (
            self.training.micro_batch_size * self.parallelism.dp
        )


def validate(config: JobConfig) -> list[JobProblem]:
    """All problems of ``config``, by section in the order of the spec; empty if it can run."""
    model, training, parallel = config.model, config.training, config.parallelism
    sizes = [*_bounds(config), *window_problems(model), *world_problems(parallel)]
    relations: list[JobProblem] = []
    if not any(
        problem.field.startswith(_SIZES) and not problem.field.endswith(_UNRELATED)
        for problem in sizes
    ):
        relations = [
            *model_problems(model),
            *parallelism_problems(model, parallel),
            *expert_parallelism_problems(model.experts, parallel),
            *exchange_problems(parallel, deterministic=training.deterministic),
            *batch_problems(training, parallel),
            *chunk_problems(training, config.loss, parallel),
        ]
        relations = relations or list(fp8_problems(training, model, parallel.tp))
    problems = [
        *_identity(config),
        *sizes,
        *relations,
        *router_problems(model, training, config.loss),
        *optimizer_problems(config.optimizer),
        *schedule_problems(config.schedule, training.steps),
        *data_problems(config.data),
        *evaluation_problems(config.evaluation),
        *checkpoint_problems(config.checkpoint),
        *recovery_problems(config.recovery, config.checkpoint.uri),
        *code_problems(config.code, config.environment),
    ]
    return sorted(problems, key=_section)


def _section(problem: JobProblem) -> int:
    """The position of a problem's section; problems outside of sections come first."""
    name = problem.field.removeprefix("trainer.").partition(".")[0]
    return _SECTIONS.index(name) if name in _SECTIONS else -1


def _bounds(config: JobConfig) -> Iterator[JobProblem]:
    """Numbers outside the bounds that their fields declare."""
    for name in TRAINER_SECTIONS:
        yield from bound_problems(getattr(config, name), f"trainer.{name}")
    yield from bound_problems(config.checkpoint, "checkpoint")
    yield from bound_problems(config.recovery, "recovery")


def _identity(config: JobConfig) -> Iterator[JobProblem]:
    if not is_dns_label(config.name):
        yield JobProblem(
            "name",
            f"{config.name!r} is not a DNS-1123 label",
            "use 1 to 63 of a-z, 0-9 and '-', no '-' at the ends",
        )
    if not is_dns_label(config.tenant):
        yield JobProblem(
            "tenant",
            f"{config.tenant!r} is not a DNS-1123 label",
            "use a-z, 0-9 and '-', or \"default\"",
        )
    if len(config.labels) > _MAX_LABELS:
        yield JobProblem("labels", f"{len(config.labels)} labels", f"use at most {_MAX_LABELS}")
    if any(
        len(text) > _MAX_TEXT
        for text in (config.owner, *config.labels.keys(), *config.labels.values())
    ):
        yield JobProblem(
            "labels",
            "the owner, a key or a value is too long",
            f"use at most {_MAX_TEXT} characters",
        )
