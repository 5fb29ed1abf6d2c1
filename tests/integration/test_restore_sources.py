"""Where a restore takes its state from: a damaged source falls to the next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.checkpoint_files import image_of, write_checkpoint
from tests.harness.checkpoint_node import DaemonProcess, WorkerClient
from tests.harness.planned_restore import trainer_layouts
from tests.harness.ranks import RankPool
from tests.harness.restoring import digest, registered, seal_image
from tests.integration.test_checkpoint_daemon import commit_steps, open_attempt, progress
from tests.unit.test_checkpoint_damage import flip

from megascale.v1 import link_pb2, types_pb2
from megascale_job.wire import restore as wire


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


MODEL = {
    "layers": 4,
    "hidden_size": 32,
    "heads": 4,
    "vocab_size": 131,
    "sequence_length": 8,
    "bias": True,
}
GRID = {"tp": 2, "dp": 2}
STEP = 20


class TwoNodes:
    """Four ranks on two nodes that have committed a step, and still hold it in memory."""

    def __init__(self, folder: Path, stack: ExitStack, pool: RankPool) -> None:
        self.folder, self.stack = folder, stack
        self.uri = str(folder / "checkpoints")
        self.layouts = trainer_layouts(MODEL, GRID)
        shapes = {p.name: p.global_shape for layout in self.layouts for p in layout.pieces}
        random = np.random.default_rng(0)
        values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
        self.images = [image_of(layout, values) for layout in self.layouts]
        self.daemons = [stack.enter_context(DaemonProcess(folder, name)) for name in ("n0", "n1")]
        self.pool = pool
        self.slots: list[list[np.ndarray]] = []

    async def commit(self, step: int = STEP) -> None:
        """Seal and commit a step by attempt 1."""
        if not self.slots:
            await open_attempt(self.daemons[0], self.uri, 1, 4)
        workers = []
        for rank, layout in enumerate(self.layouts):
            given = {"uri": self.uri, "committer": self.daemons[0].address}
            workers.append(registered(self.daemon_of(rank), layout, rank, 4, **given))
            seal_image(workers[-1], step, self.images[rank], {"rank": rank})
        for worker in workers:
            assert worker.drain(step)["committed_step"] == step
            self.slots.append(worker.slots)
            worker.close()

    def daemon_of(self, rank: int) -> DaemonProcess:
        return self.daemons[rank // 2]

    async def plan(self, attempt: int, *, sealed: bool = True) -> link_pb2.RestorePlan:
        given = {"sealed_step": STEP, "sealed_by_attempt": 1} if sealed else {}
        return (await open_attempt(self.daemons[0], self.uri, attempt, 4, **given)).restore

    def restore(self, plan: link_pb2.RestorePlan, attempt: int) -> list[dict[str, Any]]:
        """What each rank answers."""
        return self.pool.run(
            "tests.harness.restoring:restore_rank",
            4,
            self.folder / f"restore-{len(list(self.folder.glob('restore-*')))}",
            model=MODEL,
            parallelism=GRID,
            sockets=[str(self.daemon_of(rank).socket) for rank in range(4)],
            plan=wire.from_proto(plan).to_mapping(),
            attempt=attempt,
        )

    def is_right(self, answers: list[dict[str, Any]]) -> bool:
        right = [digest(image) for image in self.images]
        small = [{"rank": rank} for rank in range(4)]
        return [(a.get("digest"), a.get("small_state")) for a in answers] == list(
            zip(right, small, strict=True)
        )


@pytest.fixture
async def nodes(tmp_path: Path, stack: ExitStack, pool: RankPool) -> TwoNodes:
    found = TwoNodes(tmp_path, stack, pool)
    await found.commit()
    return found


async def test_all_ranks_restore_from_their_memory(nodes: TwoNodes) -> None:
    plan = await nodes.plan(2)
    answers = nodes.restore(plan, 2)
    assert nodes.is_right(answers)
    assert [(a["source"], a["read_bytes"]) for a in answers] == [("memory", 0)] * 4


async def test_a_damaged_slot_costs_that_rank_its_memory_alone(nodes: TwoNodes) -> None:
    for slot in nodes.slots[3]:
        slot[3] += 1
    plan = await nodes.plan(2)
    assert plan.source == types_pb2.RESTORE_SOURCE_MEMORY and plan.manifest_xxh3
    answers = nodes.restore(plan, 2)
    assert nodes.is_right(answers), answers
    assert [a["source"] for a in answers] == ["memory"] * 3 + ["storage"]
    # What a peer holds as well is not read, and all ranks share what is.
    own = sum(piece.size_bytes for piece in nodes.layouts[3].pieces if piece.primary)
    assert sum(a["read_bytes"] for a in answers) == own
    seen = await progress(nodes.daemons[1], lambda job: bool(job.damaged))
    assert [(found.rank, found.attempt, found.step) for found in seen.damaged] == [(3, 1, STEP)]


async def test_ranks_of_a_lost_node_read_storage_and_the_others_memory(
    nodes: TwoNodes, stack: ExitStack
) -> None:
    nodes.daemons[1].stop(signal.SIGKILL)
    nodes.daemons[1] = stack.enter_context(DaemonProcess(nodes.folder, "n2"))
    plan = await nodes.plan(2, sealed=False)  # not every rank holds it any more
    assert plan.source == types_pb2.RESTORE_SOURCE_STORAGE
    answers = nodes.restore(plan, 2)
    assert nodes.is_right(answers), answers
    assert [a["source"] for a in answers] == ["memory"] * 2 + ["storage"] * 2
    assert min(a["read_bytes"] for a in answers) > 0, "survivors read for the lost node"


async def test_a_damaged_file_stops_all_ranks_together(nodes: TwoNodes, stack: ExitStack) -> None:
    for node in nodes.daemons:
        node.stop(signal.SIGKILL)
    nodes.daemons = [stack.enter_context(DaemonProcess(nodes.folder, f"m{n}")) for n in range(2)]
    (file,) = (nodes.folder / "checkpoints").rglob("rank-00002.safetensors")
    flip(file, 8 * (file.stat().st_size - 1000))
    plan = await nodes.plan(2, sealed=False)
    answers = nodes.restore(plan, 2)
    kinds = sorted(a["kind"] for a in answers)
    assert kinds == ["CHECKPOINT_CORRUPT", "COLLECTIVE", "COLLECTIVE", "COLLECTIVE"], answers
    (culprit,) = (a for a in answers if a["kind"] == "CHECKPOINT_CORRUPT")
    assert culprit["file"] == str(file) and "fails its checksum" in culprit["problem"]
    flip(file, 8 * (file.stat().st_size - 1000))
    assert nodes.is_right(nodes.restore(plan, 2)), "no slot is left in use"


async def test_a_damaged_file_costs_the_attempt_no_more_than_an_older_checkpoint(
    nodes: TwoNodes, stack: ExitStack
) -> None:
    older = [bytearray(image) for image in nodes.images]
    nodes.images = [bytearray(byte ^ 1 for byte in image) for image in older]
    await nodes.commit(STEP + 1)
    for node in nodes.daemons:
        node.stop(signal.SIGKILL)
    nodes.daemons = [stack.enter_context(DaemonProcess(nodes.folder, f"m{n}")) for n in range(2)]
    files = sorted((nodes.folder / "checkpoints").rglob("rank-00002.safetensors"))
    flip(files[-1], 8 * (files[-1].stat().st_size - 1000))
    plan = await nodes.plan(2, sealed=False)
    assert (plan.step, [p.step for p in plan.older]) == (STEP + 1, [STEP])
    repeated = await nodes.plan(2, sealed=False)
    assert repeated == plan, "the record of the attempt has the older ones, too"
    answers = nodes.restore(plan, 2)
    nodes.images = older
    assert nodes.is_right(answers), answers
    assert [a["step"] for a in answers] == [STEP] * 4
    for answer in answers:
        (problem,) = answer["passed_over"]
        assert str(files[-1]) in problem and "fails its checksum" in problem
        assert problem.startswith(f"step {STEP + 1}: ")
    # With the older one gone as well the attempt fails, for what is wrong with the planned step.
    manifest = plan.older[0].manifest_uri.removeprefix("file://")
    Path(manifest).unlink()
    kinds = sorted(a["kind"] for a in nodes.restore(plan, 2))
    assert kinds == ["CHECKPOINT_CORRUPT", "COLLECTIVE", "COLLECTIVE", "COLLECTIVE"]


async def test_another_manifest_than_the_committed_one_is_refused(
    nodes: TwoNodes, stack: ExitStack
) -> None:
    plan = await nodes.plan(2, sealed=False)
    nodes.daemons[1].stop(signal.SIGKILL)
    nodes.daemons[1] = stack.enter_context(DaemonProcess(nodes.folder, "n2"))
    plan.manifest_xxh3 = "0" * 32
    answers = nodes.restore(plan, 2)
    assert {a["kind"] for a in answers} == {"CHECKPOINT_CORRUPT"}
    assert all("is not the manifest that was committed" in a["problem"] for a in answers)


async def test_memory_that_is_lost_and_stored_nowhere_is_no_fault_of_the_job(
    nodes: TwoNodes, stack: ExitStack
) -> None:
    nodes.daemons[1].stop(signal.SIGKILL)
    nodes.daemons[1] = stack.enter_context(DaemonProcess(nodes.folder, "n2"))
    source = types_pb2.RESTORE_SOURCE_MEMORY
    plan = link_pb2.RestorePlan(source=source, step=STEP, written_by_attempt=1)
    answers = nodes.restore(plan, 2)
    assert [a["kind"] for a in answers] == ["COLLECTIVE"] * 2 + ["OTHER"] * 2
    assert "is not sealed here" in answers[3]["problem"]


def test_a_checkpoint_of_another_model_is_refused_by_all_ranks(
    tmp_path: Path, stack: ExitStack, pool: RankPool
) -> None:
    wider = {**MODEL, "vocab_size": 139}
    written = trainer_layouts(wider, {"dp": 1})
    values = {p.name: np.zeros(p.global_shape, np.float32) for p in written[0].pieces}
    uri = write_checkpoint(tmp_path / "checkpoints", written, values)
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    answers = pool.run(
        "tests.harness.restoring:restore_rank",
        2,
        tmp_path / "restore",
        model=MODEL,
        parallelism={"tp": 2},
        sockets=[str(daemon.socket)] * 2,
        plan={"source": "storage", "step": 10, "written_by_attempt": 0, "manifest_uri": uri},
        attempt=1,
    )
    assert [a["kind"] for a in answers] == ["BAD_JOB"] * 2, answers
    assert answers[0]["problem"] == answers[1]["problem"]
    assert answers[0]["problem"].startswith(f"trainer.model: checkpoint {uri.rpartition('/')[0]}")
    assert "(139, 32) there and float32 (131, 32) here" in answers[0]["problem"]


def test_the_kernel_counts_each_byte_of_storage_once(
    tmp_path: Path, stack: ExitStack, pool: RankPool
) -> None:
    """As /proc has it: all that the daemon read, headers and manifests and requests among it."""
    model = {**MODEL, "hidden_size": 256, "vocab_size": 4096}
    written, wanted = trainer_layouts(model, {"dp": 4}), trainer_layouts(model, {"tp": 4})
    random = np.random.default_rng(0)
    shapes = {piece.name: piece.global_shape for layout in written for piece in layout.pieces}
    values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    plan = {
        "source": "storage",
        "step": 10,
        "written_by_attempt": 0,
        "manifest_uri": write_checkpoint(tmp_path / "checkpoints", written, values),
    }
    daemon = stack.enter_context(DaemonProcess(tmp_path, "n0"))
    before = bytes_read(daemon.process.pid)
    answers = pool.run(
        "tests.harness.restoring:restore_rank",
        4,
        tmp_path / "restore",
        model=model,
        parallelism={"tp": 4},
        sockets=[str(daemon.socket)] * 4,
        plan=plan,
        attempt=1,
    )
    read = bytes_read(daemon.process.pid) - before
    assert [a["digest"] for a in answers] == [digest(image_of(layout, values)) for layout in wanted]
    distinct = sum(p.size_bytes for layout in written for p in layout.pieces if p.primary)
    assert sum(a["read_bytes"] for a in answers) == distinct
    assert distinct < read < 1.05 * distinct, "each rank alone reads all: 4 times"
    assert set(answers[0]["timeline"]) >= {
        "look",
        "others",
        "open",
        "index",
        "plan",
        "read",
        "exchange",
    }


def bytes_read(pid: int) -> int:
    """What a process has read so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
