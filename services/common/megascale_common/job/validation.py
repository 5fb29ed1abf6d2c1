"""Checks a job before anything runs: every problem at once, each with its field and its remedy.

Pure and shared: the driver refuses a bad job with it, the CLI explains one without a cluster.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megascale_common.job.names import is_dns_label
from megascale_common.job.problems import JobProblem

if TYPE_CHECKING:  # config imports this module
    from megascale_common.job.config import DataSource, JobConfig, OptimizerConfig

_MAX_LABELS = 64
_MAX_TEXT = 1024
_MAX_PATH = 4096  # the kernel's own limit
_MAX_SOURCES = 1024
_MAX_OPTIONS, _MAX_OPTION_NAME = 64, 63
# Far above what is trained today, and far below what would exhaust the memory of the driver or the
# CLI when they compute with it.
_LIMITS = {
    "model.layers": 4096,
    "model.hidden_size": 2**20,
    "model.heads": 2**16,
    "model.kv_heads": 2**16,
    "model.ffn_size": 2**20,
    "model.vocab_size": 2**24,
    "model.sequence_length": 2**24,
    "model.window": 2**24,
    "parallelism.virtual_stages": 4096,
    "training.steps": 2**40,
    "training.global_batch_size": 2**24,
    "training.micro_batch_size": 2**24,
    "training.bucket_mib": 65_536,
    "evaluation.interval_steps": 2**40,
    "evaluation.batches": 10**6,
    "checkpoint.interval_steps": 2**40,
    "recovery.max_restarts": 10**6,
    "recovery.max_restarts_without_progress": 10**6,
    "recovery.spare_nodes": 10**4,
}
_MAX_WORLD_SIZE = 2**17
_MAX_COLLECTIVE_TIMEOUT_S = 86_400
_SHA256_DIGITS = 64


def validate(config: JobConfig) -> list[JobProblem]:
    """All problems of ``config``, in the order of the spec; empty when it can run."""
    problems = [*_identity(config), *_sizes(config), *_limits(config)]
    if not problems:  # relations between sizes mean nothing while one of them is out of range
        problems += [*_model(config), *_parallelism(config), *_batch(config)]
    return [
        *problems,
        *_not_built(config),
        *_optimizer(config),
        *_schedule(config),
        *_data(config),
        *_evaluation(config),
        *_checkpoint(config),
        *_recovery(config),
    ]


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


def _sizes(config: JobConfig) -> Iterator[JobProblem]:
    model, parallel, training = config.model, config.parallelism, config.training
    positive = {
        "model.layers": model.layers,
        "model.hidden_size": model.hidden_size,
        "model.heads": model.heads,
        "model.vocab_size": model.vocab_size,
        "model.sequence_length": model.sequence_length,
        "parallelism.tp": parallel.tp,
        "parallelism.cp": parallel.cp,
        "parallelism.dp": parallel.dp,
        "parallelism.pp": parallel.pp,
        "parallelism.ep": parallel.ep,
        "parallelism.virtual_stages": parallel.virtual_stages,
        "training.steps": training.steps,
        "training.global_batch_size": training.global_batch_size,
        "training.micro_batch_size": training.micro_batch_size,
        "training.bucket_mib": training.bucket_mib,
    }
    for name, value in positive.items():
        if value < 1:
            yield JobProblem(name, f"{value} is not positive", "give at least 1")
    for name, value in {"model.ffn_size": model.ffn_size, "model.kv_heads": model.kv_heads}.items():
        if value < 0:
            yield JobProblem(
                name, f"{value} is negative", "give a positive number, or leave it out"
            )
    if model.window < 0:
        yield JobProblem(
            "model.window", f"{model.window} is negative", "give a width in tokens, or 0 for none"
        )
    if model.layer_windows and (
        len(model.layer_windows) != model.layers or min(model.layer_windows) < 0
    ):
        yield JobProblem(
            "model.layer_windows",
            f"{len(model.layer_windows)} windows for {model.layers} layers, the smallest is "
            f"{min(model.layer_windows)}",
            "give one width in tokens per layer, 0 for none; or leave the list out and set "
            "model.window",
        )


def _limits(config: JobConfig) -> Iterator[JobProblem]:
    for path, limit in _LIMITS.items():
        section, _, name = path.partition(".")
        value = getattr(getattr(config, section), name)
        if value > limit:
            yield JobProblem(path, f"{value} is out of range", f"give at most {limit}")
    sizes = config.parallelism
    if sizes.tp * sizes.cp * sizes.dp * sizes.pp > _MAX_WORLD_SIZE or sizes.ep > _MAX_WORLD_SIZE:
        yield JobProblem(
            "parallelism", f"tp * cp * dp * pp is above {_MAX_WORLD_SIZE} ranks", "use fewer ranks"
        )
    if len(sizes.stage_layers) > _LIMITS["model.layers"]:
        yield JobProblem(
            "parallelism.stage_layers", f"{len(sizes.stage_layers)} entries", "give one per stage"
        )


def _model(config: JobConfig) -> Iterator[JobProblem]:
    model = config.model
    if model.hidden_size % model.heads:
        multiple = model.hidden_size // model.heads * model.heads or model.heads
        yield JobProblem(
            "model.hidden_size",
            f"{model.hidden_size} is not a multiple of model.heads = {model.heads}",
            f"use {multiple} or another multiple",
        )
    elif model.positions == "rope" and model.head_size % 2:
        yield JobProblem(
            "model.heads",
            f"the head size {model.hidden_size}/{model.heads} = {model.head_size} is odd; "
            "rope rotates pairs",
            "choose heads so that hidden_size/heads is even, or positions: learned",
        )
    if model.heads % model.key_value_heads:
        yield JobProblem(
            "model.kv_heads",
            f"model.heads = {model.heads} is not a multiple of {model.key_value_heads}",
            "use a divisor of model.heads",
        )
    for name, value in {
        "norm_epsilon": model.norm_epsilon,
        "initializer_std": model.initializer_std,
    }.items():
        if not 0 < value < 1:
            yield JobProblem(
                f"model.{name}", f"{value} is out of range", "give a number between 0 and 1"
            )
    if not (math.isfinite(model.rope_theta) and model.rope_theta > 1):
        yield JobProblem(
            "model.rope_theta", f"{model.rope_theta} is out of range", "give a number above 1"
        )


def _parallelism(config: JobConfig) -> Iterator[JobProblem]:
    model, parallel = config.model, config.parallelism
    divided = {
        "model.heads": model.heads,
        "model.kv_heads": model.key_value_heads,
        "model.hidden_size": model.hidden_size,
        "model.sequence_length": model.sequence_length,
    }
    for name, value in divided.items():
        if value % parallel.tp:
            why = " (sequence parallelism splits it)" if name.endswith("sequence_length") else ""
            yield JobProblem(
                "parallelism.tp", f"{name} = {value} is not a multiple of tp = {parallel.tp}{why}",
                f"use a tp that divides {value}",
            )  # fmt: skip
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        yield JobProblem(
            "parallelism.virtual_stages",
            f"{parallel.virtual_stages} at pp = 1: there is nothing to interleave",
            "use 1",
        )
    stages, virtual_stages = parallel.stage_layers, parallel.pp * parallel.virtual_stages
    if stages and len(stages) != virtual_stages:
        yield JobProblem(
            "parallelism.stage_layers",
            f"{len(stages)} entries for pp * virtual_stages = {virtual_stages}",
            "give one per virtual stage, in the order of the model",
        )
    elif stages and (min(stages) < 1 or sum(stages) != model.layers):
        yield JobProblem(
            "parallelism.stage_layers",
            f"{list(stages)} adds up to {sum(stages)}, model.layers is {model.layers}",
            "give positive numbers that add up to model.layers",
        )
    elif not stages and model.layers < virtual_stages:
        yield JobProblem(
            "parallelism.virtual_stages" if model.layers >= parallel.pp else "parallelism.pp",
            f"model.layers = {model.layers} is too few for pp * virtual_stages = {virtual_stages}",
            "use fewer stages: each holds at least one layer",
        )


def _batch(config: JobConfig) -> Iterator[JobProblem]:
    global_batch_size = config.training.global_batch_size
    unit = config.training.micro_batch_size * config.parallelism.dp
    if global_batch_size % unit:
        yield JobProblem(
            "training.global_batch_size",
            f"{global_batch_size} is not a multiple of micro_batch_size * dp = {unit}",
            f"use {-(-global_batch_size // unit) * unit}",
        )
    elif config.parallelism.virtual_stages > 1 and config.micro_batches % config.parallelism.pp:
        unit *= config.parallelism.pp
        yield JobProblem(
            "training.global_batch_size",
            f"gives {config.micro_batches} micro-batches per replica; interleaving requires a "
            "multiple of pp",
            f"use {-(-global_batch_size // unit) * unit}, or parallelism.virtual_stages: 1",
        )


def _not_built(config: JobConfig) -> Iterator[JobProblem]:
    parallel = config.parallelism
    for name in ("cp", "ep"):
        value = getattr(parallel, name)
        if value > 1:
            yield JobProblem(f"parallelism.{name}", f"{value} is not built yet", "use 1")
    if config.model.tie_embeddings:
        yield JobProblem("model.tie_embeddings", "tied embeddings are not built yet", "use false")


def _optimizer(config: JobConfig) -> Iterator[JobProblem]:
    optimizer = config.optimizer
    if not is_dns_label(optimizer.name):
        yield JobProblem(
            "optimizer.name",
            f"{optimizer.name!r} is not a DNS-1123 label",
            "use the name under which its package registers it: a-z, 0-9 and '-'",
        )
    yield from _optimizer_options(optimizer)
    if not (math.isfinite(optimizer.learning_rate) and 0 < optimizer.learning_rate <= 10):
        yield JobProblem(
            "optimizer.learning_rate",
            f"{optimizer.learning_rate} is out of range",
            "give 0 < lr <= 10",
        )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield JobProblem(f"optimizer.{name}", f"{value} is out of range", "give 0 <= beta < 1")
    if not 0 < optimizer.epsilon < 1:
        yield JobProblem(
            "optimizer.epsilon",
            f"{optimizer.epsilon} is out of range",
            "give a small positive number",
        )
    if not 0 <= optimizer.weight_decay <= 10:
        yield JobProblem(
            "optimizer.weight_decay", f"{optimizer.weight_decay} is out of range", "give 0 to 10"
        )
    if not (math.isfinite(optimizer.clip_norm) and optimizer.clip_norm >= 0):
        yield JobProblem(
            "optimizer.clip_norm", f"{optimizer.clip_norm} is out of range", "give 0 (off) or more"
        )


def _optimizer_options(optimizer: OptimizerConfig) -> Iterator[JobProblem]:
    field, options = "optimizer.options", optimizer.options
    if options and optimizer.name == type(optimizer)().name:
        yield JobProblem(
            field,
            f"{optimizer.name} takes no options",
            "set the other fields of optimizer, or set optimizer.name to one that takes options",
        )
    if len(options) > _MAX_OPTIONS:
        yield JobProblem(field, f"{len(options)} options", f"use at most {_MAX_OPTIONS}")
    for name, value in list(options.items())[:_MAX_OPTIONS]:
        if not name.isidentifier() or len(name) > _MAX_OPTION_NAME:
            yield JobProblem(
                field,
                f"{name[:_MAX_OPTION_NAME]!r} is not an option's name",
                f"use letters, digits and '_', at most {_MAX_OPTION_NAME} characters",
            )
        elif not math.isfinite(value):
            yield JobProblem(f"{field}.{name}", f"{value} is not finite", "give a number")


def _schedule(config: JobConfig) -> Iterator[JobProblem]:
    schedule = config.schedule
    if not 0 <= schedule.warmup_steps <= max(config.training.steps, 0):
        yield JobProblem(
            "schedule.warmup_steps",
            f"{schedule.warmup_steps} is outside 0 to training.steps = {config.training.steps}",
            "warm up within the run",
        )
    if not 0 <= schedule.min_ratio <= 1:
        yield JobProblem(
            "schedule.min_ratio", f"{schedule.min_ratio} is out of range", "give 0 to 1"
        )
    if not (math.isfinite(config.loss.z_loss) and config.loss.z_loss >= 0):
        yield JobProblem(
            "loss.z_loss", f"{config.loss.z_loss} is out of range", "give 0 (off) or more"
        )


def _data(config: JobConfig) -> Iterator[JobProblem]:
    data = config.data
    if not data.sources:
        yield JobProblem(
            "data.sources",
            "no source given",
            "give at least one .bin/.idx prefix (`megascale data tokenize` makes one)",
        )
    yield from _sources("data.sources", data.sources)
    tokenizer = data.tokenizer
    if len(tokenizer.path) > _MAX_PATH:
        yield JobProblem("data.tokenizer.path", "too long", f"use at most {_MAX_PATH} characters")
    if tokenizer.kind == "bpe" and not tokenizer.path:
        yield JobProblem("data.tokenizer.path", "missing for kind bpe", "give the tokenizer file")
    digits = tokenizer.sha256.lower()
    if digits and (len(digits) != _SHA256_DIGITS or set(digits) - set("0123456789abcdef")):
        yield JobProblem(
            "data.tokenizer.sha256", "not a SHA-256", f"give {_SHA256_DIGITS} hexadecimal digits"
        )


def _sources(field: str, sources: tuple[DataSource, ...]) -> Iterator[JobProblem]:
    if len(sources) > _MAX_SOURCES:
        yield JobProblem(field, f"{len(sources)} sources", f"use at most {_MAX_SOURCES}")
    for index, source in enumerate(sources[:_MAX_SOURCES]):
        where = f"{field}[{index}]"
        if not source.prefix:
            yield JobProblem(f"{where}.prefix", "empty", "give the path without .bin/.idx")
        elif len(source.prefix) > _MAX_PATH:
            yield JobProblem(f"{where}.prefix", "too long", f"use at most {_MAX_PATH} characters")
        elif not source.prefix.startswith("/"):
            yield JobProblem(
                f"{where}.prefix",
                f"{source.prefix!r} is relative",
                "give an absolute path on the nodes",
            )
        if not (math.isfinite(source.weight) and source.weight > 0):
            yield JobProblem(
                f"{where}.weight", f"{source.weight} is not positive", "give a share above 0"
            )


def _evaluation(config: JobConfig) -> Iterator[JobProblem]:
    evaluation = config.evaluation
    yield from _sources("evaluation.sources", evaluation.sources)
    if evaluation.interval_steps < 0:
        yield JobProblem(
            "evaluation.interval_steps",
            f"{evaluation.interval_steps} is negative",
            "give 0 (off) or more",
        )
    if evaluation.interval_steps > 0 and not evaluation.sources:
        yield JobProblem(
            "evaluation.sources",
            "no source given although evaluation.interval_steps is set",
            "give at least one held-out .bin/.idx prefix, or use interval 0",
        )
    if evaluation.batches < 1:
        yield JobProblem(
            "evaluation.batches", f"{evaluation.batches} is not positive", "give at least 1"
        )


def _checkpoint(config: JobConfig) -> Iterator[JobProblem]:
    checkpoint = config.checkpoint
    if checkpoint.interval_steps < 0:
        yield JobProblem(
            "checkpoint.interval_steps",
            f"{checkpoint.interval_steps} is negative",
            "give 0 (off) or more",
        )
    if checkpoint.interval_steps > 0 and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.interval_steps is set",
            "give a folder, or use interval 0",
        )
    yield from _storage("checkpoint.uri", checkpoint.uri)
    yield from _storage("checkpoint.load_uri", checkpoint.load_uri)
    if checkpoint.load_uri and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.load_uri is set",
            "give a folder of this job's own",
        )
    elif checkpoint.load_uri and _folder(checkpoint.load_uri) == _folder(checkpoint.uri):
        yield JobProblem(
            "checkpoint.load_uri",
            "is checkpoint.uri itself",
            "give another job's folder; a job resumes from its own without load_uri",
        )
    if checkpoint.slots not in (0, 2, 3, 4):
        yield JobProblem(
            "checkpoint.slots",
            f"{checkpoint.slots} is out of range",
            "give 2 to 4, or leave it out",
        )


def _storage(field: str, uri: str) -> Iterator[JobProblem]:
    if len(uri) > _MAX_PATH:
        yield JobProblem(field, "too long", f"use at most {_MAX_PATH} characters")
        return
    scheme = uri.split("://", 1)[0] if "://" in uri else ""
    if scheme and scheme != "file":
        yield JobProblem(
            field, f"storage {scheme}:// is not built yet", "use an absolute path or file://"
        )
    elif uri and not uri.removeprefix("file://").startswith("/"):
        yield JobProblem(field, f"{uri!r} is relative", "give an absolute path that all nodes see")


def _folder(uri: str) -> str:
    return posixpath.normpath(uri.removeprefix("file://"))


def _recovery(config: JobConfig) -> Iterator[JobProblem]:
    recovery = config.recovery
    for name in ("max_restarts", "max_restarts_without_progress", "spare_nodes"):
        value = getattr(recovery, name)
        if value < 0:
            yield JobProblem(f"recovery.{name}", f"{value} is negative", "give 0 or more")
    if not 1 <= recovery.collective_timeout_s <= _MAX_COLLECTIVE_TIMEOUT_S:
        yield JobProblem(
            "recovery.collective_timeout_s",
            f"{recovery.collective_timeout_s} is out of range",
            f"give 1 second to {_MAX_COLLECTIVE_TIMEOUT_S}",
        )
