"""What UpdateJob may change of a job: everything but what its checkpoints depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megascale_job import config as job_config
from megascale_job.config import TRAINER_SECTIONS, JobConfig
from megascale_job.problems import JobError, JobProblem

# By prefix: the shape of the model, the layout of its ranks and the meaning of the data position
# are in every checkpoint. A corpus may lie elsewhere: workers compare what it holds.
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


def changed_fields(old: JobConfig, new: JobConfig) -> list[str]:
    """Paths of the fields in which two configurations differ, as in a job file, sorted.

    Raises:
        JobError: one of them cannot change; lists each with its remedy.
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
        if path.startswith(_FIXED) and not path.startswith(_FREE)
    ]
    if problems:
        raise JobError(problems, new)
    return changed


def _leaves(config: JobConfig) -> Iterator[tuple[str, Any]]:
    for section, value in job_config.to_mapping(config).items():
        path = f"trainer.{section}" if section in TRAINER_SECTIONS else section
        yield from _flat(path, value)


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}", item)
    else:
        yield path, value
