"""The trainer's side of a snapshot against a daemon: sealed, skipped, and what a loss costs."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.harness.checkpoint_node import TOKEN, DaemonProcess
from tests.harness.training import tiny_job
from tests.harness.waiting import CALL_TIMEOUT_S, eventually
from tests.integration.test_checkpoint_daemon import progress

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from megascale_common.node import framing
from megascale_common.node.status_page import StatusPageWriter
from megascale_common.service.channel import open_channel
from megascale_job.loading import from_accepted
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.save.daemon_link import LONGEST_HOLD_S, DaemonLink, RankRegistration
from megascale_trainer.save.host_copy import Landed
from megascale_trainer.save.restore import restore
from megascale_trainer.save.snapshot import Snapshotter
from megascale_trainer.save.snapshot_schedule import MUST_SKIP, Votes

PIECE = ShardPiece("vector", "master", "float32", (256,), (0,), (256,), 0, 256, 0, primary=True)
LAYOUT = ShardLayout((PIECE,), 1024)


class State:
    """A training state of one buffer, by default of 1 KiB."""

    def __init__(self, layout: ShardLayout = LAYOUT) -> None:
        self.layout = layout
        self.values = torch.zeros(layout.slot_bytes // 4)

    def shard_layout(self) -> ShardLayout:
        return self.layout

    def state_image(self) -> torch.Tensor:
        return self.values.view(torch.uint8)

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        slot[: self.layout.slot_bytes].copy_(self.values.view(torch.uint8))
        landed(self.layout.slot_bytes)

    def load_from(
        self, slot: torch.Tensor, ready: Callable[[int], object] = lambda stop: None
    ) -> None:
        self.values.view(torch.uint8).copy_(slot[: self.layout.slot_bytes])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def snapshotter(
    daemon: DaemonProcess,
    state: State,
    *,
    attempt: int = 1,
    uri: str = "",
    rank: int = 0,
    world_size: int = 1,
    committer: DaemonProcess | None = None,
    slots: int = 2,
    verified_share: float = 0.0,
) -> Snapshotter:
    sizes = {"tp": 1, "cp": 1, "dp": world_size, "pp": 1}
    address = (committer or daemon).address if uri else ""
    registration = RankRegistration(
        "job", attempt, rank, world_size, uri, address, slots, sizes=sizes
    )
    longest_s = 4 * CALL_TIMEOUT_S
    device, layout = torch.device("cpu"), state.shard_layout()
    link = DaemonLink(
        str(daemon.socket), registration, layout, device, collective_timeout_s=longest_s
    ).connect()
    return Snapshotter(link, state, device, verified_share=verified_share)


def take(snapshots: Snapshotter, state: State, step: int, *, finite: bool = True) -> None:
    state.values.fill_(step)
    assert snapshots.reserve_or_wait(step, CALL_TIMEOUT_S) == 0
    assert snapshots.take(step, {"skipped_updates": 0}, votes=0)
    snapshots.seal_if_copied(wait=True)
    assert snapshots.copied is not None, (
        "a snapshot is not sealed before the result of its step is known"
    )
    snapshots.settle(step, {"skipped_updates": 1}, finite=finite)
    snapshots.seal_if_copied(wait=True)
    assert snapshots.copied is None


async def open_attempt(
    daemon: DaemonProcess, uri: str, attempt: int, sealed_step: int = 0, world_size: int = 1
) -> str:
    async with open_channel(daemon.address, TOKEN) as channel:
        request = checkpoint_pb2.OpenAttemptRequest(
            job="job",
            uri=uri,
            attempt=attempt,
            world_size=world_size,
            sealed_step=sealed_step,
            sealed_by_attempt=1,
        )
        stub: checkpoint_pb2_grpc.CheckpointServiceAsyncStub = (
            checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        )
        return str((await stub.OpenAttempt(request)).restore.manifest_uri)


async def test_a_state_that_was_in_memory_alone_is_taken_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    state, uri = State(), str(tmp_path / "checkpoints")
    # Attempt 1 is never opened, as if its last step could not be committed before it ended.
    first = snapshotter(daemon, state, uri=uri)
    await asyncio.to_thread(take, first, state, 20)
    first.close()
    await open_attempt(daemon, uri, 2, sealed_step=20)
    again, restored = snapshotter(daemon, state, attempt=2, uri=uri), State()
    plan = RestorePlan(RestoreSource.MEMORY, 20, written_by_attempt=1)
    found = await asyncio.to_thread(restore, again.link, plan, restored, torch.device("cpu"))
    small_state = found.small_state
    assert small_state == {"skipped_updates": 1} and set(restored.values.tolist()) == {20.0}
    # Attempt 2 has adopted the state, and may still be writing it.
    vote = await asyncio.to_thread(again.reserve_or_wait, 20, CALL_TIMEOUT_S)
    assert Votes.of(vote).must_skip == 0
    assert again.take(20, small_state, votes=0)
    again.settle(20, small_state, finite=True)
    again.seal_if_copied(wait=True)
    assert (await asyncio.to_thread(again.drain, 20, CALL_TIMEOUT_S)).problem == ""
    assert (
        await open_attempt(daemon, uri, 3)
        == f"{uri}/attempts/attempt-000002/step-000000020/manifest.json"
    )


def test_a_lost_daemon_costs_snapshots_and_no_memory(tmp_path: Path, stack: ExitStack) -> None:
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    state = State()
    snapshots = snapshotter(daemon, state)
    take(snapshots, state, 10)
    assert snapshots.reserve_or_wait(20, CALL_TIMEOUT_S) == 0
    daemon.stop()
    # The rank has voted for a snapshot and loses its slot before it is taken: training goes on.
    assert snapshots.drain(10, 0.1).problem == "the checkpoint daemon is gone"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), (
        "a lost daemon's memory is still mapped"
    )
    assert not snapshots.take(20, {}, votes=0)
    assert snapshots.reserve(30) == 1
    stack.enter_context(DaemonProcess(tmp_path, "n0", incarnation="i2"))
    # The connection is opened again beside training.
    assert snapshots.reserve_or_wait(35, CALL_TIMEOUT_S) == 0
    assert not snapshots.take(35, {}, votes=1)
    take(snapshots, state, 40)
    snapshots.close()


@pytest.mark.parametrize("slots", [2, 5])
def test_a_snapshot_after_every_step(tmp_path: Path, stack: ExitStack, slots: int) -> None:
    """In the order of a GPU, where the result of a step is read after the next was launched."""
    daemon, state = stack.enter_context(DaemonProcess(tmp_path, "n0")), State()
    snapshots = snapshotter(daemon, state, slots=slots)
    votes, taken = {1: snapshots.reserve_or_wait(1, CALL_TIMEOUT_S)}, []
    for step in range(1, 11):
        # With five, a slot is found while two snapshots before are neither settled nor sealed.
        votes[step + 1] = (
            snapshots.reserve(step + 1)
            if slots == 2
            else snapshots.reserve_or_wait(step + 1, CALL_TIMEOUT_S)
        )
        state.values.fill_(step)
        if step > 1:
            snapshots.settle(step - 1, {}, finite=True)
        if snapshots.take(step, {}, votes=votes[step]):
            taken.append(step)
    assert taken == list(range(1, 11)) or slots == 2
    assert snapshots.skipped == 10 - len(taken)
    snapshots.settle(10, {}, finite=True)
    assert snapshots.take(11, {}, votes=1) is False
    assert snapshots.reserve_or_wait(12, CALL_TIMEOUT_S) == 0, "no slot has leaked"
    snapshots.close()


def test_a_hung_daemon_holds_a_step_for_a_moment_and_snapshots_go_on_when_it_answers(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, state = stack.enter_context(DaemonProcess(tmp_path, "n0")), State()
    snapshots = snapshotter(daemon, state)
    take(snapshots, state, 10)
    assert snapshots.reserve_or_wait(19, CALL_TIMEOUT_S) == 0
    waits, read_answers = list[float](), snapshots.link.read_answers

    def waiting(wait_s: float = 0.0) -> bool:
        waits.append(wait_s)
        return read_answers(wait_s)

    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as watched:
            watched.setattr(snapshots.link, "read_answers", waiting)
            assert snapshots.take(19, {}, votes=0)  # copied, and sealed once the daemon goes on
            snapshots.settle(19, {}, finite=True)
            snapshots.seal_if_copied(wait=True)
            votes = [snapshots.reserve(step) for step in range(20, 40)]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    # Counted, because a busy host may hold the steps up for longer than 20 such waits.
    assert [wait_s for wait_s in waits if wait_s] == [LONGEST_HOLD_S]
    assert votes == [MUST_SKIP] * 20
    assert snapshots.reserve_or_wait(41, CALL_TIMEOUT_S) == 0
    assert not snapshots.take(41, {}, votes=1)
    take(snapshots, state, 42)
    snapshots.close()


class WrongCopies(State):
    """A state whose copy to the host loses what lies behind the first half, from step 20 on."""

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        super().state_copy_to(slot, landed)
        if self.values[0] >= 20:
            slot[512:1024] = 0


@pytest.mark.parametrize(("share", "kept"), [(0.0, 2), (1.0, 1)])
async def test_a_copy_that_is_not_what_was_on_the_device_is_not_kept(
    tmp_path: Path, stack: ExitStack, share: float, kept: int
) -> None:
    daemon, state = stack.enter_context(DaemonProcess(tmp_path, "n0")), WrongCopies()
    snapshots = snapshotter(daemon, state, verified_share=share, slots=3)
    for step in (10, 20):
        await asyncio.to_thread(take, snapshots, state, step)
    assert await asyncio.to_thread(snapshots.reserve_or_wait, 30, CALL_TIMEOUT_S) == 0
    seen = await progress(daemon, lambda job: len(job.sealed) == kept)
    assert [sealed.step for sealed in seen.sealed] == [10, 20][:kept]
    assert share == 0 or "not what was on the device" in seen.persist_error
    snapshots.close()


def test_the_layout_of_a_model_of_hundreds_of_layers_is_registered(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Its description has several MiB, and a message of the local contract 1 MiB at most."""
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    pieces = tuple(
        ShardPiece(
            f"layers.{index}.attention.query", "master", "float32", (4,), (0,), (4,), 0, 4,
            16 * index, primary=True,
        )
        for index in range(12_345)
    )  # fmt: skip
    layout = ShardLayout(pieces, 16 * len(pieces))
    state = State(layout)
    assert len(json.dumps(layout.to_dict())) > 2 * framing.MAX_MESSAGE_BYTES
    snapshots = snapshotter(daemon, state)
    take(snapshots, state, 10)
    plan = RestorePlan(RestoreSource.MEMORY, 10, written_by_attempt=1)
    restored = State(layout)
    restore(snapshots.link, plan, restored, torch.device("cpu"))
    assert set(restored.values.tolist()) == {10.0}
    snapshots.close()


async def test_a_daemon_that_is_lost_at_the_end_gets_the_last_step_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    committer = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n1"))
    uri = str(tmp_path / "checkpoints")
    await open_attempt(committer, uri, 1, world_size=2)
    job = from_accepted(
        tiny_job(training={"steps": 20}, checkpoint={"uri": uri, "final_timeout_s": 60.0})
    )

    def rank(number: int, of: DaemonProcess) -> SnapshotSteps:
        snapshots = snapshotter(
            of, State(), uri=uri, rank=number, world_size=2, committer=committer
        )
        page = StatusPageWriter(tmp_path / f"page-{number}", rank=number, attempt=1)
        steps = SnapshotSteps(job, page, snapshots)
        assert steps.vote(20) == 0
        steps.settle(20, 0, 0, finite=True)
        steps.after(20, 0)
        snapshots.seal_if_copied(wait=True)
        return steps

    # Rank 1's file is written, and its daemon ends before the other rank is as far.
    lost = await asyncio.to_thread(rank, 1, daemon)
    name = "step-000000020/rank-00001.safetensors"
    await eventually(lambda: list((tmp_path / "checkpoints").rglob(name)), "the file of rank 1")
    daemon.stop(signal.SIGKILL)
    ending = asyncio.create_task(asyncio.to_thread(finish, lost))
    stack.enter_context(DaemonProcess(tmp_path, "n1", incarnation="i2"))
    assert await asyncio.to_thread(finish, await asyncio.to_thread(rank, 0, committer)) == ""
    assert await ending == ""
    manifest = await open_attempt(committer, uri, 2, world_size=2)
    assert manifest.endswith("step-000000020/manifest.json")


def finish(steps: SnapshotSteps) -> str:
    return steps.finish(single_process_groups().world, torch.device("cpu"), 0)
