"""Conversions between the wire and the core: messages of ``megascale.v1`` and the core's values.

Every text and list from a node is cut to a bound here, before it enters the state and etcd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from megascale.v1 import driver_pb2, link_pb2, types_pb2
from megascale_common.service.wire_text import enum_name
from megascale_driver.analysis.divergence import StepSample
from megascale_driver.core import draft
from megascale_driver.core.checkpoints import replicas
from megascale_driver.core.queue import quotas
from megascale_driver.core.queue.explain import Explanation
from megascale_driver.core.recovery import log_roots
from megascale_driver.core.values import events, goodput
from megascale_driver.core.values.attempt import Placement
from megascale_driver.core.values.cluster import Cluster, Device, Identity, Liveness, Node
from megascale_driver.core.values.goodput import PARTS, Ledger
from megascale_driver.core.values.job import Job, Profile
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.rules import RULES, mode_of
from megascale_job.wire import restore
from megascale_job.wire import spec as job_spec

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper as EnumTypeWrapper

MAX_DEVICES = 1024
MAX_TEXT = 4096
MAX_LABEL = 256  # characters of an address, an id, a key or a value of the topology
MAX_LABELS = 64
MAX_TRACES = 64  # in one profile

_Number = TypeVar("_Number", bound=int)


def _by_name(enum: EnumTypeWrapper[_Number], prefix: str) -> dict[str, _Number]:
    """The numbers of an enum by the names that the core uses."""
    return {name.removeprefix(prefix): number for name, number in enum.items()}


_JOB_PHASES: Final = _by_name(types_pb2.JobPhase, "JOB_PHASE_")
_CONDITIONS: Final = _by_name(types_pb2.JobConditionType, "JOB_CONDITION_TYPE_")
_TRACE_STATES: Final = _by_name(types_pb2.TraceState, "TRACE_STATE_")
_DISPOSITIONS: Final = _by_name(types_pb2.NodeDisposition, "NODE_DISPOSITION_")
_LIVENESS: Final = _by_name(types_pb2.NodeLiveness, "NODE_LIVENESS_")
_ASSIGNMENTS: Final = _by_name(types_pb2.NodeAssignment, "NODE_ASSIGNMENT_")
_DEVICE_KINDS: Final = _by_name(types_pb2.DeviceKind, "DEVICE_KIND_")
_VERDICTS: Final = _by_name(types_pb2.CheckVerdict, "CHECK_VERDICT_")
_MODES: Final = _by_name(types_pb2.PolicyMode, "POLICY_MODE_")


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds as a protobuf timestamp."""
    value = Timestamp()
    value.FromNanoseconds(int(seconds * 1e9))
    return value


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf duration."""
    value = Duration()
    value.FromNanoseconds(int(seconds * 1e9))
    return value


def _microseconds(count: int) -> Duration:
    value = Duration()
    value.FromMicroseconds(count)
    return value


def identity(hello: link_pb2.ExecutorHello) -> Identity:
    """The identity in a node's hello; texts and lists are cut to a bound."""
    return Identity(
        incarnation=hello.incarnation[:MAX_LABEL],
        boot_id=hello.boot_id[:MAX_LABEL],
        hostname=hello.hostname[:MAX_LABEL],
        build=hello.build[:MAX_LABEL],
        devices=tuple(
            Device(
                d.index,
                enum_name(types_pb2.DeviceKind, d.kind, "DEVICE_KIND_").lower(),
                d.uuid[:MAX_LABEL],
                d.model[:MAX_LABEL],
                d.memory_bytes,
            )
            for d in hello.devices[:MAX_DEVICES]
        ),
        topology={
            key[:MAX_LABEL]: hello.topology[key][:MAX_LABEL]
            for key in sorted(hello.topology)[:MAX_LABELS]
        },
        executor_endpoint=hello.executor_endpoint[:MAX_LABEL],
        checkpoint_endpoint=hello.checkpoint_endpoint[:MAX_LABEL],
        folder=hello.folder[:MAX_TEXT],
        file_view=hello.file_view[:MAX_LABEL],
    )


def profile_message(profile: Profile) -> driver_pb2.Profile:
    """A profile for clients."""
    return driver_pb2.Profile(
        id=profile.id,
        attempt=profile.attempt,
        first_step=profile.first_step,
        last_step=profile.last_step,
        not_after=timestamp(profile.not_after_s),
        traces=[
            driver_pb2.Trace(
                rank=trace.rank,
                node=trace.node,
                path=trace.path,
                state=_TRACE_STATES[trace.state],
                size_bytes=trace.size_bytes,
                detail=trace.detail,
            )
            for trace in profile.traces
        ],
    )


def record_values(record: types_pb2.StepRecord) -> dict[str, float]:
    """A step record in the form of the core: the numbers that are set, times in seconds."""
    return {
        field.name: value.ToNanoseconds() / 1e9 if field.message_type else value
        for field, value in record.ListFields()
        if _is_number(field)
    }


def _is_number(field: FieldDescriptor) -> bool:
    """True for a field of a step record that the core keeps: numbers and times, no texts."""
    if field.message_type is not None:
        return field.message_type.name in ("Duration", "Timestamp")
    return field.type != field.TYPE_STRING


def record_message(values: Mapping[str, float]) -> types_pb2.StepRecord:
    """The inverse of :func:`record_values`; unknown numbers are left out."""
    record = types_pb2.StepRecord()
    for field in types_pb2.StepRecord.DESCRIPTOR.fields:
        value = values.get(field.name)
        if value is None or not _is_number(field):
            continue
        if field.message_type:
            getattr(record, field.name).FromNanoseconds(round(value * 1e9))
        else:
            setattr(record, field.name, value if field.type == field.TYPE_DOUBLE else int(value))
    return record


def goodput_message(ledger: Ledger) -> driver_pb2.Goodput:
    """A ledger of times for clients."""
    return driver_pb2.Goodput(
        ratio=ledger.ratio,
        ratio_since_start=ledger.ratio_since_start,
        wall_time=_microseconds(ledger.wall_us),
        lost_steps=ledger.lost_steps,
        faults=ledger.faults,
        **{part.removesuffix("_us"): _microseconds(getattr(ledger, part)) for part in PARTS},
    )


def job_message(
    job: Job,
    record: types_pb2.StepRecord | None,
    now_s: float = 0.0,
    nodes: Mapping[str, Node] | None = None,
    evaluation: types_pb2.StepRecord | None = None,
    typical_step_s: float | None = None,
) -> driver_pb2.Job:
    """A job for clients at ``now_s``; ``record``: its newest step record.

    ``evaluation``: the newest one with a loss on held-out data. ``nodes``: those of the cluster;
    without them the message has no information about replicas.
    """
    step = job.current.step
    if record is not None and record.attempt == job.attempt:
        step = max(step, record.step)
    # The restored step, or the one that will be: no step of the attempt is known before.
    floor = job.current.restore.step if job.current.restore is not None else job.committed_step
    if job.committed_by_attempt == job.attempt:
        floor = max(floor, job.committed_step)
    message = driver_pb2.Job(
        spec=job_spec.to_proto(job.config),
        spec_revision=job.spec_revision,
        etag=f"{job.spec_revision}-{job.log_seq}-{job.phase}",
        phase=_JOB_PHASES[job.phase],
        phase_reason=job.reason,
        attempt=job.attempt,
        nodes=[slot.node for slot in job.slots],
        spare_nodes=job.spares,
        evicted_nodes=job.evicted,
        step=max(step, floor),
        committed_step=job.committed_step,
        restarts=job.restarts,
        created_at=timestamp(job.created_at_s),
        updated_at=timestamp(job.updated_at_s),
        conditions=[
            driver_pb2.JobCondition(
                type=_CONDITIONS[item.type],
                reason=item.reason,
                message=item.message,
                since=timestamp(item.since_s),
            )
            for item in job.conditions
        ],
    )
    if job.committed_at_s:
        message.committed_at.CopyFrom(timestamp(job.committed_at_s))
    if job.current.restore is not None:
        message.restored_step = job.current.restore.step
        message.restore_source = restore.source_to_proto(job.current.restore.source)
    if record is not None:
        message.last_record.CopyFrom(record)
    if evaluation is not None:
        message.last_evaluation.CopyFrom(evaluation)
    if typical_step_s is not None:
        message.typical_step_time.FromNanoseconds(round(typical_step_s * 1e9))
    if job.profile is not None:
        message.profile.CopyFrom(profile_message(job.profile))
    if nodes is not None and job.config.checkpoint.replicas:
        # Computed only for clients: it goes through what all nodes keep.
        message.replicated_step = replicas.replicated_step(job, nodes)
        message.replica_problem = replicas.problem(job, nodes)
    if (placed := placement_message(job.current.placement)) is not None:
        message.placement.CopyFrom(placed)
    if job.goodput.since_us:
        message.goodput.CopyFrom(goodput_message(goodput.at(job.goodput, now_s)))
    return message


_NOT_LINKED = "it has not linked to this driver yet"


def node_message(state: Cluster, node: Node, last_beat_s: float = 0.0) -> driver_pb2.Node:
    """A node for clients; ``last_beat_s``: when its newest heartbeat arrived."""
    job = state.holder_of(node.name)
    slot = job.slot_of(node.name) if job is not None else None
    spare = any(node.name in other.spares for other in state.jobs.values())
    unread = draft.unreadable_job_on(state.unreadable, node) if job is None else ""
    assignment = "ACTIVE" if job is not None or unread else "SPARE" if spare else "IDLE"
    who = node.identity
    return driver_pb2.Node(
        name=node.name,
        disposition=_DISPOSITIONS[node.disposition],
        liveness=_LIVENESS[node.liveness],
        assignment=_ASSIGNMENTS[assignment],
        disposition_reason=node.disposition_reason,
        liveness_reason=""
        if node.liveness is Liveness.ALIVE
        else node.liveness_reason or _NOT_LINKED,
        devices=[
            types_pb2.Device(
                index=d.index,
                kind=_DEVICE_KINDS[d.kind.upper()],
                uuid=d.uuid,
                model=d.model,
                memory_bytes=d.memory_bytes,
            )
            for d in who.devices
        ],
        topology=who.topology,
        incarnation=who.incarnation,
        executor_endpoint=who.executor_endpoint,
        checkpoint_endpoint=who.checkpoint_endpoint,
        job=job.name if job is not None else unread,
        ranks=slot.ranks if slot is not None else (),
        last_heartbeat_at=timestamp(max(node.last_seen_s, last_beat_s)),
        checks=[
            types_pb2.CheckResult(
                name=c.name,
                target=c.target,
                verdict=_VERDICTS[c.verdict],
                detail=c.detail,
                elapsed=duration(c.elapsed_s),
            )
            for c in node.checks
        ],
    )


def rule_messages(modes: Mapping[str, str]) -> list[driver_pb2.PolicyRule]:
    """All rules with their modes, for clients."""
    return [
        driver_pb2.PolicyRule(name=name, mode=_MODES[mode_of(modes, name)], effect=rule.effect)
        for name, rule in RULES.items()
    ]


def tenant_message(state: Cluster, policy: Policy, name: str) -> driver_pb2.Tenant:
    """A tenant for clients: its quota, and what it holds."""
    return driver_pb2.Tenant(
        name=name,
        quota=quotas.in_force(state.tenants, policy).get(name),
        devices_held=quotas.devices_held(state.jobs.values()).get(name, 0),
        set=name in state.tenants,
    )


def tenant_messages(state: Cluster, policy: Policy) -> list[driver_pb2.Tenant]:
    """All tenants that have a quota or hold devices, by name."""
    limited = quotas.in_force(state.tenants, policy)
    holding = quotas.devices_held(state.jobs.values())
    return [tenant_message(state, policy, name) for name in sorted({*limited, *holding})]


def event_message(line: events.Audit, epoch: types_pb2.Epoch) -> types_pb2.Event:
    """A line of the audit log for clients."""
    return types_pb2.Event(
        seq=line.seq,
        time=timestamp(line.at_s),
        actor=line.actor,
        subject=line.subject,
        reason=line.reason,
        message=line.message,
        policy=line.policy,
        mode=line.mode,
        epoch=epoch,
        attempt=line.attempt,
        evidence=[
            types_pb2.Evidence(kind=e.kind, source=e.source, digest=e.digest, uri=e.uri)
            for e in line.evidence
        ],
        outcome=line.outcome,
    )


def explanation_message(
    found: Explanation, epoch: types_pb2.Epoch
) -> driver_pb2.ExplainJobResponse:
    """An explanation for clients."""
    message = driver_pb2.ExplainJobResponse(
        explanation=found.sentence,
        events=[event_message(line, epoch) for line in found.events],
        actions=[event_message(line, epoch) for line in found.actions],
        suggestions=[
            driver_pb2.Suggestion(text=item.text, command=item.command)
            for item in found.suggestions
        ],
        text=found.text,
    )
    if (placed := placement_message(found.placement)) is not None:
        message.placement.CopyFrom(placed)
    if (stall := found.stall) is not None and stall.shown:
        message.still_s = stall.still_s
        message.held_up_by = stall.held_up_by
    if (setback := found.setback) is not None:
        message.setback.CopyFrom(
            driver_pb2.Setback(
                failures=setback.failures,
                step=setback.step,
                reason=setback.why,
                sentence=str(setback),
            )
        )
    if found.cause is not None:
        message.cause.CopyFrom(event_message(found.cause, epoch))
    if found.log_root is not None and (root := log_roots.shown(found.log_root)) is not None:
        message.log_root.CopyFrom(
            driver_pb2.LogRoot(
                attempt=root.attempt,
                node=root.node,
                rank=root.rank,
                category=root.category,
                action=root.action,
                line=root.line,
                nodes=root.nodes,
                set_aside=root.set_aside,
            )
        )
    return message


def placement_message(placement: Placement) -> driver_pb2.Placement | None:
    """Why an attempt runs on its nodes, and the score; None if that is not known."""
    if not placement.why:
        return None
    score = placement.score
    return driver_pb2.Placement(
        reason=placement.why,
        order=placement.order,
        score=driver_pb2.PlacementScore(
            cost_byte_tiers=score.cost,
            between_nodes_bytes=score.between_bytes,
            cross_switch_share=score.cross_share,
            cross_switch_edges=score.crossing_edges,
        )
        if score is not None
        else None,
    )


def step_sample(record: types_pb2.StepRecord) -> StepSample:
    """The part of a step record that can show divergence."""
    return StepSample(
        record.attempt,
        record.step,
        record.loss,
        record.gradient_norm,
        record.skipped_updates,
        empty=record.skipped_because == "no_targets",
    )
