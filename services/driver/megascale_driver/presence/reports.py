"""From a heartbeat to the core's values: the report of a node, and the status pages of its ranks.

Every text and list from a node is cut to a bound here, and loses control characters of terminals,
before it enters the state and etcd.
"""

from __future__ import annotations

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node.flight_record import GroupRecord, RankRecord
from megascale_common.node.logs.categories import Kind
from megascale_common.node.logs.matcher import Finding
from megascale_common.service.wire_text import enum_name
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.analysis.progress import OperationCount, RankStatus
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Check,
    CheckpointFailure,
    Progress,
    Report,
    SealedSnapshot,
    StoppedReport,
    TraceReport,
    WorkerReport,
)
from megascale_driver.core.values.job import TraceState
from megascale_job.visible import visible

MAX_NAME = 64
MAX_OPERATIONS = 64
MAX_TEXT = 4096
MAX_LABEL = 256  # characters of an address or an id
MAX_TRACES = 64
MAX_LOGS = 64
MAX_STACKS, MAX_STACK = 64, 600  # ranks of a node; characters of each
MAX_SAMPLE = 512
MAX_MEMBERS = 1 << 20  # ranks of a communicator

# By number on the wire. Looked up for each report, and a fleet that starts sends thousands.
_PHASES = {
    number: AttemptPhase(name.removeprefix("ATTEMPT_PHASE_") if number else "IDLE")
    for name, number in link_pb2.AttemptPhase.items()
}
_VERDICTS: dict[int, str] = {
    number: enum_name(types_pb2.CheckVerdict, number, "CHECK_VERDICT_")
    for number in types_pb2.CheckVerdict.values()
}


def phase_of(number: link_pb2.AttemptPhase.ValueType) -> AttemptPhase | None:
    """The phase with this number on the wire; None if this build does not know it."""
    return _PHASES.get(number)


def report(beat: link_pb2.Heartbeat, epoch: types_pb2.Epoch, clock_offset_s: float = 0.0) -> Report:
    """A heartbeat; the version of a desired state of another epoch counts as 0.

    Args:
        beat: the heartbeat.
        epoch: that of the present term.
        clock_offset_s: the driver's clock minus the node's; times of the node are corrected by it.

    Raises:
        ValueError: a phase, verdict or state that this build does not know.
    """
    seen = beat.epoch_seen
    # Versions are numbered anew in every term, so one of another epoch proves nothing.
    current = (seen.cluster_generation, seen.create_revision) == (
        epoch.cluster_generation,
        epoch.create_revision,
    )
    phase = _PHASES.get(beat.phase)
    if phase is None:
        raise ValueError(f"phase {beat.phase} of an attempt is of another build")
    daemon = beat.checkpoint_daemon
    return Report(
        desired_version=beat.desired_version if current else 0,
        job=beat.job,
        attempt=beat.attempt,
        phase=phase,
        failure=_text(beat.failure),
        finished_step=max(0, beat.finished_step),
        workers=tuple([_worker(item, clock_offset_s) for item in beat.workers]),
        checks=tuple([check(item) for item in beat.checks]),
        store_endpoint=beat.store_endpoint,
        progress=tuple([_progress(item) for item in beat.checkpoints]),
        traces=tuple([_trace(item) for item in beat.traces[:MAX_TRACES]]) if beat.traces else (),
        daemon_restarts=daemon.restarts,
        daemon_exit_status=daemon.exit_status,
        replica_endpoint=daemon.replica_endpoint[:MAX_LABEL],
        stopped=_stopped(beat.stopped, clock_offset_s) if beat.HasField("stopped") else None,
        logs_of=(beat.logs_job[:MAX_LABEL], beat.logs_attempt),
        logs=_logs(beat, clock_offset_s) if beat.logs else (),
        leave_failed=(beat.leave_failure.id[:MAX_LABEL], _text(beat.leave_failure.error)),
    )


def pages(beat: link_pb2.Heartbeat) -> tuple[RankStatus, ...]:
    """The status pages of the ranks that have one."""
    return tuple(_status(item) for item in beat.workers if item.phase)


def check(item: types_pb2.CheckResult) -> Check:
    """The result of a check, with its text cut to a bound."""
    verdict = _VERDICTS.get(item.verdict) or _VERDICTS[0]
    elapsed_s = item.elapsed.ToNanoseconds() / 1e9 if item.HasField("elapsed") else 0.0
    return Check(item.name, verdict, item.target, _text(item.detail), elapsed_s)


def _text(text: str) -> str:
    return visible(text[:MAX_TEXT])


def _logs(beat: link_pb2.Heartbeat, clock_offset_s: float) -> tuple[Observation, ...]:
    return tuple(
        _log(item, at, clock_offset_s) for at, item in enumerate(beat.logs[:MAX_LOGS], start=1)
    )


def _log(item: link_pb2.LogFingerprint, ordinal: int, clock_offset_s: float) -> Observation:
    name = item.signature[:MAX_LABEL]
    kind = Kind.reported(
        name, item.category, item.role, item.action, kernel=item.kernel, weak=item.weak
    )
    count = max(1, item.count)
    finding = Finding(kind, name, visible(item.sample_line[:MAX_SAMPLE]), ordinal, count)
    at_s = item.first_at.ToNanoseconds() / 1e9 + clock_offset_s
    return Observation("", finding, at_s, item.first_rank)


def _worker(status: link_pb2.WorkerStatus, clock_offset_s: float) -> WorkerReport:
    exited_at_s = status.exited_at.ToNanoseconds() / 1e9 if status.HasField("exited_at") else 0.0
    return WorkerReport(
        rank=status.rank,
        exited=status.state == link_pb2.WORKER_STATE_EXITED,
        exit_status=status.exit_status,
        error=visible(status.error[-MAX_TEXT:]),
        error_kind=visible(status.error_kind[:MAX_LABEL]),
        exited_at_s=exited_at_s + clock_offset_s if exited_at_s else 0.0,
        restored_step=status.restored_step if status.HasField("restored_step") else -1,
        restore_problem=_text(status.restore_problem),
        restore_notes=_text(status.restore_notes),
    )


def _stopped(item: link_pb2.StoppedAttempt, clock_offset_s: float) -> StoppedReport:
    workers = tuple(_worker(each, clock_offset_s) for each in item.workers)
    stacks = tuple(
        (each.rank, visible(each.frames[:MAX_STACK])) for each in item.stacks[:MAX_STACKS]
    )
    records = tuple(_record(each) for each in item.records[:MAX_STACKS])
    return StoppedReport(item.job, item.attempt, _text(item.failure), workers, stacks, records)


def _record(item: link_pb2.RankRecord) -> RankRecord:
    groups = tuple(
        GroupRecord(
            each.group[:MAX_NAME],
            range(each.first, each.first + each.stride * each.size, max(1, each.stride)),
            each.p2p,
            each.entered,
            each.waits_in,
            each.operation[:MAX_NAME],
        )
        for each in item.groups[:MAX_OPERATIONS]
        if each.size <= MAX_MEMBERS
    )
    return RankRecord(item.rank, groups)


def _status(status: link_pb2.WorkerStatus) -> RankStatus:
    return RankStatus(
        rank=status.rank,
        step=status.step,
        phase=status.phase[:MAX_NAME],
        age_s=max(0.0, status.status_age.ToNanoseconds() / 1e9),
        operations=tuple(
            OperationCount(item.group[:MAX_NAME], item.entered, item.completed)
            for item in status.operations[:MAX_OPERATIONS]
        ),
    )


def _trace(item: link_pb2.TraceReport) -> TraceReport:
    # raises ValueError for a state that this build does not know
    known = types_pb2.TraceState.Name(item.state) if item.state else "FAILED"
    name = known.removeprefix("TRACE_STATE_")
    return TraceReport(
        item.profile, item.rank, TraceState(name), item.size_bytes, _text(item.detail)
    )


def _progress(item: link_pb2.CheckpointProgress) -> Progress:
    return Progress(
        job=item.job,
        sealed=tuple(
            [SealedSnapshot(s.rank, s.attempt, s.step, s.layout_digest) for s in item.sealed]
        ),
        committed_step=item.committed_step,
        committed_by_attempt=item.committed_by_attempt,
        manifest_uri=item.manifest_uri,
        failure=_failure(item.failure) if item.HasField("failure") else None,
        skipped_snapshots=item.skipped_snapshots,
        skipped_step=item.skipped_step,
        skipped_by_attempt=item.skipped_by_attempt,
        replicas=tuple(
            [SealedSnapshot(s.rank, s.attempt, s.step, s.layout_digest) for s in item.replicas]
        ),
        replica_failure=_failure(item.replica_failure)
        if item.HasField("replica_failure")
        else None,
        damaged=tuple(
            CheckpointFailure(found.attempt, found.step, found.rank, _text(found.error))
            for found in item.damaged
        ),
    )


def _failure(item: link_pb2.CheckpointFailure) -> CheckpointFailure:
    return CheckpointFailure(item.attempt, item.step, item.rank, _text(item.error))
