"""A worker's part of the heartbeat: its process, and the progress that its status page shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from megascale.v1 import link_pb2
from megascale_common.node.flight_record import RankRecord
from megascale_common.node.status_page import read_status_page
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.workers.workers import Worker

# Operation counts are evidence only if a rank hangs. A rank has at most seven groups.
STILL_AFTER_NS = 1_000_000_000
MAX_OPERATIONS = 8
MAX_GROUPS = 16  # of a rank's record: transfers and collectives of each communicator
MAX_ERROR_CHARS = 2000
MAX_KIND_CHARS = 100


def worker_status(worker: Worker, now_ns: int | None = None) -> link_pb2.WorkerStatus:
    """State of one worker; ``now_ns`` is CLOCK_MONOTONIC, by default the present."""
    message = link_pb2.WorkerStatus(
        rank=worker.rank,
        state=worker.state,
        pid=worker.process.pid if worker.process is not None else 0,
        error=encodable(worker.error[-MAX_ERROR_CHARS:]),
        error_kind=encodable(worker.error_kind[:MAX_KIND_CHARS]),
    )
    if worker.exit_status is not None:
        message.exit_status = worker.exit_status
        message.exited_at.FromNanoseconds(round(worker.exited_at_s * 1e9))
    if worker.passed_over:
        message.restored_step = worker.restored_step
        message.restore_problem = encodable(worker.passed_over[:MAX_ERROR_CHARS])
    message.restore_notes = encodable(worker.notes[:MAX_ERROR_CHARS])
    if (status := read_status_page(worker.page)) is not None:
        message.step = status.step
        message.phase = status.phase.name
        age_ns = (time.monotonic_ns() if now_ns is None else now_ns) - status.updated_ns
        message.status_age.CopyFrom(_duration(max(0, age_ns)))
        if age_ns >= STILL_AFTER_NS:
            for row in status.rows[:MAX_OPERATIONS]:
                message.operations.add(group=row.name, entered=row.entered, completed=row.completed)
    return message


def stopped_attempt(
    key: AttemptKey, failure: str, workers: Sequence[Worker]
) -> link_pb2.StoppedAttempt | None:
    """The failed workers of a stopped attempt and the stacks of those that hung; None without both.

    A peer of the culprit can be the first to report, and the stop that follows must not lose the
    culprit's own report.
    """
    failed = [worker for worker in workers if worker.failed_by_itself]
    still = [worker for worker in workers if worker.stack]
    if not failed and not failure and not still:
        return None
    return link_pb2.StoppedAttempt(
        job=key.job,
        attempt=key.attempt,
        failure=encodable(failure[:MAX_ERROR_CHARS]),
        workers=[worker_status(worker) for worker in failed],
        stacks=[
            link_pb2.RankStack(rank=worker.rank, frames=encodable(worker.stack)) for worker in still
        ],
        records=[_record(worker.record) for worker in still if worker.record is not None],
    )


def _record(record: RankRecord) -> link_pb2.RankRecord:
    message = link_pb2.RankRecord(rank=record.rank)
    for each in record.groups[:MAX_GROUPS]:
        if isinstance(each.ranks, range):
            message.groups.add(
                group=encodable(each.group[:MAX_KIND_CHARS]),
                first=each.ranks.start,
                stride=each.ranks.step,
                size=len(each.ranks),
                p2p=each.p2p,
                entered=each.entered,
                waits_in=each.waits_in,
                operation=encodable(each.operation[:MAX_KIND_CHARS]),
            )
    return message


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration
