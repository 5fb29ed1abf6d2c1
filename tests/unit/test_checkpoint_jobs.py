"""The progress that the daemon reports stays small, however many jobs the node has run."""

from __future__ import annotations

from pathlib import Path

from megascale_checkpoint.concurrency import Pools
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.serve.jobs import KEPT_JOBS, Jobs


def test_of_jobs_without_slots_only_the_newest_are_reported(tmp_path: Path) -> None:
    staging = StagingFolder(tmp_path / "staging", "test", "n0", "i0")
    pools = Pools()
    try:
        jobs = Jobs(staging, pools, CommitterClient("token"))
        jobs.job("first").note_commit(10, 1, "m")
        for number in range(500):
            jobs.job(f"j{number}").note_commit(number + 1, 1, "m")
            jobs.job("first")  # in use all the time
        reported = {progress.job: progress.committed_step for progress in jobs.progress()}
        assert (
            len(reported) == KEPT_JOBS
            and reported["first"] == 10
            and reported["j499"] == 500
            and "j0" not in reported
        )
    finally:
        pools.close()
        staging.remove()
