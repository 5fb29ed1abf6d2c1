"""A training job: one frozen tree of dataclasses that every process of the system reads.

A job file (YAML) or ``megascale.v1.JobSpec`` (protobuf) becomes plain values;
:mod:`megascale_job.loading` builds the tree from them, and all code reads the tree. A field
that is absent takes its default from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.code_config import CodeConfig, EnvironmentConfig
from megascale_job.data_config import (
    BlendRule,
    DataConfig,
    DataSkip,
    DataSource,
    EvaluationConfig,
    Shuffle,
    TokenizerConfig,
    TokenizerKind,
)
from megascale_job.layout import RankLayout
from megascale_job.optimizer_config import LambConfig, OptimizerConfig
from megascale_job.stored import ADDED, WIDE

# fmt: off
__all__ = [
    "TRAINER_SECTIONS", "BlendRule", "Block", "CheckpointConfig", "CheckpointInterval",
    "CheckpointLoad", "CodeConfig", "DataConfig", "DataSkip", "DataSource", "Decay",
    "DivergenceAction", "EvaluationConfig", "FastAccumulation", "Fp8Config", "Fp8Format",
    "JobConfig", "Kernels", "LambConfig", "LossConfig", "Mlp", "ModelConfig", "Norm",
    "OptimizerConfig", "OverlapConfig", "ParallelismConfig", "ParameterGather",
    "PipelineSchedule", "Positions", "Precision", "Recompute", "RecoveryConfig",
    "RopeScalingConfig", "RopeScalingKind", "ScheduleConfig", "Shuffle", "SpareRule",
    "TelemetryConfig", "TokenizerConfig", "TokenizerKind", "TrainingConfig",
]
# fmt: on

# The fields of a job that stand under `trainer` in a job file; the tree has them at its root.
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

# The choices stand in the order of the proto's enums, so that all messages list them alike.
Block = Literal["parallel", "serial"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["rope", "learned"]
RopeScalingKind = Literal["none", "linear", "llama3"]
Precision = Literal["bf16", "fp32", "fp8"]
Fp8Format = Literal["hybrid", "e4m3"]
ParameterGather = Literal["bf16", "fp8"]
FastAccumulation = Literal[
    "forward", "all", "none", "input_projections", "all_but_output_projections"
]
Recompute = Literal["none", "selective", "full"]
PipelineSchedule = Literal["1f1b", "zero_bubble"]
Kernels = Literal["torch", "triton", "auto"]
Spans = Literal["none", "phases", "micro_batches"]
Decay = Literal["constant", "linear", "cosine"]
DivergenceAction = Literal["stop", "continue", "roll_back"]
CheckpointInterval = Literal["steps", "auto"]
SpareRule = Literal["count", "auto"]
CheckpointLoad = Literal["full", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScalingConfig:
    """How rotary frequencies differ from those of ``rope_theta``; lengths are in tokens.

    ``linear``: all are divided by ``factor``. ``llama3``: those whose wavelength is above
    ``original_sequence_length / low_frequency_factor`` are; those below
    ``original_sequence_length / high_frequency_factor`` stay; between them they are blended.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence_length: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    ``ffn_size`` 0 means 4 * hidden_size; ``kv_heads`` 0 means heads; ``window`` 0 means full causal
    attention; ``head_dim`` 0 means hidden_size / heads. ``attention_bias`` gives q, k and v a bias
    where ``bias`` gives none; ``qk_norm`` normalises every head of q and of k.
    """

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    sequence_length: int
    ffn_size: int = 0
    kv_heads: int = 0
    block: Block = "parallel"
    mlp: Mlp = "gelu"
    norm: Norm = "layernorm"
    bias: bool = False
    norm_bias: bool = True
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    window: int = 0
    norm_epsilon: float = 1e-5
    initializer_std: float = 0.02
    layer_windows: tuple[int, ...] = ()
    head_dim: int = field(default=0, metadata=ADDED)
    attention_bias: bool = field(default=False, metadata=ADDED)
    qk_norm: bool = field(default=False, metadata=ADDED)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig, metadata=ADDED)

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0 is full causal attention."""
        return self.layer_windows[layer] if self.layer_windows else self.window

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer before any padding for tensor parallelism."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads (grouped-query attention when below ``heads``)."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapConfig:
    """Which dimensions overlap their communication with computation; the losses stay the same.

    Ranks that cannot reach each other's memory use their communicator, and their log reports it.
    """

    tp: bool = True
    pp: bool = True
    dp: bool = True
    peer_edges: bool = field(default=False, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig:
    """Sizes of the parallel axes.

    ``stage_layers`` holds the layers of each virtual stage in the order of the model, pp *
    virtual_stages numbers: virtual stage i runs on pipeline stage i mod pp. Empty means an even
    split. ``pipeline_schedule`` zero_bubble computes weight gradients where a stage would wait.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    recompute: Recompute = "none"
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    pipeline_schedule: PipelineSchedule = field(default="1f1b", metadata=ADDED)

    @property
    def layout(self) -> RankLayout:
        """The rank layout of these sizes."""
        return RankLayout(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """What ``precision: fp8`` does; current scaling, as Megatron's recipe "tensorwise".

    ``format`` hybrid: gradients in e5m2 with one scale for each tensor; e4m3: gradients in e4m3
    with one for each token. All else is in e4m3 with one for each tensor. ``parameter_gather``: in
    which format weights travel over dp after an update, with the same numbers.
    ``fast_accumulation``: which products a GPU may sum with fewer bits; without effect on CPUs.
    """

    format: Fp8Format = "hybrid"
    layers_at_start_in_bf16: int = 0
    layers_at_end_in_bf16: int = 0
    parameter_gather: ParameterGather = field(default="bf16", metadata=ADDED)
    fast_accumulation: FastAccumulation = field(
        default="all_but_output_projections", metadata=ADDED
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length, batch, precision and kernels of a run.

    ``bucket_mib`` bounds a gradient bucket in MiB; a bucket holds whole layers, at least one. With
    ``cuda_graphs`` the kernels of a layer are launched together, without effect on CPUs.
    """

    steps: int = field(metadata=WIDE)
    global_batch_size: int
    micro_batch_size: int = 1
    seed: int = field(default=1234, metadata=WIDE)
    precision: Precision = "bf16"
    deterministic: bool = False
    bucket_mib: int = 64
    kernels: Kernels = "auto"
    fp8: Fp8Config = field(default_factory=Fp8Config)
    # Builds that know it without this default train without graphs, with the same numbers.
    cuda_graphs: bool = field(default=True, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate: linear warm-up, then ``decay`` to ``min_ratio`` of the peak at the last."""

    warmup_steps: int = field(default=0, metadata=WIDE)
    decay: Decay = "cosine"
    min_ratio: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Token cross entropy plus ``z_loss`` * log(Z)^2."""

    z_loss: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Trackers that get the step records, in the job's folder where rank 0 runs, and timers.

    ``spans`` is what each rank measures of a step: its phases with the first two micro-batches, or
    all of them.
    """

    tensorboard: bool = False
    wandb: bool = field(default=False, metadata=ADDED)
    mlflow: bool = field(default=False, metadata=ADDED)
    spans: Spans = field(default="phases", metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where and how often checkpoints are written.

    There are none if ``uri`` is empty; at ``interval_steps`` 0 only the last step is saved.
    ``snapshot_interval_steps`` 0 takes snapshots into memory as often as they are persisted.
    ``verify_d2h`` is the share of a snapshot's bytes that is compared with the device's.
    Each snapshot has ``replicas`` (0 or 1) copies on another node; a node sends at most
    ``max_replicate_mib_per_s`` (0: any). ``slots`` is the number of staging slots; at 0 the daemon
    chooses it. ``load_uri`` is the folder of another job's checkpoints, from which this job starts
    while it has none of its own; with ``load`` weights it takes the parameters alone. A job whose
    last step is not saved within ``final_timeout_s`` fails, unless ``require_final`` is off. The
    three ``keep_...`` are rules of which checkpoints
    are kept; without any, all are. ``max_write_mib_per_s`` bounds what the ranks of one node write
    to storage; 0 is no bound. With ``interval`` auto the run decides how often it persists, from
    what a save costs it and from ``device_mtbf_hours``, the hours of a device between two failures.
    Steps may take a share of ``max_step_slowdown`` longer beside a write to storage, which is
    slowed down above that; 0 never slows it.
    """

    uri: str = ""
    interval_steps: int = field(default=0, metadata=WIDE)
    slots: int = 0
    load_uri: str = ""
    require_final: bool = True
    final_timeout_s: float = 300.0
    snapshot_interval_steps: int = field(default=0, metadata=WIDE)
    keep_latest: int = 0
    keep_every_steps: int = field(default=0, metadata=WIDE)
    keep_every_hours: float = 0.0
    max_write_mib_per_s: float = 0.0
    verify_d2h: float = 0.01
    replicas: int = 0
    max_replicate_mib_per_s: float = 0.0
    interval: CheckpointInterval = field(default="steps", metadata=ADDED)
    device_mtbf_hours: float = field(default=50_000.0, metadata=ADDED)
    max_step_slowdown: float = field(default=0.05, metadata=ADDED)
    load: CheckpointLoad = field(default="full", metadata=ADDED)

    @property
    def memory_interval_steps(self) -> int:
        """Steps between snapshots into memory; 0: after the last step, or as the run decides."""
        return self.snapshot_interval_steps or self.interval_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Limits of automatic recovery; ``spare_nodes``: of spares, unless ``spares`` is auto.

    A run counts as diverged after ``divergence_steps`` steps in a row (0: never; half of the job's
    steps where that is less) that are not finite, or whose loss is above ``loss_rise_factor`` (0:
    never) times that of the start. With roll_back it goes on from the last checkpoint before,
    without the data since then; it ends after ``max_roll_backs`` of them.
    """

    max_restarts: int = 20
    max_restarts_without_progress: int = 3
    spare_nodes: int = 0
    collective_timeout_s: float = 300.0
    divergence_steps: int = 10
    on_non_finite: DivergenceAction = "stop"
    loss_rise_factor: float = 3.0
    on_loss_rise: DivergenceAction = "continue"
    spares: SpareRule = field(default="count", metadata=ADDED)
    repair_hours: float = field(default=7.5, metadata=ADDED)
    spare_probability: float = field(default=0.99, metadata=ADDED)
    max_roll_backs: int = field(default=3, metadata=ADDED)


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
        """The layers whose matrix products are in FP8; empty in another precision."""
        if self.training.precision != "fp8":
            return range(0)
        recipe = self.training.fp8
        return range(
            recipe.layers_at_start_in_bf16, self.model.layers - recipe.layers_at_end_in_bf16
        )

    @property
    def gathers_fp8(self) -> bool:
        """Whether the weights of layers in FP8 travel over dp as bytes."""
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
