"""Spans of a table as the agents of its ranks send them."""

from __future__ import annotations

import zlib

from megascale.v1 import link_pb2
from megascale_common.node.spans.record import SPAN, to_columns
from megascale_driver.analysis.spans.table import SpanTable
from megascale_driver.core.values.job import Job

PER_BATCH = 1024


def batches(job: Job, node: str, table: SpanTable, rank: int) -> list[link_pb2.ReportSpansRequest]:
    """The spans of a rank that runs on ``node`` in the job's attempt."""
    records, found = records_of(table, rank), []
    for begin in range(0, len(records), PER_BATCH):
        part = records[begin : begin + PER_BATCH]
        message = link_pb2.ReportSpansRequest(
            node=node,
            job=job.name,
            attempt=job.attempt,
            rank=rank,
            count=len(part),
            columns=zlib.compress(to_columns(b"".join(part))),
        )
        for op in table.ops:
            message.operations.add(name=op.name, kind=op.kind, group=op.group)
        found.append(message)
    return found


def records_of(table: SpanTable, rank: int) -> list[bytes]:
    """The packed records of a rank, which number operations as the table does."""
    own = table.where(table.rank == rank)
    columns = (
        getattr(own, name)
        for name in ("start_ns", "duration_ns", "step", "op", "micro_batch", "seq", "aux")
    )
    return [SPAN.pack(*map(int, row)) for row in zip(*columns, strict=True)]
