"""Where an attempt's files are below a node's folder: one rule for agent and driver. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath

TRACE_PREFIX = "trace-"  # with a dot before it while it is being written


def attempt_folder(job: str, attempt: int) -> PurePosixPath:
    """Folder of an attempt's files."""
    return PurePosixPath("jobs", job, f"attempt-{attempt:06d}")


def trace_file(job: str, attempt: int, first_step: int, last_step: int, rank: int) -> PurePosixPath:
    """A rank's trace of the steps ``first_step`` to ``last_step``."""
    name = f"{TRACE_PREFIX}steps-{first_step}-{last_step}-rank-{rank:05d}.json.gz"
    return attempt_folder(job, attempt) / name
