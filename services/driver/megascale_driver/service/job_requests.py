"""Checks of requests for profiles and updates, before the core decides about them.

:mod:`megascale_driver.core.nodes.profiles` decides whether a job can be profiled now, and which
steps are traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.service.errors import StateError, invalid
from megascale_driver.core.values.events import ProfileRequested, RequestKey
from megascale_driver.core.values.job import Job
from megascale_driver.wire import messages as wire
from megascale_job import loading
from megascale_job.config import TRAINER_SECTIONS, JobConfig
from megascale_job.problems import JobError, JobProblem
from megascale_job.visible import counted

MAX_STEPS = 20  # a trace of more steps is too large for a viewer
MAX_RANKS = wire.MAX_TRACES
# Reasons for which the core refuses a profile; each refusal has a sentence with the numbers.
REFUSALS = (
    "JOB_NOT_RUNNING",
    "PROFILE_PENDING",
    "NO_STEP_YET",
    "FIRST_STEP_PASSED",
    "STEPS_BEYOND_END",
    "STEPS_TOO_FAR",
)


def profile(
    request: driver_pb2.ProfileJobRequest,
    job: Job,
    record: types_pb2.StepRecord | None,
    now_s: float,
    reason: str,
    actor: str,
    key: RequestKey | None,
) -> ProfileRequested:
    """The event of a profile request; ``record`` is the job's newest step record.

    Raises:
        RequestError: the steps or ranks are out of range.
    """
    if not 1 <= request.steps <= MAX_STEPS:
        problem = f"{request.steps} is out of range"
        raise invalid("steps", problem, f"profile 1 to {MAX_STEPS} steps")
    if request.first_step < 0:
        raise invalid(
            "first_step", f"{request.first_step} is negative", "leave it out or name a later step"
        )
    ranks, world_size = tuple(sorted(set(request.ranks))) or (0,), job.config.layout.world_size
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if wrong:
        problem = f"{wrong[0]} is not one of the job's {counted(world_size, 'rank')}"
        raise invalid("ranks", problem, f"choose ranks of 0 to {world_size - 1}")
    if len(ranks) > MAX_RANKS:
        raise invalid("ranks", counted(len(ranks), "rank"), f"choose at most {MAX_RANKS}")
    current = (
        record if record is not None and record.attempt == job.attempt else types_pb2.StepRecord()
    )
    return ProfileRequested(
        now_s,
        job.name,
        request.first_step,
        request.steps,
        ranks,
        current.step,
        current.step_time.ToNanoseconds() / 1e9,
        reason.strip(),
        actor,
        key,
    )


def profiled(job: Job, request_id: str) -> driver_pb2.Profile:
    """The profile that the request started.

    Raises:
        StateError: the request was a repetition, and a newer profile has replaced its profile.
    """
    profile = job.profile
    if profile is None or (request_id and profile.id != request_id):
        raise StateError(
            f"a newer profile of job {job.name} was requested since; "
            "the audit log has the outcome of this one",
            reason="PROFILE_SUPERSEDED",
        )
    return wire.profile_message(profile)


# Fields that UpdateJob cannot change, by prefix, and exceptions. Every checkpoint depends on the
# shape of the model, the layout of its ranks and the meaning of the data position. A corpus can
# move to another path, because workers compare its content. A router that has a bias can move it by
# another rate.
_FIXED = (
    "name",
    "tenant",
    "checkpoint.uri",
    "trainer.model.",
    "trainer.parallelism.",
    "trainer.training.global_batch_size",
    "trainer.data.seed",
    "trainer.data.shuffle",
    "trainer.data.blend",
)
_FREE = (
    "trainer.parallelism.overlap",
    "trainer.parallelism.pipeline_schedule",
    "trainer.parallelism.recompute",
)
_BIAS_RATE = "trainer.model.experts.bias_rate"


def changed_fields(old: JobConfig, new: JobConfig) -> list[str]:
    """Sorted paths of the fields that differ, as in a job file.

    Raises:
        JobError: some of them cannot change; it lists each with its remedy.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    problems = [
        JobProblem(
            path,
            f"{after.get(path)!r} instead of {before.get(path)!r}: it cannot change",
            "submit a job of another name with its own checkpoint.uri, and start it from this one "
            "with checkpoint.load_uri",
        )
        for path in changed
        if path.startswith(_FIXED)
        and not path.startswith(_FREE)
        and not (path == _BIAS_RATE and before.get(path) and after.get(path))
    ]
    if problems:
        raise JobError(problems, new)
    return changed


def _leaves(config: JobConfig) -> Iterator[tuple[str, Any]]:
    for section, value in loading.to_mapping(config).items():
        path = f"trainer.{section}" if section in TRAINER_SECTIONS else section
        yield from _flat(path, value)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}", item)
    else:
        yield path, value
