"""Model sizes, configurations and command lines of the benchmarks, and sweeps of command lines.

A sweep is a JSON list of objects whose keys are the options of one measurement
(``"micro_batch": 4``). Only ``rows`` are not an option: changes that are added one after the other,
each compared with the one before and with the first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from megascale_job import config as kinds
from megascale_job.config import Fp8Config, JobConfig, validate
from megascale_job.loading import from_accepted

COMPARED_ROUNDS = 5
LEAST_STEPS = 4
_TURN_POLL_S = 0.02
OVERLAPS = ("tp", "pp", "dp", "peer_edges")


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the batch that it is measured with. ``batch`` is in sequences over all ranks.

    ``model``: further fields of the job's model. With experts the vocabulary is the model's own
    times ``layers`` / its layers, also for another number of layers: so the head has the share of
    the whole model in the work of the layers that are kept.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    batch: int
    model: Mapping[str, Any] = field(default_factory=dict)


def _experts(count: int, top_k: int, width: int, shared: int = 0, **model: Any) -> dict[str, Any]:
    """The fields of a model with experts of ``width``; ``shared``: width of all shared experts."""
    return {
        "block": "serial",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "rope_theta": 1e6,
        "experts": {
            "count": count,
            "top_k": top_k,
            "ffn_size": width,
            "shared_ffn_size": shared,
        },
        **model,
    }


_QWEN_ATTENTION = {"kv_heads": 4, "head_dim": 128, "qk_norm": True}

PRESETS = {
    "tiny": Preset(4, 128, 4, 512, 128, 2, 16),
    "1b": Preset(16, 2048, 16, 51200, 2048, 4, 64),
    "7b": Preset(32, 4096, 32, 51200, 2048, 4, 128),
    "13b": Preset(40, 5120, 40, 51200, 2048, 4, 128),
    "30b": Preset(48, 7168, 56, 51200, 4096, 2, 32),
    # One of the eight pipeline stages that the paper's 175B model is cut into (Table 2), with
    # embedding and head.
    "175b-stage": Preset(12, 12288, 96, 51200, 2048, 4, 32),
    # Models with experts, of true width with few layers: Mixtral 8x7B, Qwen3-30B-A3B, the share of
    # one of 8 devices of it (all rows, an eighth of the experts), DeepSeek-V2-Lite with plain
    # attention.
    "m1": Preset(2, 4096, 32, 2048, 4096, 4, 16, _experts(8, 2, 14336, kv_heads=8)),
    "m2": Preset(6, 2048, 32, 18944, 4096, 4, 16, _experts(128, 8, 768, **_QWEN_ATTENTION)),
    "m2-ep8": Preset(6, 2048, 32, 18944, 4096, 4, 16, _experts(16, 8, 768, **_QWEN_ATTENTION)),
    "m3": Preset(6, 2048, 16, 22784, 4096, 4, 16, _experts(64, 6, 1408, shared=2816)),
    "tiny-experts": Preset(2, 64, 4, 128, 64, 2, 8, _experts(8, 2, 32, 32, qk_norm=True)),
}
BALANCE = 1e-3  # coefficient of the auxiliary loss of models with experts


class ConfigurationRefused(ValueError):
    """A configuration that cannot run; the message names what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration, by the names of the command line; 0 stands for the preset's value.

    ``dp`` 0: the ranks that tp and pp leave. ``steps`` includes the warm-up. ``data`` is the prefix
    of a tokenised corpus; without one the tokens are random. ``loop`` "product" trains as a job
    does, "bare" takes steps without loader, records and status page. ``routing`` "balanced" sends
    tokens to experts by turn, and the model learns nothing.
    """

    preset: str = "tiny"
    layers: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 0
    ep: int = 1
    vpp: int = 1
    stage_layers: tuple[int, ...] = ()
    seq: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    block: str = ""
    mlp: str = ""
    ffn: int = 0
    norm: str = ""
    bias: bool = False
    attention: str = "causal"
    window: int = 0
    routing: str = "learned"
    overlap: tuple[str, ...] = ()
    kernels: str = "torch"
    recompute: str = "none"
    schedule: str = "1f1b"
    chunk_rows: int = 0
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
    loop: str = "product"


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several configurations that are measured in turn."""

    label: str
    run: Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One measurement.

    Args:
        variants: configurations, measured in turn ``rounds`` times; the last one is the subject.
        profile: a file, relative to the folder of results.
    """

    name: str
    variants: tuple[Variant, ...]
    rounds: int
    profile: str

    @property
    def run(self) -> Run:
        """The configuration that the measurement is about."""
        return self.variants[-1].run


_CHOICES: Mapping[str, Sequence[str]] = {
    "preset": tuple(PRESETS),
    "block": get_args(kinds.Block),
    "mlp": get_args(kinds.Mlp),
    "norm": get_args(kinds.Norm),
    "attention": ("causal", "documents"),
    "routing": ("learned", "balanced"),
    "kernels": get_args(kinds.Kernels),
    "recompute": get_args(kinds.Recompute),
    "schedule": get_args(kinds.PipelineSchedule),
    "precision": get_args(kinds.Precision),
    "fp8_format": get_args(kinds.Fp8Format),
    "parameter_gather": get_args(kinds.ParameterGather),
    "fast_accumulation": get_args(kinds.FastAccumulation),
    "optimizer": ("adamw", "lamb"),
    "loop": ("product", "bare"),
}
_HELP: Mapping[str, str] = {
    "dp": "default: the ranks that tp and pp leave",
    "ep": "ranks that share the experts of a layer",
    **dict.fromkeys(("block", "mlp", "norm"), "default: the preset's"),
    "vpp": "virtual stages per pipeline stage (interleaved 1F1B)",
    "stage_layers": "layers of each virtual stage, as 9,8,8,7 (default: even)",
    "seq": "sequence length in tokens (default: the preset's)",
    "micro_batch": "sequences in a micro-batch",
    "global_batch": "sequences in a step over all ranks",
    "ffn": "width of the feed-forward layer (default: the preset's, 4 * hidden without one)",
    "window": "sliding window in tokens; 0: none",
    "overlap": f"some of {','.join(OVERLAPS)}, or none",
    "chunk_rows": "tokens whose logits exist at once; 0: those of a micro-batch",
    "bucket_mib": "limit of a gradient bucket",
    "cuda_graphs": "launch the kernels of a layer together",
    "precision": "default: bf16 on CUDA, fp32 on a CPU",
    "parameter_gather": "how the weights of layers in FP8 travel over dp",
    "fast_accumulation": "which FP8 products are summed with fewer bits",
    "steps": "steps of a leg; the first 3 of a new trainer warm up",
    "data": "prefix of a corpus (default: random tokens)",
    "loop": "a job's loop with loader, step records and status page, or the step alone",
}


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the options of :class:`Run`, one for each field."""
    parsers = {"stage_layers": _numbers, "overlap": _overlap, "steps": _steps, "data": _prefix}
    for option in fields(Run):
        name, default = option.name, option.default
        how: dict[str, Any] = {"default": default, "help": _HELP.get(name)}
        if isinstance(default, bool):
            how["action"] = argparse.BooleanOptionalAction
        elif name in _CHOICES:
            how["choices"] = _CHOICES[name]
        else:
            how["type"] = parsers.get(name, type(default))
        parser.add_argument("--" + name.replace("_", "-"), **how)


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a configuration is measured."""
    add = parser.add_argument
    add("--name", default="", help="the name of the result")
    add(
        "--against",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="compare in A/B pairs",
    )
    add("--rounds", type=int, default=0, help="turns (default: 1, or 5 where two are compared)")
    add("--profile", default="", help="write a trace of two steps of rank 0 here (.json.gz)")


def add_machine(parser: argparse.ArgumentParser, device_count: int) -> None:
    """Add the options of the machine: where it runs, and where results go."""
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if device_count else "cpu")
    add("--ranks", type=int, default=0, help="default: tp * pp * dp, else all devices")
    add("--folder", type=Path, default=Path("."), help="where relative files go")
    add("--results", default="", help="JSON lines, one per measurement, written as they come")
    add("--turns", type=Path, help="begin measurement N when the file N is in this folder")
    add("--budget-s", type=float, default=0.0, help="end after this time, whatever is left")
    add("--limit-s", type=float, default=150.0, help="kill ranks without progress for this long")
    add("--json", action="store_true", help="results on stderr as JSON lines instead of text")


def entry_of(arguments: Sequence[str], rows: Sequence[Mapping[str, Any]] = ()) -> Entry:
    """The measurement of one command line.

    Raises:
        ConfigurationRefused: an unknown option, or options that contradict each other.
    """
    parser = _Parser(prog="a measurement", add_help=False, allow_abbrev=False)
    add_configuration(parser)
    add_measurement(parser)
    found = parser.parse_args(arguments)
    changes = [_split(text) for text in found.against]
    if changes and rows:
        raise ConfigurationRefused("a measurement has either rows or --against, not both")
    variants = [Variant("baseline" if rows else "measured", _run(found))]
    if changes:
        against = parser.parse_args([*arguments, *to_arguments(dict(changes))])
        variants.insert(0, Variant(", ".join(found.against), _run(against)))
    growing = list(arguments)
    for row in rows:
        growing += to_arguments({key: value for key, value in row.items() if key != "row"})
        variants.append(Variant(row["row"], _run(parser.parse_args(growing))))
    return Entry(
        name=found.name or found.preset,
        variants=tuple(variants),
        rounds=found.rounds or (COMPARED_ROUNDS if len(variants) > 1 else 1),
        profile=found.profile,
    )


def read_sweep(path: Path, common: Sequence[str]) -> list[Entry]:
    """The measurements of a sweep file; ``common`` options apply where an entry has none.

    Raises:
        ConfigurationRefused: the file is not a list of such objects; names the entry.
    """
    try:
        sweep = json.loads(path.read_text())
    except ValueError as problem:
        raise ConfigurationRefused(f"{path} is not JSON: {problem}") from problem
    entries = []
    for number, values in enumerate(sweep):
        rest = {key: value for key, value in values.items() if key != "rows"}
        try:
            entries.append(entry_of([*common, *to_arguments(rest)], values.get("rows", ())))
        except ConfigurationRefused as refusal:
            raise ConfigurationRefused(
                f"{path}, entry {number} ({values.get('name', 'unnamed')}): {refusal}"
            ) from refusal
    return entries


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """A JSON object as a command line: true and false are flags, objects repeat their option."""
    arguments = []
    for key, value in values.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, bool) or value in ("true", "false"):
            on = value in (True, "true")
            arguments.append(option if on else option.replace("--", "--no-", 1))
        elif isinstance(value, Mapping):
            for name, found in value.items():
                text = str(found).lower() if isinstance(found, bool) else str(found)
                arguments += [option, f"{name}={text}"]
        else:
            arguments += [option, str(value)]
    return arguments


def await_turn(turns: Path | None, number: int, waits: Callable[[], None]) -> None:
    """Wait for the file ``number`` in ``turns``, and call ``waits`` meanwhile."""
    while turns is not None and not (turns / str(number)).exists():
        waits()
        time.sleep(_TURN_POLL_S)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigurationRefused(message)


def _run(found: argparse.Namespace) -> Run:
    return Run(**{option.name: getattr(found, option.name) for option in fields(Run)})


def _overlap(text: str) -> tuple[str, ...]:
    names = () if text in ("", "none") else tuple(text.split(","))
    if set(names) - set(OVERLAPS):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(OVERLAPS)}, or none")
    return tuple(name for name in OVERLAPS if name in names)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_STEPS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give at least {LEAST_STEPS}, three of which warm up"
        )
    return int(text)


def _prefix(text: str) -> str:
    return str(Path(text).absolute()) if text else ""


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationRefused(f"{text!r} is not NAME=VALUE")
    return name, value


def sizes(config: JobConfig) -> dict[str, int]:
    """Layout, depth and batch of a job by the names of the results, the peers' as well."""
    model, parallel, training = config.model, config.parallelism, config.training
    return {
        "ranks": config.layout.world_size,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.virtual_stages,
        "dp": parallel.dp,
        "ep": parallel.ep,
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
    layers, vocabulary = run.layers or preset.layers, preset.vocabulary
    experts = "experts" in preset.model
    if experts:
        vocabulary = vocabulary * layers // preset.layers
    chosen = {"block": run.block, "mlp": run.mlp, "norm": run.norm, "ffn_size": run.ffn}
    dp = run.dp or max(1, world_size // (run.tp * run.pp))
    if run.tp * run.pp * dp != world_size:
        raise ConfigurationRefused(
            f"tp {run.tp} * pp {run.pp} * dp {dp} is not the number of ranks, {world_size}"
        )
    config = from_accepted(
        {
            "name": f"throughput-{run.preset}",
            "model": {
                "layers": layers,
                "hidden_size": preset.hidden,
                "heads": preset.heads,
                "vocab_size": vocabulary,
                "sequence_length": run.seq or preset.sequence,
                "bias": run.bias,
                "window": run.window,
                **preset.model,
                **{name: value for name, value in chosen.items() if value},
            },
            "parallelism": {
                "tp": run.tp,
                "pp": run.pp,
                "dp": dp,
                "ep": run.ep,
                "virtual_stages": run.vpp,
                "stage_layers": list(run.stage_layers),
                "recompute": run.recompute,
                "pipeline_schedule": run.schedule,
                "overlap": {axis: axis in run.overlap for axis in OVERLAPS},
            },
            "training": {
                "steps": run.steps,
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
                "forced_balance": run.routing == "balanced",
            },
            "loss": {
                "global_balance": BALANCE if experts else 0.0,
                "chunk_rows": run.chunk_rows,
            },
            "optimizer": {"name": run.optimizer},
            "schedule": {"warmup_steps": run.steps // 10},
            "data": {
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
