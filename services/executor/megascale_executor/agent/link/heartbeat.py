"""Builds the node's hello and its heartbeat; the link adds number and clock to a heartbeat."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node import host
from megascale_common.node.process import boot_id, file_view
from megascale_common.service.start import build_version
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.attempt import IDLE
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.config import AgentConfig
from megascale_executor.agent.link.driver_link import PROTOCOL
from megascale_executor.agent.run.attempt_runner import AttemptRunner
from megascale_executor.agent.workers.worker_status import MAX_ERROR_CHARS, worker_status
from megascale_executor.counters.sampler import IN_HEARTBEATS, MAX_IN_HEARTBEAT, Sample
from megascale_executor.diagnostics.devices import DeviceFacts

NO_COUNTERS = Sample()
MAX_REASON_CHARS = 200
_KINDS = {"cpu": types_pb2.DEVICE_KIND_CPU, "cuda": types_pb2.DEVICE_KIND_CUDA}


def build_hello(
    config: AgentConfig,
    incarnation: str,
    devices: Sequence[DeviceFacts],
    executor_endpoint: str,
    checkpoint_endpoint: str,
    measured: Sequence[link_pb2.MeasuredFigure] = (),
) -> link_pb2.ExecutorHello:
    """Identity, devices and endpoints of the node."""
    lowest, highest = PROTOCOL
    return link_pb2.ExecutorHello(
        protocol=link_pb2.ProtocolRange(lowest=lowest, highest=highest),
        build=build_version(),
        node=config.node,
        incarnation=incarnation,
        boot_id=boot_id(),
        devices=[
            types_pb2.Device(
                index=device.index,
                kind=_KINDS[device.kind],
                uuid=device.uuid,
                model=device.model,
                memory_bytes=device.memory_bytes,
            )
            for device in devices
        ],
        topology=dict(config.topology),
        executor_endpoint=executor_endpoint,
        checkpoint_endpoint=checkpoint_endpoint,
        hostname=socket.gethostname(),
        folder=encodable(str(config.node_folder)),
        file_view=file_view(),
        measured=measured,
    )


def build_heartbeat(
    runner: AttemptRunner, daemon: CheckpointDaemon, counters: Sample = NO_COUNTERS
) -> link_pb2.Heartbeat:
    """The present state of the node."""
    state = runner.state
    beat = link_pb2.Heartbeat(
        epoch_seen=state.epoch_seen.to_proto(),
        desired_version=state.desired.version,
        job=state.key.job,
        attempt=state.key.attempt,
        phase=state.phase,
        failure=encodable(state.failure[:MAX_ERROR_CHARS]),
        finished_step=state.finished_step,
        workers=[worker_status(worker) for worker in runner.workers],
        checks=state.checks,
        store_endpoint=state.store_endpoint,
        checkpoints=daemon.progress,
        checkpoint_daemon=daemon.state,
        logs=runner.scanner.collect(),
        logs_job=runner.scanner.key.job,
        logs_attempt=runner.scanner.key.attempt,
        logs_skipped_bytes=runner.scanner.skipped_bytes,
        host=host_counters(counters=counters),
        traces=runner.profiles.reports,
    )
    if runner.stopped is not None and state.phase == IDLE:
        beat.stopped.CopyFrom(runner.stopped)
    order, problem = runner.leave.failed
    if order:
        beat.leave_failure.id = order
        beat.leave_failure.error = encodable(problem[:MAX_ERROR_CHARS])
    beat.sent_at.GetCurrentTime()
    return beat


def host_counters(
    proc: Path = host.PROC, staging: Path = host.STAGING_MOUNT, counters: Sample = NO_COUNTERS
) -> link_pb2.HostCounters:
    """Load, memory, staging room and network traffic; a counter that cannot be read stays 0.

    Only those of ``counters`` are added that the driver uses for its decisions.
    """
    chosen = [each for each in counters.readings if each.name in IN_HEARTBEATS]
    received, sent = host.network_bytes(proc)
    return link_pb2.HostCounters(
        load_1min=host.load_1min(proc),
        memory_available_bytes=host.memory_bytes("MemAvailable", proc),
        staging_free_bytes=host.free_bytes(staging),
        network_received_bytes=received,
        network_sent_bytes=sent,
        counters=[
            link_pb2.Counter(name=each.name, target=encodable(each.target), value=each.value)
            for each in chosen[:MAX_IN_HEARTBEAT]
        ],
        counters_skipped=[encodable(reason[:MAX_REASON_CHARS]) for reason in counters.skipped],
    )
