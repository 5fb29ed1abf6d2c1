"""Where a restore takes its state from: a damaged source falls to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.checkpoint_node import DaemonProcess, WorkerClient
from tests.integration.test_checkpoint_daemon import commit_steps, open_attempt

from megascale.v1 import types_pb2


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


async def test_a_flipped_bit_in_memory_leaves_the_stored_copy(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    worker = stack.enter_context(WorkerClient(daemon))
    await commit_steps(daemon, worker, uri, 10, 20)
    for slot in worker.slots:
        slot[3] += 1
    worker.close()
    plan = (await open_attempt(daemon, uri, 2, sealed_step=20, sealed_by_attempt=1)).restore
    assert (plan.source, plan.step) == (types_pb2.RESTORE_SOURCE_MEMORY, 20)
    again = stack.enter_context(WorkerClient(daemon))
    again.register(attempt=2, uri=uri, committer=daemon.address)
    answer = again.restore("memory", 20, 1, plan.manifest_uri)
    assert answer["kind"] == "restored", answer
    assert answer["source"] == "storage" and again.holds(answer["slot"], 20)
