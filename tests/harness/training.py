"""Small training runs for tests: a tiny model, synthetic batches, and programs of a rank."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.harness.waiting import CALL_TIMEOUT_S, until
from torch._C._distributed_c10d import FileStore

from megascale_common.node.status_page import StatusPageWriter, read_status_page
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import parameter_table
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import Groups
from megascale_trainer.parallel.pipeline.peer_edges import connect_edges
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.trainer import StepResult, Trainer

CPU = torch.device("cpu")
# Fields of the model of :func:`tiny_job` with which its layers have experts, the first one aside.
EXPERTS: dict[str, Any] = {
    "block": "serial",
    "mlp": "swiglu",
    "bias": False,
    "experts": {
        "count": 8,
        "top_k": 2,
        "ffn_size": 32,
        "shared_ffn_size": 24,
        "dense_layers": 1,
        "bias_rate": 0.01,
    },
}
GROUP_TIMEOUT_S = CALL_TIMEOUT_S


def tiny_job(
    *,
    model: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """Plain values of a job of some 0.2 M parameters; arguments override fields of sections.

    Nothing is fused, overlapped or launched from graphs, on GPUs either, unless it is asked for.
    """
    base: dict[str, Any] = {
        "name": "tiny",
        "model": {
            "layers": 4,
            "hidden_size": 64,
            "heads": 4,
            "vocab_size": 300,
            "sequence_length": 32,
            "bias": True,
        },
        "training": {
            "steps": 20,
            "global_batch_size": 8,
            "precision": "fp32",
            "kernels": "torch",
            "cuda_graphs": False,
        },
        "schedule": {"warmup_steps": 3},
        "optimizer": {"learning_rate": 3e-3},
        "loss": {"z_loss": 1e-3},
    }
    sizes = {**hiding(), **(parallelism or {})}
    overrides = {"model": model or {}, "parallelism": sizes, **sections}
    return {
        **base,
        **{name: {**base.get(name, {}), **fields} for name, fields in overrides.items()},
    }


def hiding(*axes: str) -> dict[str, Any]:
    """The field of ``parallelism`` that overlaps these dimensions alone."""
    return {"overlap": {axis: axis in axes for axis in ("tp", "pp", "dp", "peer_edges")}}


def sample(config: JobConfig, index: int) -> dict[str, np.ndarray[Any, Any]]:
    """Sample ``index`` of an endless synthetic corpus.

    It holds packed documents of random length, with weights in {0, 0.5, 1}.

    Tokens follow a noisy arithmetic rule, so that a model can learn them.
    """
    length = config.model.sequence_length
    random = np.random.default_rng((17, index))
    starts = np.flatnonzero(random.random(length) < 0.12)
    start = np.zeros(length, dtype=np.int64)
    for begin in starts:
        start[begin:] = begin
    tokens = (
        np.cumsum(random.integers(1, 4, length + 1)) + random.integers(0, 50)
    ) % config.model.vocab_size
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "loss_weight": random.choice(np.array([0.0, 0.5, 1.0], dtype=np.float32), length),
        "position": np.arange(length) - start,
        "document_start": start,
    }


def micro_batches(
    config: JobConfig, step: int, dp_rank: int, device: torch.device = CPU
) -> list[MicroBatch]:
    """The micro-batches of one replica: the global batch's samples in order, cut into blocks."""
    training, size = config.training, config.training.micro_batch_size
    per_replica = training.global_batch_size // config.parallelism.dp
    first = step * training.global_batch_size + dp_rank * per_replica
    batches = []
    for low in range(first, first + per_replica, size):
        rows = [sample(config, index) for index in range(low, low + size)]
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batches.append(MicroBatch.from_numpy(arrays).to(device))
    return batches


def train(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Program of one rank: train ``steps`` steps and return the records.

    Initial and final values are left in files.
    """
    trainer = start(from_accepted(job), rank, world_size, folder)
    _save(folder / f"initial-{rank}.npz", pieces_of(trainer))
    results = [step(trainer, rank) for _ in range(steps)]
    records = [asdict(result.read()) for result in results]
    _save(folder / f"final-{rank}.npz", pieces_of(trainer))
    destroy_groups()
    return {"records": records}


def train_each(
    rank: int, world_size: int, folder: Path, *, jobs: list[dict[str, Any]], steps: int
) -> list[list[dict[str, Any]]]:
    """Program of one rank: :func:`train` of jobs of one layout, through the same groups.

    Values of job n are left in the folder ``n``.
    """
    groups = _groups(from_accepted(jobs[0]), rank, folder)
    found = []
    for number, job in enumerate(jobs):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        trainer = Trainer(from_accepted(job), rank, groups, device_of(rank))
        trainer.initialise()
        _save(place / f"initial-{rank}.npz", pieces_of(trainer))
        results = [step(trainer, rank) for _ in range(steps)]
        found.append([asdict(result.read()) for result in results])
        trainer.settle()
    destroy_groups()
    return found


def peaks_of_memory(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, int]:
    """Program of one rank: the most bytes that were allocated by the end of the construction of a
    trainer, and by the end of its second step.
    """
    groups, device = _groups(from_accepted(job), rank, folder), device_of(rank)
    torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(from_accepted(job), rank, groups, device)
    constructed = torch.cuda.max_memory_allocated(device)
    trainer.initialise()
    for _ in range(2):
        step(trainer, rank).read()
    trained = torch.cuda.max_memory_allocated(device)
    destroy_groups()
    return {"constructed": constructed, "trained": trained}


def train_and_resume(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int = 3
) -> dict[str, Any]:
    """Program of one rank: ``steps`` steps, as many more, and these again from a slot of the first.

    The repetition runs in a trainer of its own.
    """
    config = from_accepted(job)
    assert config.layout.world_size == world_size
    groups, device = _groups(config, rank, folder), device_of(rank)
    first = Trainer(config, rank, groups, device)
    first.initialise()
    for _ in range(steps):
        step(first, rank)
    slot = torch.zeros(first.state.shard_layout().slot_bytes, dtype=torch.uint8, device=device)
    first.state.state_copy_to(slot)
    uninterrupted = [step(first, rank).read().loss for _ in range(steps)]
    second = Trainer(config, rank, groups, device)
    second.state.load_from(slot)
    second.finish_load(steps)
    resumed = [step(second, rank).read().loss for _ in range(steps)]
    equal = all(
        torch.equal(state, second.state.states()[name])
        for name, state in first.state.states().items()
    )
    destroy_groups()
    return {"uninterrupted": uninterrupted, "resumed": resumed, "states_equal": equal}


def train_in_several_ways(
    rank: int, world_size: int, folder: Path, *, jobs: list[dict[str, Any]], lag_cycles: int = 0
) -> list[list[str]]:
    """Program of one rank: jobs of one layout, one after another through the same groups.

    Each takes a step, evaluates, has replica 0 bring a NaN to its second step, and takes two more.
    Returns of each job what was found, exact to the last bit: records, evaluation and the digest of
    the final states. ``lag_cycles`` (CUDA) hold the device back before each step, so that the host
    is far ahead and nothing but events orders the streams.
    """
    assert from_accepted(jobs[0]).layout.world_size == world_size
    groups = _groups(from_accepted(jobs[0]), rank, folder)
    found = []
    for job in jobs:
        config = from_accepted(job)
        dp_rank = config.layout.coordinates(rank).dp
        trainer = Trainer(config, rank, groups, device_of(rank))
        trainer.initialise()
        results, evaluation = [], 0.0
        for number in range(4):
            batches = micro_batches(config, number, dp_rank, device_of(rank))
            if number == 1:
                evaluation = trainer.evaluate([batches])
                batches[-1].loss_weight[0, 0] = 1.0 if dp_rank else float("nan")
            if lag_cycles:
                torch.cuda._sleep(lag_cycles)  # type: ignore[no-untyped-call]
            results.append(trainer.train_step(batches))
        trainer.settle()
        states = b"".join(
            state.cpu().numpy().tobytes() for state in trainer.state.states().values()
        )
        digest = hashlib.sha256(states).hexdigest()
        found.append([*(repr(result.read()) for result in results), repr(evaluation), digest])
    destroy_groups()
    return found


def train_with_a_broken_replica(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, Any]:
    """Program of one rank: three steps, with a NaN in replica 1's second batch; rank r votes r."""
    config = from_accepted(job)
    trainer = start(config, rank, world_size, folder)
    dp_rank = config.layout.coordinates(rank).dp
    records = [step(trainer, rank).read()]
    before = trainer.state.states()["master"].clone()
    batches = micro_batches(config, 1, dp_rank, device_of(rank))
    if dp_rank == 1:
        batches[0].loss_weight[0, 0] = float("nan")
    records.append(trainer.train_step(batches, vote=rank).read())
    unchanged = torch.equal(trainer.state.states()["master"], before)
    records.append(step(trainer, rank).read())
    destroy_groups()
    return {
        "skipped": [record.skipped for record in records],
        "votes": [record.votes for record in records],
        "loss": [records[0].loss, records[2].loss],
        "unchanged": unchanged,
    }


def status_rows(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """Program of one rank: one step; returns what each row of its page entered and completed."""
    config = from_accepted(job)
    assert config.layout.world_size == world_size
    path = folder / f"status-{rank}"
    status = StatusPageWriter(path, rank=rank, attempt=1)
    groups = _groups(config, rank, folder, status)
    trainer = Trainer(config, rank, groups, device_of(rank), status)
    trainer.initialise()
    trainer.settle()
    before = _rows(path)
    step(trainer, rank).read()
    trainer.settle()
    groups.poll()
    destroy_groups()
    return {
        name: (after[0] - before[name][0], after[1] - before[name][1])
        for name, after in _rows(path).items()
    }


def posted_receive_rows(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, Any]:
    """Program of one rank: stage 0 sends one activation, stage 1 posts its receive and waits.

    Returns stage 1's row before, in between and after.
    """
    path, config = folder / f"status-{rank}", from_accepted(job)
    groups = _groups(config, rank, folder, StatusPageWriter(path, rank=rank, attempt=1))
    connect_edges(config, groups.edges, rank, torch.float32, device_of(rank))
    values = torch.full((4,), 7.0 * (1 - rank), device=device_of(rank))
    if groups.edges.activation_in is None:
        assert groups.edges.activation_out is not None
        groups.edges.activation_out.send(values).wait()
        groups.world.all_reduce(torch.zeros(1, device=device_of(rank)))
        destroy_groups()
        return {}
    name, found = groups.edges.activation_in.name, {"before": _rows(path)}
    receive = groups.edges.activation_in.post_receive(values)
    found["posted"] = _rows(path)
    received = receive.wait().tolist()
    groups.poll()
    found["waited"] = _rows(path)
    groups.world.all_reduce(torch.zeros(1, device=device_of(rank)))
    destroy_groups()
    return {"received": received, **{when: rows[name] for when, rows in found.items()}}


def page_of_a_busy_device(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, Any]:
    """Program of one rank (CUDA): two sums over dp, the device long busy before the second.

    Returns the row then and after.
    """
    path = folder / f"status-{rank}"
    groups = _groups(from_accepted(job), rank, folder, StatusPageWriter(path, rank=rank, attempt=1))
    values = torch.ones(4, device=device_of(rank))
    groups.dp.all_reduce(values)
    torch.cuda._sleep(3_000_000_000)  # type: ignore[no-untyped-call]
    groups.dp.all_reduce(values)
    time.sleep(0.3)
    groups.poll()
    busy = _rows(path)["dp"]
    torch.cuda.synchronize()
    groups.poll()
    assert groups.dp.handle is not None
    backend: Any = groups.dp.handle._get_backend(values.device)
    found = {
        "busy": busy,
        "done": _rows(path)["dp"],
        "goes_first": backend.options.is_high_priority_stream,
    }
    destroy_groups()
    return found


def stall(rank: int, world_size: int, folder: Path, *, job: dict[str, Any]) -> dict[str, Any]:
    """Program of one rank: the last stalls until the others have ended, who report their wait."""
    config = from_accepted(job)
    groups = _groups(config, rank, folder, timeout_s=2.0)
    trainer = Trainer(config, rank, groups, device_of(rank))
    trainer.initialise()
    begin, error = time.monotonic(), ""
    ended = [folder / f"ended-{other}" for other in range(world_size - 1)]
    if rank == world_size - 1:
        until(lambda: all(path.exists() for path in ended), "the others' ends")
    else:
        try:
            step(trainer, rank).read()
        except RuntimeError as failure:
            error = str(failure)
        ended[rank].touch()
    return {"waited_s": time.monotonic() - begin, "error": error}


def step_without_sync(
    rank: int, world_size: int, folder: Path, *, jobs: list[dict[str, Any]]
) -> int:
    """Program of one rank (CUDA): of each job a step in which a host sync is an error.

    A warm step goes before it. The jobs are of one layout. The error ends the rank, with the place
    in its traceback. Returns the number of jobs.
    """
    groups = _groups(from_accepted(jobs[0]), rank, folder)
    for job in jobs:
        trainer = Trainer(from_accepted(job), rank, groups, device_of(rank))
        trainer.initialise()
        step(trainer, rank).read()
        batches = micro_batches(
            trainer.config, 1, trainer.config.layout.coordinates(rank).dp, device_of(rank)
        )
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        result = trainer.train_step(batches)
        torch.cuda.set_sync_debug_mode("default")
        result.read()
        trainer.settle()
    destroy_groups()
    return len(jobs)


def train_then_choose_alike(
    rank: int, world_size: int, folder: Path, *, jobs: list[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Program of one rank: of each job four steps, and two after its routers became zero.

    Then all experts have the same score, so every token chooses the first ones. Records have the
    loads of the step before: those of the last one are the loads after the change.
    """
    groups = _groups(from_accepted(jobs[0]), rank, folder)
    found = []
    for job in jobs:
        trainer = Trainer(from_accepted(job), rank, groups, device_of(rank))
        trainer.initialise()
        results = [step(trainer, rank) for _ in range(4)]
        trainer.settle()
        table = parameter_table(trainer.config, rank)
        for owned, piece, start, stop in table.overlaps():
            if piece.name.endswith("router.weight"):
                first = owned.shard_offset - owned.start
                trainer.state.master[first + start : first + stop].zero_()
        trainer.finish_load(trainer.step)
        results += [step(trainer, rank) for _ in range(2)]
        found.append([asdict(result.read()) for result in results])
        trainer.settle()
    destroy_groups()
    return found


def snapshot_beside_a_step(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any]
) -> dict[str, Any]:
    """Program of one rank (CUDA): a slow copy of the states beside the next step."""
    trainer = start(from_accepted(job), rank, world_size, folder)
    step(trainer, rank).read()
    before = trainer.state.states()["master"].clone()
    slot = torch.zeros(trainer.state.shard_layout().slot_bytes, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # about a second: far longer than the step
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        trainer.state.state_copy_to(slot)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(side)
    trainer.state.wait_before_update(copied)
    step(trainer, rank).read()
    torch.cuda.synchronize()
    copy = slot[: before.numel() * 4].view(torch.float32)
    return {
        "copied_what_was": torch.equal(copy, before.cpu()),
        "went_on": not torch.equal(trainer.state.states()["master"], before),
    }


def start(config: JobConfig, rank: int, world_size: int, folder: Path) -> Trainer:
    """A trainer with its initial values, whose groups meet in ``folder``."""
    assert config.layout.world_size == world_size
    trainer = Trainer(config, rank, _groups(config, rank, folder), device_of(rank))
    trainer.initialise()
    return trainer


def step(trainer: Trainer, rank: int) -> StepResult:
    """The trainer's next step on its own part of the synthetic corpus."""
    dp_rank = trainer.config.layout.coordinates(rank).dp
    return trainer.train_step(micro_batches(trainer.config, trainer.step, dp_rank, device_of(rank)))


def _groups(
    config: JobConfig,
    rank: int,
    folder: Path,
    status: StatusPageWriter | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> Groups:
    ring = config.parallelism.virtual_stages > 1
    store = FileStore(str(folder / "store"), config.layout.world_size)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    return create_groups(
        config.layout,
        rank,
        Rendezvous(store, device_of(rank), timeout_s, status),
        ring=ring,
        tied=config.model.tie_embeddings,
        experts=config.model.experts.count > 0,
    )


def _rows(path: Path) -> dict[str, tuple[int, int]]:
    page = read_status_page(path)
    assert page is not None
    return {row.name: (row.entered, row.completed) for row in page.rows}


def device_of(rank: int) -> torch.device:
    """GPU ``rank`` where there is CUDA, else the CPU."""
    if not torch.cuda.is_available():
        return CPU
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _save(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def pieces_of(trainer: Trainer, state: str = "master") -> dict[str, np.ndarray[Any, Any]]:
    """The rank's primary pieces of a state, keyed ``name|flattened global start``."""
    values = trainer.state.states()[state].cpu().numpy()
    found = {}
    for piece in trainer.state.shard_layout().pieces:
        if piece.state == "master" and piece.primary:
            columns = int(np.prod(piece.global_shape[1:]))
            start = piece.start[0] * columns + piece.flat_start
            offset = piece.slot_offset_bytes // 4
            found[f"{piece.name}|{start}"] = values[
                offset : offset + piece.flat_stop - piece.flat_start
            ].copy()
    return found


def assemble(folder: Path, kind: str, world_size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Whole flattened parameters from the files that :func:`train` left; every value exactly once.

    Raises:
        AssertionError: pieces overlap or leave a gap.
    """
    pieces: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for rank in range(world_size):
        with np.load(folder / f"{kind}-{rank}.npz") as file:
            for key in file.files:
                name, start = key.split("|")
                assert int(start) not in pieces.setdefault(name, {}), f"{key} is held twice"
                pieces[name][int(start)] = file[key]
    whole = {}
    for name, parts in pieces.items():
        end = 0
        for start in sorted(parts):
            assert start == end, f"{name}: gap or overlap at {start}"
            end = start + parts[start].size
        whole[name] = np.concatenate([parts[start] for start in sorted(parts)])
    return whole


def evaluate(rank: int, world_size: int, folder: Path, *, job: dict[str, Any]) -> dict[str, Any]:
    """Program of one rank: evaluations and steps in turn, of the batches of steps 1 and 2."""
    trainer = start(from_accepted(job), rank, world_size, folder)
    dp_rank = trainer.config.layout.coordinates(rank).dp
    batches = [
        micro_batches(trainer.config, number, dp_rank, device_of(rank)) for number in range(2)
    ]
    first = [trainer.evaluate(batches[:1]), trainer.evaluate(batches)]
    losses = [trainer.train_step(batch).read().loss for batch in batches]
    after = trainer.evaluate(batches)
    again = trainer.evaluate(batches)
    destroy_groups()
    return {"before": first, "losses": losses, "after": after, "again": again}
