"""Two real checkpoint daemons: what is sealed at one is whole at the other, and comes back."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import image_of
from tests.harness.checkpoint_node import TOKEN, DaemonProcess, WorkerClient, layout_of
from tests.harness.planned_restore import trainer_layouts
from tests.harness.restoring import seal_image
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc, link_pb2
from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.replicas.connection import Connection
from megascale_common.service.channel import open_channel

EXPERTS = {
    "layers": 4,
    "hidden_size": 32,
    "heads": 4,
    "vocab_size": 16,
    "sequence_length": 8,
    "block": "serial",
    "mlp": "swiglu",
    "ffn_size": 8,
    "experts": {"count": 16, "ffn_size": 16, "dense_layers": 1},
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Daemons and workers entered here are ended after the test."""
    with ExitStack() as entered:
        yield entered


async def seen(
    daemon: DaemonProcess, until: Callable[[link_pb2.CheckpointProgress], bool]
) -> link_pb2.CheckpointProgress:
    """The first progress of the job that ``until`` accepts."""
    async with open_channel(daemon.address, TOKEN) as channel, asyncio.timeout(CALL_TIMEOUT_S):
        stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        async for response in stub.WatchProgress(checkpoint_pb2.WatchProgressRequest()):
            for job in response.jobs:
                if job.job == "job" and until(job):
                    return job
    raise AssertionError("the stream ended")


def endpoint(daemon: DaemonProcess) -> str:
    return (daemon.run_folder / "checkpoint.replicas").read_text()


def replica_steps(job: link_pb2.CheckpointProgress) -> list[tuple[int, int, int]]:
    return [(item.rank, item.attempt, item.step) for item in job.replicas]


def has_replica(step: int, rank: int = 0) -> Callable[[link_pb2.CheckpointProgress], bool]:
    return lambda job: (rank, 1, step) in replica_steps(job)


def has_sealed(step: int) -> Callable[[link_pb2.CheckpointProgress], bool]:
    return lambda job: any(item.step == step for item in job.sealed)


def close_all(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


async def two_nodes(
    folder: Path, stack: ExitStack
) -> tuple[DaemonProcess, DaemonProcess, WorkerClient, WorkerClient]:
    """Rank 0 on n0 and rank 1 on n1, each with the other as its peer."""
    first = stack.enter_context(DaemonProcess(folder, "n0"))
    second = stack.enter_context(DaemonProcess(folder, "n1"))
    workers = [stack.enter_context(WorkerClient(daemon)) for daemon in (first, second)]
    for rank, (worker, peer) in enumerate(zip(workers, (second, first), strict=True)):
        await asyncio.to_thread(
            worker.register, rank=rank, world_size=2, replicas={"target": endpoint(peer)}
        )
    return first, second, workers[0], workers[1]


async def test_a_spare_restores_the_state_of_a_lost_node_from_its_peer(
    tmp_path: Path, stack: ExitStack
) -> None:
    first, second, rank_0, rank_1 = await two_nodes(tmp_path, stack)
    for step in (1, 2):
        for worker in (rank_0, rank_1):
            assert (await asyncio.to_thread(worker.write, step))["kind"] == "sealed"
        await seen(second, has_replica(step))
        await seen(first, has_replica(step, rank=1))  # or the next step would overtake it
    held = await seen(second, lambda job: len(job.replicas) == 2)
    assert replica_steps(held) == [(0, 1, 1), (0, 1, 2)]
    assert {item.layout_digest for item in held.replicas} == {layout_of(0, 2).digest()}
    assert held.replica_failures == 0
    first.stop(signal.SIGKILL)

    spare = stack.enter_context(DaemonProcess(tmp_path, "n2"))
    successor = stack.enter_context(WorkerClient(spare))
    orders = {"target": endpoint(second), "source": endpoint(second)}
    await asyncio.to_thread(successor.register, attempt=2, rank=0, world_size=2, replicas=orders)
    plan = {"source": "memory", "step": 2, "written_by_attempt": 1, "manifest_uri": ""}
    answer = await asyncio.to_thread(successor.ask, "restore_memory", plan=plan)
    assert (answer["kind"], answer["problem"]) == ("memory_state", "")
    assert answer["small_state"] == {"position": 2, "random": 0}
    assert successor.holds(answer["slot"], 2)
    # What came from the peer counts as sealed here, as if it had been written here.
    assert await seen(spare, lambda job: any(item.step == 2 for item in job.sealed))
    assert successor.ask("release", slot=answer["slot"]) == {"kind": "released"}
    # The survivor's replica was lost with the node: its new peer gets one before the next snapshot.
    rank_1.close()
    survivor = stack.enter_context(WorkerClient(second))
    await asyncio.to_thread(
        survivor.register, attempt=2, rank=1, world_size=2, replicas={"target": endpoint(spare)}
    )
    assert (await asyncio.to_thread(survivor.ask, "restore_memory", plan=plan))["slot"] >= 0
    await seen(spare, has_replica(2, rank=1))
    absent = await asyncio.to_thread(successor.ask, "restore_memory", plan={**plan, "step": 7})
    assert absent["slot"] == -1 and "no replica of step 7" in absent["problem"]


async def test_a_lost_peer_costs_no_snapshot_and_is_reported(
    tmp_path: Path, stack: ExitStack
) -> None:
    first, second, rank_0, _ = await two_nodes(tmp_path, stack)
    assert (await asyncio.to_thread(rank_0.write, 1))["kind"] == "sealed"
    await seen(second, lambda job: bool(job.replicas))
    second.stop(signal.SIGKILL)
    for step in (2, 3, 4):
        assert (await asyncio.to_thread(rank_0.write, step))["kind"] == "sealed"
        await seen(first, has_sealed(step))
    lost = await seen(first, lambda job: job.replica_failures > 0)
    # By whether the copy of step 1 was acknowledged before the peer was killed.
    words = "cannot be reached", "has closed the connection"
    assert any(each in lost.replica_failure.error for each in words)
    assert lost.replica_failure.rank == 0

    # Restarted, it is at the same address; once its rank is back, the next snapshot gets its copy.
    again = stack.enter_context(DaemonProcess(tmp_path, "n1", incarnation="i2", keep_address=True))
    back = stack.enter_context(WorkerClient(again))
    await asyncio.to_thread(back.register, rank=1, world_size=2)
    assert (await asyncio.to_thread(rank_0.write, 5))["kind"] == "sealed"
    await seen(again, lambda job: (0, 1, 5) in replica_steps(job))
    healed = await seen(first, lambda job: not job.HasField("replica_failure"))
    assert healed.replica_failures >= 1


async def test_a_peer_that_stands_still_never_delays_a_snapshot(
    tmp_path: Path, stack: ExitStack
) -> None:
    """It takes the connection and then nothing: a snapshot that needs the slot ends the copy."""
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    accepted: list[socket.socket] = []
    stack.callback(close_all, accepted)

    def accept() -> None:
        while True:
            try:
                accepted.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    worker = stack.enter_context(WorkerClient(daemon))
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    await asyncio.to_thread(worker.register, slots=2, replicas={"target": target})
    failures = step = 0
    while failures < 3:
        step += 1
        assert step < 500, "too few copies were ended"
        assert (await asyncio.to_thread(worker.write, step))["kind"] == "sealed"
        # The next copy begins once this one has ended, on a slow machine several snapshots later.
        progress = await seen(daemon, has_sealed(step))
        failures = progress.replica_failures
    assert "before its copy had ended" in progress.replica_failure.error
    assert progress.skipped_snapshots == 0


async def test_a_copy_that_takes_longer_than_the_interval_becomes_whole(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Snapshots follow each other faster than one is copied; what is copied stays sealed here."""
    first, second, rank_0, _ = await two_nodes(tmp_path, stack)
    rank_0.close()
    worker = stack.enter_context(WorkerClient(first))
    size_bytes = sum(piece.size_bytes for piece in layout_of(0, 2).pieces)
    # What exceeds a quarter of a second's bytes takes another 0.75 s: many snapshots' time.
    orders = {"target": endpoint(second), "bytes_per_s": size_bytes}
    await asyncio.to_thread(worker.register, rank=0, world_size=2, slots=4, replicas=orders)
    decided, whole, step, sealed = list[int](), set[int](), 0, 0
    while len(whole) < 3:
        step += 1
        assert step < 5000, "too few copies became whole"
        await asyncio.sleep(0.02)
        replicate = await asyncio.to_thread(worker.replica_ended, step)
        decided += [step] if replicate else []
        answer = await asyncio.to_thread(worker.write, step, replicate=replicate)
        sealed += answer["kind"] == "sealed"
        own = await seen(first, has_sealed(step))
        assert {item.step for item in own.sealed} >= set(decided[-2:]), "both are held"
        held = await seen(second, lambda job: True)
        whole |= {item.step for item in held.replicas}
    assert sealed == step > 3 * len(whole), "snapshots went on meanwhile"
    assert whole <= set(decided)


async def test_a_copy_keeps_to_its_rate(tmp_path: Path, stack: ExitStack) -> None:
    first, second, rank_0, _ = await two_nodes(tmp_path, stack)
    rank_0.close()
    worker = stack.enter_context(WorkerClient(first))
    size_bytes = sum(piece.size_bytes for piece in layout_of(0, 2).pieces)
    # A quarter of a second's bytes go out at once, the rest takes a second.
    orders = {"target": endpoint(second), "bytes_per_s": int(size_bytes / 1.25)}
    await asyncio.to_thread(worker.register, rank=0, world_size=2, replicas=orders)
    begun_s = asyncio.get_running_loop().time()
    assert (await asyncio.to_thread(worker.write, 1))["kind"] == "sealed"
    await seen(second, lambda job: bool(job.replicas))
    assert asyncio.get_running_loop().time() - begun_s > 0.9


async def test_replicas_leave_room_for_the_next_job(tmp_path: Path, stack: ExitStack) -> None:
    slot = layout_of(0, 2).slot_bytes
    limit = ("--staging-limit-bytes", str(4 * slot))
    first = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    second = stack.enter_context(DaemonProcess(tmp_path, "n1", arguments=limit))
    rank_0, rank_1 = (stack.enter_context(WorkerClient(daemon)) for daemon in (first, second))
    await asyncio.to_thread(rank_1.register, rank=1, world_size=2, slots=2)
    orders = {"target": endpoint(second)}
    await asyncio.to_thread(rank_0.register, rank=0, world_size=2, slots=2, replicas=orders)
    assert (await asyncio.to_thread(rank_0.write, 1))["kind"] == "sealed"
    await seen(second, has_replica(1))
    rank_1.close()

    async def registered() -> bool:
        # Refused until the daemon has seen that the worker of the job before is gone.
        with WorkerClient(second) as other:
            answer = await asyncio.to_thread(
                other.register, job="other", rank=1, world_size=2, slots=4
            )
            return bool(answer["kind"] == "registered")

    await eventually(registered, "the slots and replicas of the job before are freed")


async def test_a_rank_of_experts_has_its_replica_with_a_small_one(
    tmp_path: Path, stack: ExitStack
) -> None:
    """The first stage has a dense layer, the second all experts: its state is lost and comes back.

    The first node has room for both only because its own rank takes fewer slots than it wants.
    """
    small, large = trainer_layouts(EXPERTS, {"pp": 2, "stage_layers": [1, 3]})
    assert large.slot_bytes > 3 * small.slot_bytes
    room = 2 * large.slot_bytes + 3 * small.slot_bytes
    limit = ("--staging-limit-bytes", str(room))
    first = stack.enter_context(DaemonProcess(tmp_path, "n0", arguments=limit))
    second = stack.enter_context(DaemonProcess(tmp_path, "n1"))
    dense, sparse = (stack.enter_context(WorkerClient(daemon)) for daemon in (first, second))
    given = {"world_size": 2, "largest_slot_bytes": large.slot_bytes}
    for rank, worker, layout, peer in ((0, dense, small, second), (1, sparse, large, first)):
        orders = {"target": endpoint(peer)}
        await asyncio.to_thread(worker.register, rank=rank, layout=layout, replicas=orders, **given)
    assert len(dense.slots) == 3
    shapes = {piece.name: piece.global_shape for piece in (*small.pieces, *large.pieces)}
    random = np.random.default_rng(0)
    values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    image = image_of(large, values)
    await asyncio.to_thread(seal_image, sparse, 1, image, {"rank": 1}, replicate=True)
    await seen(first, has_replica(1, rank=1))
    second.stop(signal.SIGKILL)

    spare = stack.enter_context(DaemonProcess(tmp_path, "n2"))
    successor = stack.enter_context(WorkerClient(spare))
    await asyncio.to_thread(
        successor.register,
        attempt=2,
        rank=1,
        layout=large,
        replicas={"target": endpoint(first), "source": endpoint(first)},
        **given,
    )
    plan = {"source": "memory", "step": 1, "written_by_attempt": 1, "manifest_uri": ""}
    answer = await asyncio.to_thread(successor.ask, "restore_memory", plan=plan)
    assert (answer["kind"], answer["problem"]) == ("memory_state", "")
    assert bytes(successor.slots[answer["slot"]].view("u1")[: len(image)]) == bytes(image)


async def test_the_replica_port_takes_no_stranger(tmp_path: Path, stack: ExitStack) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))

    def ask() -> str:
        with Connection.dial(endpoint(daemon), "wrong", Cancellation()) as connection:
            return str(connection.receive()["error"])

    assert "does not have the token" in await asyncio.to_thread(ask)
