"""Model sizes of the benchmarks, and the training job that one configuration of them is."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_job.config import Fp8Config, JobConfig, validate
from megascale_job.loading import from_accepted


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the batch that it is measured with. ``batch`` is in sequences over all ranks."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    batch: int


PRESETS = {
    "tiny": Preset(4, 128, 4, 512, 128, 2, 16),
    "1b": Preset(16, 2048, 16, 51200, 2048, 4, 64),
    "7b": Preset(32, 4096, 32, 51200, 2048, 4, 128),
    "13b": Preset(40, 5120, 40, 51200, 2048, 4, 128),
    "30b": Preset(48, 7168, 56, 51200, 4096, 2, 32),
    # One of the eight pipeline stages that the paper's 175B model is cut into (Table 2), with
    # embedding and head.
    "175b-stage": Preset(12, 12288, 96, 51200, 2048, 4, 32),
}
OVERLAPS = ("tp", "pp", "dp", "peer_edges")


class ConfigurationRefused(ValueError):
    """A configuration that cannot run; the message names what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration, in the words of the command line; 0 stands for the preset's value.

    ``dp`` 0: the ranks that tp and pp leave. ``steps`` includes the warm-up. ``data`` is the prefix
    of a tokenised corpus; without one the tokens are random and the same in every step. ``initial``
    "device" draws initial values quickly, the same for the same layout; "exact" draws the trainer's
    own, which are the same for all layouts. ``seed`` is that of those values, and of the order of a
    corpus's samples. ``loop`` "product" trains as a job does, "bare" takes steps without loader,
    records and status page; ``trackers`` get the product's step records.
    """

    preset: str = "tiny"
    layers: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 0
    vpp: int = 1
    stage_layers: tuple[int, ...] = ()
    seq: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    block: str = "parallel"
    mlp: str = "gelu"
    ffn: int = 0
    norm: str = "layernorm"
    bias: bool = False
    attention: str = "causal"
    window: int = 0
    overlap: tuple[str, ...] = ()
    kernels: str = "torch"
    recompute: str = "none"
    schedule: str = "1f1b"
    bucket_mib: int = 64
    deterministic: bool = False
    cuda_graphs: bool = False
    precision: str = ""
    fp8_format: str = "hybrid"
    parameter_gather: str = "bf16"
    fast_accumulation: str = Fp8Config().fast_accumulation
    optimizer: str = "adamw"
    steps: int = 10
    data: str = ""
    initial: str = "device"
    seed: int = 1234
    loop: str = "product"
    trackers: str = "none"


def sizes(config: JobConfig) -> dict[str, int]:
    """Layout, depth and batch of a job by the names of the results, the peers' as well."""
    model, parallel, training = config.model, config.parallelism, config.training
    return {
        "ranks": config.layout.world_size,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.virtual_stages,
        "dp": parallel.dp,
        "layers": model.layers,
        "sequence_length": model.sequence_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
    }


def job(run: Run, world_size: int, *, cuda: bool) -> JobConfig:
    """The job of ``run`` on ``world_size`` ranks; by default bf16 on CUDA, fp32 on a CPU.

    Raises:
        ConfigurationRefused: the layout does not fit the ranks or the model.
    """
    preset = PRESETS[run.preset]
    dp = run.dp or max(1, world_size // (run.tp * run.pp))
    if run.tp * run.pp * dp != world_size:
        raise ConfigurationRefused(
            f"tp {run.tp} * pp {run.pp} * dp {dp} is not the {world_size} ranks that there are"
        )
    config = from_accepted(
        {
            "name": f"throughput-{run.preset}",
            "model": {
                "layers": run.layers or preset.layers,
                "hidden_size": preset.hidden,
                "heads": preset.heads,
                "vocab_size": preset.vocabulary,
                "sequence_length": run.seq or preset.sequence,
                "block": run.block,
                "mlp": run.mlp,
                "ffn_size": run.ffn,
                "norm": run.norm,
                "bias": run.bias,
                "window": run.window,
            },
            "parallelism": {
                "tp": run.tp,
                "pp": run.pp,
                "dp": dp,
                "virtual_stages": run.vpp,
                "stage_layers": list(run.stage_layers),
                "recompute": run.recompute,
                "pipeline_schedule": run.schedule,
                "overlap": {axis: axis in run.overlap for axis in OVERLAPS},
            },
            "training": {
                "steps": run.steps,
                "seed": run.seed,
                "global_batch_size": run.global_batch or preset.batch,
                "micro_batch_size": run.micro_batch or preset.micro_batch,
                "precision": run.precision or ("bf16" if cuda else "fp32"),
                "fp8": {
                    "format": run.fp8_format,
                    "parameter_gather": run.parameter_gather,
                    "fast_accumulation": run.fast_accumulation,
                },
                "deterministic": run.deterministic,
                "cuda_graphs": run.cuda_graphs,
                "bucket_mib": run.bucket_mib,
                "kernels": run.kernels,
            },
            "optimizer": {"name": run.optimizer},
            "schedule": {"warmup_steps": run.steps // 10},
            "telemetry": {} if run.trackers == "none" else {run.trackers: True},
            "data": {
                "seed": run.seed,
                "document_attention": run.attention == "documents",
                "sources": [{"prefix": run.data}] if run.data else [],
            },
        }
    )
    problems = [
        problem
        for problem in validate(config)
        if run.data or problem.field != "trainer.data.sources"
    ]
    if problems:
        raise ConfigurationRefused("; ".join(map(str, problems)))
    return config
