"""The job that runs for a given specification, for `megascale config`: every default filled in."""

from __future__ import annotations

import dataclasses

from megascale.v1 import job_pb2
from megascale_job.wire import spec as job_spec


def effective_job(spec: job_pb2.JobSpec) -> job_pb2.JobSpec:
    """``spec`` with every field set; widths and heads that follow from others as numbers.

    Raises:
        JobError: the job is refused; lists every problem by field.
    """
    config = job_spec.from_proto(spec)
    model = dataclasses.replace(
        config.model, ffn_size=config.model.ffn_width, kv_heads=config.model.key_value_heads
    )
    return job_spec.to_proto(dataclasses.replace(config, model=model))
