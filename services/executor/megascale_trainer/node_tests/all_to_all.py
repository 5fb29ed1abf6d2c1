"""Node test of all devices at once: an all-to-all in a process per device, gloo or NCCL.

Not every release of gloo has an all-to-all, so on a CPU pairs of sends and receives replace it.
The test checks the data and reports the bus bandwidth of each rank, (n-1)/n of its bytes over the
time (the convention of nccl-tests).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from megascale_common.node.process import arm_parent_death
from megascale_trainer.node_tests.measurement import Measured, device_of, once_s

CUDA_BYTES, CPU_BYTES = 256 << 20, 4 << 20
TIMEOUT_S = 20.0
_REPEATS = 5


def all_to_all(kind: str, devices: Sequence[int], budget_s: float) -> list[Measured]:
    """GB/s of each rank. Call it before CUDA is used: the ranks are forked from this process.

    ``budget_s`` is ignored, because every rank must make the same number of calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        parent, children = os.getpid(), []
        for rank in range(len(devices)):
            pid = os.fork()
            if pid == 0:
                arm_parent_death(expected_parent_pid=parent)
                _child(kind, devices, rank, Path(folder))
            children.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        return [
            _answer(Path(folder) / f"{rank}.json", f"{kind}:{devices[rank]}", status)
            for rank, status in enumerate(statuses)
        ]


def _answer(path: Path, target: str, status: int) -> Measured:
    if status == 0 and path.exists():
        return Measured(**json.loads(path.read_text()))
    problem = path.read_text() if path.exists() else f"the rank ended with status {status}"
    return Measured(target=target, value=None, unit="GB/s", wrong=problem)


def _child(kind: str, devices: Sequence[int], rank: int, folder: Path) -> None:
    """Body of a rank; never returns."""
    status = 1
    try:
        found = _exchange(kind, devices, rank, folder)
        (folder / f"{rank}.json").write_text(json.dumps(asdict(found)))
        status = 0
    except Exception as error:
        # Any error of the device or the library is the result of the test.
        (folder / f"{rank}.json").write_text(f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(status)


def _exchange(kind: str, devices: Sequence[int], rank: int, folder: Path) -> Measured:
    world, device = len(devices), device_of(kind, devices[rank])
    if kind == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        store=FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=None if kind == "cpu" else device,
    )
    size = (CUDA_BYTES if kind == "cuda" else CPU_BYTES) // 4 // world * world
    sent = torch.full((size,), float(rank), device=device)
    received = torch.empty_like(sent)

    def work() -> None:
        if kind == "cuda":
            dist.all_to_all_single(received, sent)
        else:
            _by_pairs(received, sent, rank, world)

    # Each call comes after a barrier, so that a late rank does not count in the others' times.
    durations_s = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        durations_s.append(once_s(work, device))
    elapsed_s = statistics.median(durations_s[1:])
    expected = torch.arange(world, device=device, dtype=torch.float32)
    wrong = int((received.view(world, -1) != expected[:, None]).sum())
    dist.barrier()
    rate = size * 4 * (world - 1) / world / elapsed_s / 1e9
    return Measured(
        target=f"{kind}:{devices[rank]}",
        value=rate,
        unit="GB/s",
        target_class=f"{world} ranks",
        detail=f"{size * 4 >> 20} MiB among {world} ranks in {elapsed_s * 1e3:.2f} ms",
        wrong=f"{wrong} of {size} elements are wrong" if wrong else "",
    )


def _by_pairs(received: torch.Tensor, sent: torch.Tensor, rank: int, world: int) -> None:
    theirs, ours = received.view(world, -1), sent.view(world, -1)
    theirs[rank].copy_(ours[rank])
    requests = []
    for other in range(world):
        if other != rank:
            requests.append(dist.isend(ours[other], other))
            requests.append(dist.irecv(theirs[other], other))
    for request in requests:
        assert request is not None
        request.wait()
