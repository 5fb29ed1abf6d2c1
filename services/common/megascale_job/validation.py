"""Checks a job before anything runs: every problem at once, each with its field and its remedy.

Pure and shared: the driver refuses a bad job with it, the CLI explains one without a cluster.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator

from megascale_job import size_checks
from megascale_job.code_checks import code_problems
from megascale_job.config import CheckpointConfig, JobConfig
from megascale_job.data_checks import data_problems, evaluation_problems
from megascale_job.fp8_checks import fp8_problems
from megascale_job.names import is_dns_label
from megascale_job.optimizer_checks import optimizer_problems
from megascale_job.problems import JobProblem

_MAX_LABELS = 64
_MAX_TEXT = 1024
_MAX_PATH = 4096  # the kernel's own limit
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$)")  # S3's own rule
_MAX_COLLECTIVE_TIMEOUT_S = 86_400
_MAX_REPLICATE_MIB_PER_S = 1e6
_MAX_FINAL_TIMEOUT_S = 3600
_MAX_MTBF_HOURS = 1e9
_MAX_REPAIR_HOURS = 8760.0
_MAX_SPARE_PROBABILITY = 0.999999
_MIN_HOURS, _MAX_HOURS = 0.02, 24 * 366
_MAX_MIB_PER_S = 2**20  # a TiB per second
_MAX_LOSS_RISE = 10**6
_MAX_ROLL_BACKS = 8  # the driver keeps as many (MAX_ROLLBACKS of its core)


def validate(config: JobConfig) -> list[JobProblem]:
    """All problems of ``config``, in the order of the spec; empty when it can run."""
    problems = [*_identity(config), *size_checks.sizes(config), *size_checks.limits(config)]
    if not problems:  # relations between sizes mean nothing while one of them is out of range
        problems += [
            *size_checks.model(config),
            *size_checks.parallelism(config),
            *size_checks.batch(config),
        ]
    if not problems:
        problems += fp8_problems(config)
    return [
        *problems,
        *size_checks.not_built(config),
        *optimizer_problems(config.optimizer),
        *_schedule(config),
        *data_problems(config.data),
        *evaluation_problems(config.evaluation),
        *_checkpoint(config),
        *_recovery(config),
        *code_problems(config),
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


def _schedule(config: JobConfig) -> Iterator[JobProblem]:
    schedule = config.schedule
    if not 0 <= schedule.warmup_steps <= max(config.training.steps, 0):
        yield JobProblem(
            "trainer.schedule.warmup_steps",
            f"{schedule.warmup_steps} is outside 0 to trainer.training.steps = "
            f"{config.training.steps}",
            "warm up within the run",
        )
    if not 0 <= schedule.min_ratio <= 1:
        yield JobProblem(
            "trainer.schedule.min_ratio", f"{schedule.min_ratio} is out of range", "give 0 to 1"
        )
    if not (math.isfinite(config.loss.z_loss) and config.loss.z_loss >= 0):
        yield JobProblem(
            "trainer.loss.z_loss", f"{config.loss.z_loss} is out of range", "give 0 (off) or more"
        )


def _replicas(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    if checkpoint.replicas not in (0, 1):
        yield JobProblem(
            "checkpoint.replicas",
            f"{checkpoint.replicas} is out of range",
            "give 1 for a copy of each snapshot on another node, or 0 for none",
        )
    elif checkpoint.replicas and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.replicas is set",
            "give a folder that all nodes share",
        )
    rate = checkpoint.max_replicate_mib_per_s
    if rate != 0 and not 1 <= rate <= _MAX_REPLICATE_MIB_PER_S:
        yield JobProblem(
            "checkpoint.max_replicate_mib_per_s",
            f"{rate} is out of range",
            f"give 1 to {_MAX_REPLICATE_MIB_PER_S:g} MiB per second, or 0 for no limit",
        )


def _checkpoint(config: JobConfig) -> Iterator[JobProblem]:
    checkpoint = config.checkpoint
    if checkpoint.interval_steps < 0:
        yield JobProblem(
            "checkpoint.interval_steps",
            f"{checkpoint.interval_steps} is negative",
            "give 0 (off) or more",
        )
    yield from _auto_interval(checkpoint)
    snapshots = checkpoint.snapshot_interval_steps
    if snapshots < 0:
        yield JobProblem(
            "checkpoint.snapshot_interval_steps",
            f"{snapshots} is negative",
            "give 1 for a snapshot after every step, or leave it out for interval_steps",
        )
    elif snapshots > 0 and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.snapshot_interval_steps is set",
            "give a folder that all nodes share",
        )
    elif snapshots > 0 and checkpoint.interval_steps % snapshots and not _auto(checkpoint):
        yield JobProblem(
            "checkpoint.snapshot_interval_steps",
            f"{snapshots} does not divide checkpoint.interval_steps {checkpoint.interval_steps}",
            "give a divisor: what is persisted is one of the snapshots",
        )
    if checkpoint.interval_steps > 0 and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.interval_steps is set",
            "give a folder, or use interval 0",
        )
    yield from _storage("checkpoint.uri", checkpoint.uri)
    yield from _loading(checkpoint)
    yield from _replicas(checkpoint)
    if not 0 <= checkpoint.verify_d2h <= 1:
        yield JobProblem(
            "checkpoint.verify_d2h",
            f"{checkpoint.verify_d2h:g} is out of range",
            "give 0 to 1, a share of the bytes of a snapshot",
        )
    if checkpoint.slots != 0 and not 2 <= checkpoint.slots <= 8:
        yield JobProblem(
            "checkpoint.slots",
            f"{checkpoint.slots} is out of range",
            "give 2 to 8, or leave it out",
        )
    if not 1 <= checkpoint.final_timeout_s <= _MAX_FINAL_TIMEOUT_S:
        yield JobProblem(
            "checkpoint.final_timeout_s",
            f"{checkpoint.final_timeout_s:g} is out of range",
            f"give 1 to {_MAX_FINAL_TIMEOUT_S} seconds",
        )
    yield from _retention(checkpoint)


def _loading(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
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
            "give another job's folder: a job resumes from its own without load_uri",
        )
    if checkpoint.load == "weights" and not checkpoint.load_uri:
        yield JobProblem(
            "checkpoint.load",
            "is weights, and checkpoint.load_uri names no checkpoint to take them from",
            "give a load_uri, or leave load out",
        )


def _auto(checkpoint: CheckpointConfig) -> bool:
    return checkpoint.interval == "auto"


def _auto_interval(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    if _auto(checkpoint) and checkpoint.interval_steps:
        yield JobProblem(
            "checkpoint.interval_steps",
            f"{checkpoint.interval_steps} is given, and checkpoint.interval is auto",
            "give one of the two",
        )
    if _auto(checkpoint) and not checkpoint.uri:
        yield JobProblem(
            "checkpoint.uri",
            "empty although checkpoint.interval is auto",
            "give a folder that all nodes share",
        )
    if not 1 <= checkpoint.device_mtbf_hours <= _MAX_MTBF_HOURS:
        yield JobProblem(
            "checkpoint.device_mtbf_hours",
            f"{checkpoint.device_mtbf_hours:g} is out of range",
            f"give 1 to {_MAX_MTBF_HOURS:g} hours of one device between two failures",
        )
    if not 0 <= checkpoint.max_step_slowdown <= 1:
        yield JobProblem(
            "checkpoint.max_step_slowdown",
            f"{checkpoint.max_step_slowdown:g} is out of range",
            "give 0 (a write never slows down) to 1, a share of a step's time",
        )


def _retention(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    limits = {
        "keep_latest": (0, 2**31 - 1),
        "keep_every_steps": (0, 2**63 - 1),
        "keep_every_hours": (0, _MAX_HOURS),
        "max_write_mib_per_s": (0, _MAX_MIB_PER_S),
    }
    for name, (least, most) in limits.items():
        value = getattr(checkpoint, name)
        if not least <= value <= most:
            yield JobProblem(
                f"checkpoint.{name}", f"{value} is out of range", f"give {least} to {most}"
            )
    if 0 < checkpoint.keep_every_hours < _MIN_HOURS:
        yield JobProblem(
            "checkpoint.keep_every_hours",
            f"{checkpoint.keep_every_hours:g} is less than a minute",
            f"give at least {_MIN_HOURS}, or 0 for no rule",
        )
    if 0 < checkpoint.max_write_mib_per_s < 1:
        yield JobProblem(
            "checkpoint.max_write_mib_per_s",
            f"{checkpoint.max_write_mib_per_s:g} is less than 1",
            "give at least 1, or 0 for no limit",
        )


def _storage(field: str, uri: str) -> Iterator[JobProblem]:
    if len(uri) > _MAX_PATH:
        yield JobProblem(field, "too long", f"use at most {_MAX_PATH} characters")
        return
    scheme, _, rest = uri.partition("://") if "://" in uri else ("", "", "")
    if scheme in ("http", "https", "ftp") or (scheme and not _SCHEME.fullmatch(scheme)):
        yield JobProblem(
            field,
            f"{scheme}:// is no storage of checkpoints",
            "use an absolute path, file:///path, s3://bucket/prefix or hdfs://host:port/path",
        )
    elif scheme == "s3" and not _BUCKET.match(rest):
        yield JobProblem(field, f"{uri!r} names no bucket", "use s3://bucket/prefix")
    elif scheme == "hdfs" and not re.match(r"[^/?#]+(/|$)", rest):
        yield JobProblem(field, f"{uri!r} names no host", "use hdfs://host:port/path")
    elif uri and scheme in ("", "file") and not uri.removeprefix("file://").startswith("/"):
        yield JobProblem(field, f"{uri!r} is relative", "give an absolute path that all nodes see")
    # Any other scheme may be one that a package on the nodes adds: they find out.


def _folder(uri: str) -> str:
    return posixpath.normpath(uri.removeprefix("file://"))


def _roll_back(config: JobConfig) -> Iterator[JobProblem]:
    recovery = config.recovery
    for name in ("on_non_finite", "on_loss_rise"):
        if getattr(recovery, name) == "roll_back" and not config.checkpoint.uri:
            yield JobProblem(
                f"recovery.{name}",
                "is roll_back, and checkpoint.uri is empty",
                "give a folder for checkpoints, or use stop",
            )
    if not 1 <= recovery.max_roll_backs <= _MAX_ROLL_BACKS:
        yield JobProblem(
            "recovery.max_roll_backs",
            f"{recovery.max_roll_backs} is out of range",
            f"give 1 to {_MAX_ROLL_BACKS}",
        )


def _recovery(config: JobConfig) -> Iterator[JobProblem]:
    recovery = config.recovery
    counts = ("max_restarts", "max_restarts_without_progress", "spare_nodes", "divergence_steps")
    for name in counts:
        value = getattr(recovery, name)
        if value < 0:
            yield JobProblem(f"recovery.{name}", f"{value} is negative", "give 0 or more")
    yield from _roll_back(config)
    if recovery.spares == "auto" and recovery.spare_nodes:
        yield JobProblem(
            "recovery.spare_nodes",
            f"{recovery.spare_nodes} is given, and recovery.spares is auto",
            "give one of the two",
        )
    if not 0 < recovery.repair_hours <= _MAX_REPAIR_HOURS:
        yield JobProblem(
            "recovery.repair_hours",
            f"{recovery.repair_hours:g} is out of range",
            f"give more than 0 up to {_MAX_REPAIR_HOURS:g} hours until a lost node is back",
        )
    if not 0.5 <= recovery.spare_probability <= _MAX_SPARE_PROBABILITY:
        yield JobProblem(
            "recovery.spare_probability",
            f"{recovery.spare_probability:g} is out of range",
            f"give 0.5 to {_MAX_SPARE_PROBABILITY}",
        )
    factor = recovery.loss_rise_factor
    if factor != 0 and not 1 < factor <= _MAX_LOSS_RISE:
        yield JobProblem(
            "recovery.loss_rise_factor",
            f"{factor} is out of range",
            f"give more than 1 up to {_MAX_LOSS_RISE}, or 0 (off)",
        )
    if not 1 <= recovery.collective_timeout_s <= _MAX_COLLECTIVE_TIMEOUT_S:
        yield JobProblem(
            "recovery.collective_timeout_s",
            f"{recovery.collective_timeout_s} is out of range",
            f"give 1 second to {_MAX_COLLECTIVE_TIMEOUT_S}",
        )
