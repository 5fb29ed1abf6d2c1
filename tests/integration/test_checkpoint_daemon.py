"""Real checkpoint daemons: seal, commit, restore, and what survives a kill."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.harness.checkpoint_files import slot_bytes
from tests.harness.checkpoint_node import TOKEN, DaemonProcess, WorkerClient, layout_of
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc, link_pb2, types_pb2
from megascale_common.node import framing
from megascale_common.node.process import child_environment
from megascale_common.service.channel import open_channel
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Daemons and workers entered here are ended after the test."""
    with ExitStack() as entered:
        yield entered


@asynccontextmanager
async def connected(
    daemon: DaemonProcess,
) -> AsyncIterator[checkpoint_pb2_grpc.CheckpointServiceAsyncStub]:
    async with open_channel(daemon.address, TOKEN) as channel:
        yield checkpoint_pb2_grpc.CheckpointServiceStub(channel)


async def open_attempt(
    daemon: DaemonProcess, uri: str, attempt: int, world_size: int = 1, **fields: Any
) -> checkpoint_pb2.OpenAttemptResponse:
    request = checkpoint_pb2.OpenAttemptRequest(
        job="job",
        uri=uri,
        attempt=attempt,
        world_size=world_size,
        epoch=types_pb2.Epoch(create_revision=1),
        **fields,
    )
    async with connected(daemon) as stub:
        return await stub.OpenAttempt(request, timeout=CALL_TIMEOUT_S)


async def progress(
    daemon: DaemonProcess, until: Callable[[link_pb2.CheckpointProgress], bool]
) -> link_pb2.CheckpointProgress:
    """The first progress of the job from WatchProgress that ``until`` accepts."""
    async with connected(daemon) as stub, asyncio.timeout(CALL_TIMEOUT_S):
        async for response in stub.WatchProgress(checkpoint_pb2.WatchProgressRequest()):
            for job in response.jobs:
                if job.job == "job" and until(job):
                    return job
    raise AssertionError("the stream ended")


async def commit_steps(
    daemon: DaemonProcess, worker: WorkerClient, uri: str, *steps: int, attempt: int = 1
) -> None:
    """Open an attempt of one rank and commit its steps."""
    await open_attempt(daemon, uri, attempt)
    await asyncio.to_thread(worker.register, uri=uri, committer=daemon.address, attempt=attempt)
    for step in steps:
        assert (await asyncio.to_thread(worker.write, step))["kind"] == "sealed"
        assert await asyncio.to_thread(worker.drain, step) == {
            "kind": "drained",
            "committed_step": step,
        }


WRITER = """
import sys
from pathlib import Path
from megascale_common.node.process import arm_parent_death
arm_parent_death()
from tests.harness.checkpoint_node import WorkerClient
class Node: socket = Path(sys.argv[1])
worker = WorkerClient(Node)
worker.register()
worker.write(1)
slot = worker.ask("acquire", step=2)["slot"]
worker.slots[slot][:] = 7
print("writing", flush=True)
sys.stdin.read()
"""


async def test_a_writer_killed_mid_write_leaves_the_sealed_slot(
    tmp_path: Path, stack: ExitStack
) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    _kill_a_writer_mid_write(daemon)
    seen = await progress(daemon, lambda job: bool(job.sealed))
    assert [(s.rank, s.attempt, s.step, s.layout_digest) for s in seen.sealed] == [
        (0, 1, 1, layout_of(0, 1).digest())
    ]
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register(attempt=2)
    answer = worker.restore("memory", 1, 1)
    assert (answer["kind"], answer["source"]) == ("restored", "memory")
    assert answer["small_state"] == {"position": 1, "random": 0} and worker.holds(answer["slot"], 1)
    assert worker.ask("release", slot=answer["slot"]) == {"kind": "released"}
    # The half-written slot is free again: all slots but the sealed one can be acquired.
    taken = [worker.ask("acquire", step=step)["kind"] for step in (3, 4, 5)]
    assert taken == ["acquired", "acquired", "busy"]
    await progress(daemon, lambda job: job.skipped_snapshots == 1)
    assert worker.ask("acquire", step=5)["kind"] == "busy"
    assert (await progress(daemon, lambda job: True)).skipped_snapshots == 1
    worker.ask("release", slot=0 if answer["slot"] else 1)
    assert worker.ask("acquire", step=5)["kind"] == "acquired"
    await progress(daemon, lambda job: job.skipped_snapshots == 0)


def _kill_a_writer_mid_write(daemon: DaemonProcess) -> None:
    """A worker process seals step 1, writes to the slot of step 2, and is killed there."""
    command = [sys.executable, "-c", WRITER, str(daemon.socket)]
    environment = child_environment({"PYTHONPATH": os.pathsep.join(sys.path)})
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        writer.send_signal(signal.SIGKILL)


async def test_two_nodes_commit_together_and_restore(tmp_path: Path, stack: ExitStack) -> None:
    uri = str(tmp_path / "checkpoints")
    daemons = [stack.enter_context(DaemonProcess(tmp_path, f"n{rank}")) for rank in range(2)]
    opened = await open_attempt(daemons[0], uri, 1, 2)
    assert opened.restore.source == types_pb2.RESTORE_SOURCE_NONE and opened.log_seq == 1
    workers = [stack.enter_context(WorkerClient(daemon)) for daemon in daemons]
    for rank, worker in enumerate(workers):
        worker.register(rank=rank, world_size=2, uri=uri, committer=daemons[0].address)
    assert workers[0].write(10)["kind"] == "sealed"
    # One rank alone is no checkpoint.
    workers[0].drain_until_error(10, "not saved in time by other ranks")
    assert workers[1].write(10)["kind"] == "sealed"
    for worker in workers:
        assert worker.drain(10) == {"kind": "drained", "committed_step": 10}
    for daemon in daemons:
        seen = await progress(daemon, lambda job: job.committed_step == 10)
        assert (
            seen.committed_by_attempt == 1
            and Path(seen.manifest_uri).is_file()
            and not seen.persist_error
        )
    async with connected(daemons[1]) as stub:
        listed = await stub.ListCommits(checkpoint_pb2.ListCommitsRequest(job="job", uri=uri))
    assert [(c.step, c.attempt, c.world_size) for c in listed.checkpoints] == [(10, 1, 2)]

    # A fresh node takes over rank 1 from storage; rank 0 has the same state in its own memory.
    spare = stack.enter_context(DaemonProcess(tmp_path, "n2"))
    plan = (await open_attempt(daemons[0], uri, 2, 2)).restore
    assert (plan.source, plan.step, plan.written_by_attempt) == (
        types_pb2.RESTORE_SOURCE_STORAGE,
        10,
        1,
    )
    for rank, daemon, source in ((0, daemons[0], "memory"), (1, spare, "storage")):
        worker = stack.enter_context(WorkerClient(daemon))
        worker.register(attempt=2, rank=rank, world_size=2, uri=uri, committer=daemons[0].address)
        answer = worker.restore("storage", plan.step, plan.written_by_attempt, plan.manifest_uri)
        assert (answer["kind"], answer["source"]) == ("restored", source) and worker.holds(
            answer["slot"], 10
        )
        assert answer["small_state"] == {"position": 10, "random": rank}


async def test_damaged_files_are_refused_by_name_and_the_step_before_is_used(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    await commit_steps(daemon, stack.enter_context(WorkerClient(daemon)), uri, 10, 20, 30)
    attempt_folder = tmp_path / "checkpoints" / "attempts" / "attempt-000001"
    truncated = attempt_folder / "step-000000030" / "rank-00000.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    flipped = attempt_folder / "step-000000020" / "rank-00000.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1000] ^= 1
    flipped.write_bytes(data)

    fresh = stack.enter_context(DaemonProcess(tmp_path, "n1"))
    opened = await open_attempt(fresh, uri, 2)
    assert opened.restore.step == 20 and str(truncated) in opened.refused[0]
    worker = stack.enter_context(WorkerClient(fresh))
    worker.register(attempt=2, uri=uri, committer=fresh.address)
    answer = worker.restore("storage", 20, 1, opened.restore.manifest_uri)
    assert (answer["kind"], answer["error_kind"], answer["file"]) == (
        "refused",
        "CHECKPOINT_CORRUPT",
        str(flipped),
    )

    opened = await open_attempt(fresh, uri, 3, refused_steps=[20])
    assert opened.restore.step == 10
    worker = stack.enter_context(WorkerClient(fresh))
    worker.register(attempt=3, uri=uri, committer=fresh.address)
    answer = worker.restore("storage", 10, 1, opened.restore.manifest_uri)
    assert answer["kind"] == "restored" and worker.holds(answer["slot"], 10)
    assert answer["bytes_read"] == sum(piece.size_bytes for piece in layout_of(0, 1).pieces)


async def test_nothing_is_committed_that_the_committer_does_not_see(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    await open_attempt(daemon, uri, 1, 2)
    workers = [stack.enter_context(WorkerClient(daemon)) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.register(rank=rank, world_size=2, uri=uri, committer=daemon.address)
    workers[0].write(10)
    workers[0].drain_until_error(10, "not saved in time by other ranks")
    # As if the node's folder were a local disk: the rank has written, and no other node sees it.
    (file,) = (tmp_path / "checkpoints").rglob("rank-00000.safetensors")
    file.unlink()
    workers[1].write(10)
    drained = workers[1].drain(10)
    assert drained["committed_step"] == 0 and f"{file}: is missing" in drained["error"]
    seen = await progress(daemon, lambda job: bool(job.persist_error))
    assert "is the checkpoint folder shared by all nodes?" in seen.persist_error


async def test_a_superseded_attempt_cannot_commit(tmp_path: Path, stack: ExitStack) -> None:
    uri = str(tmp_path / "checkpoints")
    old, new = (stack.enter_context(DaemonProcess(tmp_path, name)) for name in ("n0", "n1"))
    zombie = stack.enter_context(WorkerClient(old))
    await commit_steps(old, zombie, uri, 10)
    # The next attempt is opened on another node; the old daemon and its worker are not notified.
    opened = await open_attempt(new, uri, 2)
    assert opened.restore.step == 10
    assert zombie.write(20)["kind"] == "sealed"
    drained = zombie.drain(20)
    assert (
        drained["committed_step"] == 10 and "attempt 1 is superseded: attempt 2" in drained["error"]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await open_attempt(old, uri, 1)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    again = await open_attempt(new, uri, 2)
    assert again == opened

    # Nor does the old daemon serve a worker of a lower attempt, or one whose successor has
    # registered.
    successor = stack.enter_context(WorkerClient(old))
    assert successor.register(attempt=2, uri=uri, committer=new.address)["kind"] == "registered"
    late = stack.enter_context(WorkerClient(old))
    answer = late.register(attempt=1, uri=uri, committer=old.address)
    assert answer["kind"] == "error" and "attempt 1 is superseded" in answer["error"]
    assert framing.receive(late.sock) is None and framing.receive(zombie.sock) is None


async def test_a_stale_driver_and_another_job_cannot_open_attempts(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))

    async def refusal(job: str, attempt: int, revision: int) -> tuple[grpc.StatusCode, str]:
        epoch = types_pb2.Epoch(cluster_generation=1, create_revision=revision)
        request = checkpoint_pb2.OpenAttemptRequest(
            job=job, uri=uri, attempt=attempt, world_size=1, epoch=epoch
        )
        async with connected(daemon) as stub:
            try:
                await stub.OpenAttempt(request)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    assert (await refusal("job", 2, 5))[0] is grpc.StatusCode.OK
    code, text = await refusal("job", 3, 4)
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "older epoch (1, 4)" in text
    for attempt in (1, 2, 3):
        code, text = await refusal("other", attempt, 5)
        assert (
            code is grpc.StatusCode.INVALID_ARGUMENT
            and "belongs to job job: give other a checkpoint.uri" in text
        )
    assert (await refusal("job", 3, 5))[0] is grpc.StatusCode.OK


async def test_a_zombie_cannot_write_into_its_successors_slot(
    tmp_path: Path, stack: ExitStack
) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    zombie, successor = (stack.enter_context(WorkerClient(daemon)) for _ in range(2))
    zombie.register(attempt=1, slots=2)
    zombie.write(1)
    slot = zombie.ask("acquire", step=2)["slot"]
    successor.register(attempt=2, slots=2)
    assert successor.ask("acquire", step=2)["slot"] == slot
    successor.slots[slot][:] = 1
    zombie.slots[slot][:] = 99
    assert set(successor.slots[slot]) == {1.0}
    sealed = successor.restore("memory", 1, 1)["slot"]
    assert sealed != slot and successor.holds(sealed, 1)


@pytest.mark.parametrize("source", ["memory", "storage"])
async def test_writing_to_a_sealed_slot_is_detected(
    tmp_path: Path, stack: ExitStack, source: str
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    worker = stack.enter_context(WorkerClient(daemon))
    await commit_steps(daemon, worker, uri, 10)
    for slot in worker.slots:
        slot[3] += 1
    plan = (await open_attempt(daemon, uri, 2)).restore
    stored = plan.manifest_uri if source == "storage" else ""
    answer = worker.restore(source, 10, 1, stored)
    if source == "memory":
        assert answer["error_kind"] == "CHECKPOINT_CORRUPT" and "/slot-" in answer["file"]
        seen = await progress(daemon, lambda job: not job.sealed)
        assert seen.committed_step == 10
        assert [(found.rank, found.attempt, found.step) for found in seen.damaged] == [(0, 1, 10)]
        assert "changed after it was sealed" in seen.damaged[0].error
    else:
        assert answer["source"] == "storage" and worker.holds(answer["slot"], 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_daemon_after_the_next_start(
    tmp_path: Path, stack: ExitStack, number: signal.Signals
) -> None:
    first = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    worker = stack.enter_context(WorkerClient(first))
    worker.register()
    worker.write(1)
    assert list(first.staging.glob("i1/job/rank-00000/slot-0*"))
    status = first.stop(number)
    assert status == (-number if number is signal.SIGKILL else 0)
    assert list(first.staging.glob("i1/job")) == [] or number is signal.SIGKILL
    second = stack.enter_context(DaemonProcess(tmp_path, "n0", incarnation="i2"))
    assert [path.name for path in second.staging.iterdir() if path.is_dir()] == ["i2"]
    # The trainer's mapping outlives the file: it trains on without snapshots, and registers with
    # the next daemon.
    assert worker.holds(0, 1)
    again = stack.enter_context(WorkerClient(second))
    again.register()
    assert again.write(2)["kind"] == "sealed"
    assert second.stop() == 0 and not second.base.exists()


async def test_a_restarted_committer_resumes_the_attempt(tmp_path: Path, stack: ExitStack) -> None:
    uri = str(tmp_path / "checkpoints")
    committer, other = (
        stack.enter_context(DaemonProcess(tmp_path, f"n{rank}")) for rank in range(2)
    )
    await open_attempt(committer, uri, 1, 2)
    far = stack.enter_context(WorkerClient(other))
    far.register(rank=1, world_size=2, uri=uri, committer=committer.address)
    far.write(10)
    committer.stop(signal.SIGKILL)
    again = stack.enter_context(DaemonProcess(tmp_path, "n0", incarnation="i2", keep_address=True))
    assert again.address == committer.address
    near = stack.enter_context(WorkerClient(again))
    near.register(rank=0, world_size=2, uri=uri, committer=again.address)
    near.write(10)
    for worker in (near, far):
        assert await asyncio.to_thread(worker.drain, 10) == {
            "kind": "drained",
            "committed_step": 10,
        }


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02])
async def test_a_daemon_killed_while_it_persists_costs_that_step_alone(
    tmp_path: Path, stack: ExitStack, delay_s: float
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon, other = (stack.enter_context(DaemonProcess(tmp_path, name)) for name in ("n0", "n1"))
    worker = stack.enter_context(WorkerClient(daemon))
    await open_attempt(daemon, uri, 1)
    size = 1 << 22
    piece = ShardPiece(
        "large", "master", "float32", (size,), (0,), (size,), 0, size, 0, primary=True
    )
    layout = ShardLayout((piece,), slot_bytes([piece]))
    worker.register(uri=uri, committer=daemon.address, layout=layout)
    worker.write(1)
    assert worker.drain(1)["committed_step"] == 1
    worker.write(2)
    await asyncio.sleep(delay_s)
    daemon.stop(signal.SIGKILL)
    plan = (await open_attempt(other, uri, 2)).restore
    assert list((tmp_path / "checkpoints").rglob(".rank-*")) == [], "a killed writer's file is left"
    # Step 2 is complete or does not exist: in both cases what is restored is right.
    assert plan.step in (1, 2)
    successor = stack.enter_context(WorkerClient(other))
    successor.register(attempt=2, uri=uri, committer=other.address, layout=layout)
    answer = successor.restore("storage", plan.step, 1, plan.manifest_uri)
    assert answer["kind"] == "restored" and successor.holds(answer["slot"], plan.step)


async def test_a_failed_write_is_reported_and_training_continues(
    tmp_path: Path, stack: ExitStack
) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    worker = stack.enter_context(WorkerClient(daemon))
    await open_attempt(daemon, uri, 1)
    size = 1 << 14
    piece = ShardPiece(
        "large", "master", "float32", (size,), (0,), (size,), 0, size, 0, primary=True
    )
    worker.register(
        uri=uri, committer=daemon.address, layout=ShardLayout((piece,), slot_bytes([piece]))
    )
    # As on a full disk, the rank's file cannot grow; every other file is small.
    unlimited = resource.prlimit(
        daemon.process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY)
    )
    for step in (1, 2, 3, 4):
        assert worker.write(step)["kind"] == "sealed"
        worker.drain_until_error(step, "File too large")
    seen = await progress(daemon, lambda job: bool(job.persist_error))
    assert seen.persist_error.startswith("step 4, rank 0:") and seen.committed_step == 0
    assert (seen.failure.attempt, seen.failure.step, seen.failure.rank) == (1, 4, 0)
    assert seen.failures >= 4
    assert not list((tmp_path / "checkpoints").rglob("*rank-00000*"))
    # A step that a worker waits for is written again until there is room.
    worker.write(5)
    worker.drain_until_error(5, "File too large")
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
    assert worker.drain(5) == {"kind": "drained", "committed_step": 5}
    assert not (await progress(daemon, lambda job: job.committed_step == 5)).persist_error


async def test_bad_requests_are_answered_and_end_the_connection(
    tmp_path: Path, stack: ExitStack
) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    early = stack.enter_context(WorkerClient(daemon))
    assert "register first" in early.ask("acquire", step=1)["error"]
    wrong = stack.enter_context(WorkerClient(daemon))
    assert (
        "register.rank is 3"
        in wrong.register(rank=3, world_size=2, layout=layout_of(0, 1))["error"]
    )
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register()
    assert "not held" in worker.ask("seal", slot=0, step=1, small_state={}, finite=True)["error"]
    assert framing.receive(worker.sock) is None
    garbage = socket.socket(socket.AF_UNIX)
    stack.enter_context(garbage)
    garbage.connect(str(daemon.socket))
    garbage.sendall(b"\xff\xff\xff\xff")
    answer = framing.receive(garbage)
    assert answer is not None and "limit" in answer[0]["error"]
    deep = stack.enter_context(WorkerClient(daemon))
    deep.sock.sendall((200_000).to_bytes(4, "little") + b"[" * 200_000)
    answer = framing.receive(deep.sock)
    assert answer is not None and "nested too deeply" in answer[0]["error"]
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    sealing = stack.enter_context(WorkerClient(daemon))
    sealing.register(job="other")
    slot = sealing.ask("acquire", step=1)["slot"]
    refused = sealing.ask("seal", slot=slot, step=1, small_state={"a": nested}, finite=True)
    assert "nested deeper than 64" in refused["error"]
    async with connected(daemon) as stub:
        for job, address, problem in (("No", "", "DNS-1123"), ("job", "gs://x", "absolute path")):
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
                await stub.OpenAttempt(
                    checkpoint_pb2.OpenAttemptRequest(attempt=1, world_size=1, job=job, uri=address)
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_state_that_is_not_finite_is_not_kept(tmp_path: Path, stack: ExitStack) -> None:
    uri = str(tmp_path / "checkpoints")
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    worker = stack.enter_context(WorkerClient(daemon))
    await commit_steps(daemon, worker, uri, 10)
    assert worker.write(20, finite=False)["kind"] == "sealed"
    assert "not finite" in worker.drain(20)["error"]
    seen = await progress(daemon, lambda job: bool(job.persist_error))
    assert [s.step for s in seen.sealed] == [10] and seen.committed_step == 10


async def test_another_job_gets_the_memory_of_one_that_is_done(
    tmp_path: Path, stack: ExitStack
) -> None:
    slots_bytes = 2 * layout_of(0, 1).slot_bytes
    daemon = stack.enter_context(
        DaemonProcess(tmp_path, "n0", arguments=("--staging-limit-bytes", str(slots_bytes)))
    )
    worker = stack.enter_context(WorkerClient(daemon))
    assert worker.register(slots=2)["kind"] == "registered"
    other = stack.enter_context(WorkerClient(daemon))
    refused = other.register(job="other", slots=2)
    assert "no room for the snapshot slots" in refused["error"]
    worker.close()

    async def registered() -> bool:
        with WorkerClient(daemon) as third:
            return bool(third.register(job="other", slots=2)["kind"] == "registered")

    await eventually(registered, "the memory of the first job")


async def test_a_worker_that_ends_while_it_waits_gives_its_memory_back(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Not after the hour for which it was ready to wait."""
    uri, slots_bytes = str(tmp_path / "checkpoints"), 2 * layout_of(0, 2).slot_bytes
    daemon = stack.enter_context(
        DaemonProcess(tmp_path, "n0", arguments=("--staging-limit-bytes", str(slots_bytes)))
    )
    await open_attempt(daemon, uri, 1, 2)
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register(world_size=2, uri=uri, committer=daemon.address, slots=2)
    worker.write(10)
    framing.send(worker.sock, {"kind": "drain", "step": 10, "timeout_s": 3600.0})
    worker.close()

    async def registered() -> bool:
        with WorkerClient(daemon) as third:
            return bool(third.register(job="other", slots=2)["kind"] == "registered")

    await eventually(registered, "the memory of the first job")


SLOW_RETENTION = """
import sys
if "megascale_checkpoint" in sys.orig_argv:
    import asyncio
    from megascale_checkpoint.serve.committer import Committer
    async def finish(self, timeout_s):
        print("retention begins", flush=True)
        await asyncio.sleep(300)
    Committer.finish = finish
"""


async def test_memory_goes_before_retention_has_ended(tmp_path: Path, stack: ExitStack) -> None:
    """An agent that stops gives its daemon seconds, and kills it then."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_RETENTION)
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n1", site=tmp_path / "site"))
    worker = stack.enter_context(WorkerClient(daemon))
    worker.register()
    assert worker.write(10)["kind"] == "sealed"
    daemon.process.send_signal(signal.SIGTERM)
    await eventually(lambda: "retention begins" in daemon.log.read_text(), "the wait")
    assert not daemon.staging.exists()
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
