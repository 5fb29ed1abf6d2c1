"""Replaces files as a whole, and names the files of an attempt below a node's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def replace_file(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text`` (UTF-8); a reader sees the old or the new file.

    Nothing is synced: after a crash of the host the file can be the old one, or empty. The draft's
    name contains the process id, so that two processes do not write to the same draft.

    Raises:
        OSError: it cannot be written; the old file stays and no draft is left behind.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


TRACE_PREFIX = "trace-"  # with a dot before it while it is being written


def attempt_folder(job: str, attempt: int) -> PurePosixPath:
    """Folder of an attempt's files."""
    return PurePosixPath("jobs", job, f"attempt-{attempt:06d}")


def trace_file(job: str, attempt: int, first_step: int, last_step: int, rank: int) -> PurePosixPath:
    """A rank's trace of the steps ``first_step`` to ``last_step``."""
    name = f"{TRACE_PREFIX}steps-{first_step}-{last_step}-rank-{rank:05d}.json.gz"
    return attempt_folder(job, attempt) / name


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Files of one attempt of a job on this node."""

    path: Path

    def log(self, rank: int) -> Path:
        """Output of a rank."""
        return self.path / f"rank-{rank:05d}.log"

    def status_page(self, rank: int) -> Path:
        """Status page of a rank."""
        return self.path / f"status-{rank:05d}.page"

    def spans(self, rank: int) -> Path:
        """Ring of a rank's spans."""
        return self.path / f"spans-{rank:05d}.ring"

    def flight_request(self, rank: int) -> Path:
        """Named pipe; a byte written to it requests a rank's record of NCCL's operations."""
        return self.path / f"nccl-{rank:05d}.request"

    def flight_dump(self, rank: int) -> Path:
        """A rank's record of NCCL's operations, written on request."""
        return self.path / f"nccl_trace_rank_{rank:05d}.json"

    @property
    def config(self) -> Path:
        """The job, for the loader."""
        return self.path / "config.json"

    @property
    def loader_log(self) -> Path:
        """Output of the data loader."""
        return self.path / "loader.log"
