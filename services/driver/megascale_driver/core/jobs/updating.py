"""A configuration that waits for the job's next attempt: a running attempt never changes."""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.state import Job
from megascale_job import config as job_config


def apply(draft: Draft, job: Job) -> Job:
    """No attempt runs: the configuration that waits, if one does, becomes the job's."""
    if not job.pending_spec:
        return job
    config = job_config.from_json(job.pending_spec)
    return draft.job(job.name, config=config, spec_revision=job.spec_revision + 1, pending_spec="")
