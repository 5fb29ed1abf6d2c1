"""A job's section ``checkpoint``, and its checks."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, MAX_PATH, bounds

_MIN_HOURS = 0.02
_MAX_HOURS = 24 * 366
_MAX_MIB_PER_S = 2**20  # a TiB per second
_MAX_REPLICATE_MIB_PER_S = 1e6
_MAX_MTBF_HOURS = 1e9
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$)")  # S3's own rule

_EVERY_STEP = "give 1 for a snapshot after every step, or leave it out for interval_steps"
_COPIES = "give 1 for a copy of each snapshot on another node, or 0 for none"
_RATE = f"give 1 to {_MAX_REPLICATE_MIB_PER_S:g} MiB per second, or 0 for no limit"
_MTBF = f"give 1 to {_MAX_MTBF_HOURS:g} hours of one device between two failures"
_SLOWDOWN = "give 0 (a write never slows down) to 1, a share of a step's time"

CheckpointInterval = Literal["steps", "auto"]
CheckpointLoad = Literal["full", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Place, frequency and retention of checkpoints.

    There are none if ``uri`` is empty; with ``interval_steps`` 0 only the last step is saved.
    ``snapshot_interval_steps`` 0 takes snapshots into memory as often as they are persisted.
    ``verify_d2h`` is the share of a snapshot's bytes that is compared with the device's. Each
    snapshot has ``replicas`` (0 or 1) copies on another node; a node sends at most
    ``max_replicate_mib_per_s`` (0: no limit). ``slots`` is the number of staging slots; with 0 the
    daemon chooses it. ``load_uri`` is the folder of another job's checkpoints, from which this job
    starts while it has none of its own; with ``load`` weights it takes only the parameters. A job
    whose last step is not saved within ``final_timeout_s`` fails, unless ``require_final`` is
    false. The three ``keep_...`` are rules for keeping checkpoints; without any, all are kept.
    ``max_write_mib_per_s`` limits the writes to storage of one node's ranks; 0: no limit. With
    ``interval`` auto the run decides how often it persists, from the cost of a save and from
    ``device_mtbf_hours``, the hours of a device between two failures. Steps may become longer by
    the share ``max_step_slowdown`` during a write to storage, which is slowed down above that; 0
    never slows it.
    """

    uri: str = ""
    interval_steps: int = field(
        default=0, metadata=bounds(0, 2**40, low="give 0 (off) or more", bits=64)
    )
    slots: int = field(
        default=0, metadata=bounds(2, 8, or_zero=True, remedy="give 2 to 8, or leave it out")
    )
    load_uri: str = ""
    require_final: bool = True
    final_timeout_s: float = field(
        default=300.0, metadata=bounds(1, 3600, remedy="give 1 to 3600 seconds")
    )
    snapshot_interval_steps: int = field(default=0, metadata=bounds(0, low=_EVERY_STEP, bits=64))
    keep_latest: int = field(
        default=0, metadata=bounds(0, 2**31 - 1, remedy=f"give 0 to {2**31 - 1}")
    )
    keep_every_steps: int = field(
        default=0, metadata=bounds(0, 2**63 - 1, remedy=f"give 0 to {2**63 - 1}", bits=64)
    )
    keep_every_hours: float = field(
        default=0.0, metadata=bounds(0, _MAX_HOURS, remedy=f"give 0 to {_MAX_HOURS}")
    )
    max_write_mib_per_s: float = field(
        default=0.0, metadata=bounds(0, _MAX_MIB_PER_S, remedy=f"give 0 to {_MAX_MIB_PER_S}")
    )
    verify_d2h: float = field(
        default=0.01,
        metadata=bounds(0, 1, remedy="give 0 to 1, a share of the bytes of a snapshot"),
    )
    replicas: int = field(default=0, metadata=bounds(0, 1, remedy=_COPIES))
    max_replicate_mib_per_s: float = field(
        default=0.0, metadata=bounds(1, _MAX_REPLICATE_MIB_PER_S, or_zero=True, remedy=_RATE)
    )
    interval: CheckpointInterval = field(default="steps", metadata=ADDED)
    device_mtbf_hours: float = field(
        default=50_000.0, metadata=bounds(1, _MAX_MTBF_HOURS, remedy=_MTBF, added=True)
    )
    max_step_slowdown: float = field(
        default=0.05, metadata=bounds(0, 1, remedy=_SLOWDOWN, added=True)
    )
    load: CheckpointLoad = field(default="full", metadata=ADDED)

    @property
    def memory_interval_steps(self) -> int:
        """Steps between snapshots into memory; 0: only the last step, or as the run decides."""
        return self.snapshot_interval_steps or self.interval_steps


def checkpoint_problems(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    """Problems of a job's section ``checkpoint``, except bounds of its numbers."""
    yield from _folder_missing(checkpoint)
    snapshots, auto = checkpoint.snapshot_interval_steps, checkpoint.interval == "auto"
    if auto and checkpoint.interval_steps:
        yield JobProblem(
            "checkpoint.interval_steps",
            f"{checkpoint.interval_steps} is given, and checkpoint.interval is auto",
            "give one of the two",
        )
    if snapshots > 0 and checkpoint.uri and checkpoint.interval_steps % snapshots and not auto:
        yield JobProblem(
            "checkpoint.snapshot_interval_steps",
            f"{snapshots} does not divide checkpoint.interval_steps {checkpoint.interval_steps}",
            "give a divisor: what is persisted is one of the snapshots",
        )
    yield from _storage("checkpoint.uri", checkpoint.uri)
    yield from _loading(checkpoint)
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


def _folder_missing(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    """Problems of fields that need ``uri`` if it is empty."""
    if checkpoint.uri:
        return
    shared = "give a folder that all nodes share"
    needs = (
        (checkpoint.interval == "auto", "checkpoint.interval is auto", shared),
        (
            checkpoint.snapshot_interval_steps > 0,
            "checkpoint.snapshot_interval_steps is set",
            shared,
        ),
        (
            checkpoint.interval_steps > 0,
            "checkpoint.interval_steps is set",
            "give a folder, or use interval 0",
        ),
        (
            bool(checkpoint.load_uri),
            "checkpoint.load_uri is set",
            "give a folder of this job's own",
        ),
        (checkpoint.replicas == 1, "checkpoint.replicas is set", shared),
    )
    for needed, because, remedy in needs:
        if needed:
            yield JobProblem("checkpoint.uri", f"empty although {because}", remedy)


def _loading(checkpoint: CheckpointConfig) -> Iterator[JobProblem]:
    yield from _storage("checkpoint.load_uri", checkpoint.load_uri)
    if not checkpoint.load_uri:
        if checkpoint.load == "weights":
            yield JobProblem(
                "checkpoint.load",
                "is weights, and checkpoint.load_uri names no checkpoint to take them from",
                "give a load_uri, or leave load out",
            )
    elif checkpoint.uri and _folder(checkpoint.load_uri) == _folder(checkpoint.uri):
        yield JobProblem(
            "checkpoint.load_uri",
            "is checkpoint.uri itself",
            "give another job's folder: a job resumes from its own without load_uri",
        )


def _storage(field: str, uri: str) -> Iterator[JobProblem]:
    if len(uri) > MAX_PATH:
        yield JobProblem(field, "too long", f"use at most {MAX_PATH} characters")
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
    # A package on the nodes can add any other scheme, so only they can check it.


def _folder(uri: str) -> str:
    return posixpath.normpath(uri.removeprefix("file://"))
