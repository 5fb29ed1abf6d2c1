"""Finds files and folders that a job names and that this machine does not have.

The driver checks them at submit, and `megascale plan` before that.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from megascale_job.config import DataSource, JobConfig
from megascale_job.problems import JobProblem

MAX_FILES = 200  # looked up per submission; a source has two


def missing_files(config: JobConfig) -> Iterator[JobProblem]:
    """Files that the job reads and that are not there."""
    yield from _missing_sources("trainer.data.sources", config.data.sources)
    if config.evaluates:
        yield from _missing_sources("trainer.evaluation.sources", config.evaluation.sources)
    yield from _missing_surroundings(config)
    folder = local_path(config.checkpoint.load_uri)
    if folder.startswith("/") and _absent(Path(folder)):  # nodes check other storages themselves
        yield JobProblem(
            "checkpoint.load_uri",
            f"there is no folder {folder}",
            "give the checkpoint.uri of a job that has checkpoints, or leave it out",
        )


def local_path(uri: str) -> str:
    """The normalised path of a ``file://`` address; other addresses stay unchanged."""
    return posixpath.normpath(uri.removeprefix("file://")) if uri else ""


def _missing_surroundings(config: JobConfig) -> Iterator[JobProblem]:
    """Code and interpreter of the job's processes that certainly do not exist."""
    code, environment = config.code, config.environment
    for field, path, remedy in (
        ("code.path", code.path, "give the folder that has the code, or code.uri"),
        (
            "code.uri",
            local_path(code.uri),
            "`megascale code push` writes it and prints its address",
        ),
        ("environment.python", environment.python, "give an interpreter of the nodes"),
    ):
        if path.startswith("/") and _absent(Path(path)):
            yield JobProblem(field, f"there is no {path}", remedy)


def _missing_sources(field: str, sources: tuple[DataSource, ...]) -> Iterator[JobProblem]:
    for number, source in enumerate(sources[: MAX_FILES // 2]):
        for suffix in (".idx", ".bin"):
            path = Path(f"{source.prefix}{suffix}")
            if _absent(path):
                yield JobProblem(
                    f"{field}[{number}].prefix",
                    f"there is no file {path}",
                    "make it with `megascale data tokenize`, or correct the prefix",
                )
                break


def _absent(path: Path) -> bool:
    """Whether there is certainly no such file; other errors do not prove that."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
