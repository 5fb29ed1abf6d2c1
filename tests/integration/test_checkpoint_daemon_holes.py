"""Holes that the checkpoint daemon once had, each with the smallest history that shows it."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.checkpoint_files import slot_bytes
from tests.harness.checkpoint_node import DaemonProcess, WorkerClient
from tests.integration.test_checkpoint_daemon import commit_steps, open_attempt, progress

from megascale.v1 import types_pb2
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


async def test_a_drain_after_a_rollback_does_not_take_the_later_commit_for_its_own(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    await commit_steps(daemon, stack.enter_context(WorkerClient(daemon)), uri, 10, 30)
    opened = await open_attempt(daemon, uri, 2, refused_steps=[30])
    assert opened.restore.step == 10
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register(attempt=2, uri=uri, committer=daemon.address)
    drained = worker.drain(20, timeout_s=0.3)
    assert "step 20 was not sealed" in drained["error"]


def test_what_a_dead_daemon_of_another_name_left_is_removed(
    tmp_path: Path, stack: ExitStack
) -> None:
    first = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    live = stack.enter_context(DaemonProcess(tmp_path, "n1"))
    for daemon in (first, live):
        stack.enter_context(WorkerClient(daemon)).register()
    first.stop(signal.SIGKILL)
    assert list(first.staging.rglob("slot-0"))
    # The name n0 never comes back: the scheduler gives every node a name of its own.
    stack.enter_context(DaemonProcess(tmp_path, "n2"))
    assert not list(first.staging.rglob("slot-0"))
    assert list(live.staging.rglob("slot-0")), "the memory of a running daemon is gone"


async def test_a_new_attempt_adopts_the_state_that_was_not_yet_persisted(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    await open_attempt(daemon, uri, 1)
    size = 1 << 14
    piece = ShardPiece("p", "master", "float32", (size,), (0,), (size,), 0, size, 0, primary=True)
    layout = ShardLayout((piece,), slot_bytes([piece]))
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register(uri=uri, committer=daemon.address, layout=layout)
    # The storage takes no file of that size for now.
    unlimited = resource.prlimit(
        daemon.process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY)
    )
    worker.write(10)
    worker.drain_until_error(10, "File too large")
    worker.close()
    opened = await open_attempt(daemon, uri, 2, sealed_step=10, sealed_by_attempt=1)
    assert opened.restore.source == types_pb2.RESTORE_SOURCE_MEMORY
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
    successor = stack.enter_context(WorkerClient(daemon))
    successor.register(attempt=2, uri=uri, committer=daemon.address, layout=layout)
    answer = await asyncio.to_thread(successor.restore, "memory", 10, 1)
    assert answer["kind"] == "restored"
    # It trains on, and never takes step 10 again.
    committed = await progress(daemon, lambda job: job.committed_step == 10)
    assert committed.committed_by_attempt == 2
    assert (await open_attempt(daemon, uri, 3)).restore.step == 10
