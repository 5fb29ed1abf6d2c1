"""Evidence: the part of a heartbeat that can decide anything, in a form that is cheap to compare.

Most heartbeats repeat the one before except for counters, times, steps and status pages, and do not
get here: :mod:`megascale_driver.presence.arrival` compares only the fields of FIELDS. Those four
are read on demand (:func:`megascale_driver.presence.reports.pages`). Everything else is evidence:
texts and numbers are compared directly, repeated messages in serialized form, before anything is
converted to values of the core.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from google.protobuf.message import Message

from megascale.v1 import link_pb2

AT_WORK: Final = frozenset({link_pb2.ATTEMPT_PHASE_RUNNING, link_pb2.ATTEMPT_PHASE_FINISHED})
# A node is idle before its first report of a phase.
_IDLE = frozenset({link_pb2.ATTEMPT_PHASE_UNSPECIFIED, link_pb2.ATTEMPT_PHASE_IDLE})
_PASSING = frozenset({link_pb2.ATTEMPT_PHASE_PREPARING, link_pb2.ATTEMPT_PHASE_STARTING})
_EXITED = link_pb2.WORKER_STATE_EXITED


# All fields of a heartbeat that :func:`of` reads. A message without a path into it is compared as a
# whole.
FIELDS: Final = (
    "epoch_seen",
    "desired_version",
    "job",
    "attempt",
    "phase",
    "failure",
    "finished_step",
    "store_endpoint",
    "workers.rank",
    "workers.state",
    "workers.exit_status",
    "workers.error",
    "workers.error_kind",
    "checks",
    "traces",
    "logs_job",
    "logs_attempt",
    "logs.signature",
    "logs.category",
    "logs.role",
    "logs.action",
    "logs.first_rank",
    "stopped",
    "leave_failure",
    "checkpoint_daemon",
    "checkpoints.job",
    "checkpoints.committed_step",
    "checkpoints.committed_by_attempt",
    "checkpoints.failure",
    "checkpoints.replica_failure",
    "checkpoints.damaged",
    "checkpoints.skipped_step",
    "checkpoints.skipped_by_attempt",
    "checkpoints.sealed",
    "checkpoints.replicas",
)
MEMORY_FIELDS: Final = ("sealed", "replicas")  # of checkpoints: the snapshots in the node's memory


class Evidence(NamedTuple):
    """The arguments of :meth:`megascale_driver.presence.lane.Lane.beat` from one heartbeat."""

    prompt: Hashable
    slow: Hashable
    shared: tuple[Hashable, ...]
    counted: tuple[tuple[str, Hashable], ...]
    passing: bool  # no decision depends on it, only on what follows


UNREAD: Final = object()  # slow evidence that was not read


def of(beat: link_pb2.Heartbeat, slow_due: bool = True) -> Evidence:
    """The evidence of a heartbeat; without ``slow_due`` its slow part can be left UNREAD."""
    prompt: list[Hashable] = [
        beat.job,
        beat.attempt,
        beat.phase,
        beat.failure,
        beat.finished_step,
        beat.store_endpoint,
    ]
    if beat.phase in _IDLE:
        # For an idle node, the last order seen distinguishes stopped from about to prepare. For a
        # working node its phase decides, so the order is left out.
        epoch = beat.epoch_seen
        prompt += (beat.desired_version, epoch.create_revision, epoch.cluster_generation)
    passing = beat.phase in _PASSING
    for worker in beat.workers:
        if worker.state == _EXITED and beat.phase == link_pb2.ATTEMPT_PHASE_RUNNING:
            passing = True  # the attempt ends here, or is being stopped
        # Not the whole message: the age of its status page grows with each heartbeat.
        prompt += (worker.rank, worker.state)
        if worker.state == _EXITED or worker.error_kind:
            prompt += (worker.exit_status, worker.error_kind, worker.error)
    # Tested for presence first: an empty list then costs nothing more.
    if beat.checks:
        prompt.append(_bytes(beat.checks))
    if beat.traces:
        prompt.append(_bytes(beat.traces))
    if beat.logs:
        prompt += (beat.logs_job, beat.logs_attempt)
        # Not the whole messages: counts and times grow while lines are repeated.
        prompt += [(i.signature, i.category, i.role, i.action, i.first_rank) for i in beat.logs]
    if beat.HasField("stopped"):
        prompt.append(beat.stopped.SerializeToString())
    if beat.HasField("leave_failure"):
        prompt.append(beat.leave_failure.SerializeToString())
    if beat.HasField("checkpoint_daemon"):
        prompt.append(beat.checkpoint_daemon.SerializeToString())
    slow: list[Hashable] = []
    shared: list[Hashable] = []
    counted: list[tuple[str, Hashable]] = []
    at_work = beat.phase in AT_WORK
    for item in beat.checkpoints:
        _checkpoints(item, prompt, shared)
        if slow_due or not at_work:
            _slow(item, slow)
        if item.skipped_step:
            counted.append((item.job, (item.skipped_by_attempt, item.skipped_step)))
    if not at_work:
        # Between attempts the snapshots in memory decide where the next one restores from.
        prompt += slow
        slow = []
    read = UNREAD if at_work and not slow_due else tuple(slow)
    return Evidence(tuple(prompt), read, tuple(shared), tuple(counted), passing)


def _checkpoints(
    item: link_pb2.CheckpointProgress, prompt: list[Hashable], shared: list[Hashable]
) -> None:
    job = item.job
    prompt.append(job)
    if item.HasField("failure"):
        prompt.append(item.failure.SerializeToString())
    if item.HasField("replica_failure"):
        prompt.append(item.replica_failure.SerializeToString())
    if item.damaged:
        prompt.append(_bytes(item.damaged))
    if item.committed_step:
        shared.append((job, "committed", item.committed_step, item.committed_by_attempt))


def _slow(item: link_pb2.CheckpointProgress, slow: list[Hashable]) -> None:
    if item.sealed:
        slow.append(_bytes(item.sealed))
    if item.replicas:
        slow.append(_bytes(item.replicas))


def _bytes(messages: Iterable[Message]) -> bytes:
    return b"\0".join([message.SerializeToString() for message in messages])
