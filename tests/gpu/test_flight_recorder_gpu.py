"""A real dump of NCCL's flight recorder on two GPUs: the rank that did not enter is named."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from megascale_common.node.files import AttemptFolder
from megascale_driver.analysis import flight_recorder
from megascale_executor.agent.workers import evidence
from megascale_trainer.process import flight_dump

pytestmark = pytest.mark.gpu
FOUND_WITHIN_S = 60.0


def _rank(rank: int, port: int, folder: str) -> None:
    """Three all-reduces on both ranks, a fourth on rank 0 alone; then both stand still."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    files = AttemptFolder(Path(folder))
    recorded = flight_dump.recorder(device)
    assert recorded is not None, f"torch {torch.__version__} has no {flight_dump.NAME}"
    flight_dump.answer(files.flight_request(rank), files.flight_dump(rank), recorded)
    tensor = torch.ones(1024, device=device)
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(tensor)
    (files.path / f"{rank}.still").touch()  # no name of a dump
    if rank == 0:
        torch.cuda.synchronize()  # hangs: its wait is outside the interpreter lock
    time.sleep(600)


async def test_the_rank_that_did_not_enter_a_collective_is_named(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = processes.spawn(_rank, (port, str(tmp_path)), nprocs=2, join=False)
    try:
        until_s = time.monotonic() + 120
        while not all((tmp_path / f"{rank}.still").exists() for rank in (0, 1)):
            assert time.monotonic() < until_s, "the ranks do not meet"
            context.join(timeout=0.2)  # raises what a rank has raised
        await asyncio.sleep(2)  # torch looks once a second what has completed
        asked = evidence.request_dumps(AttemptFolder(tmp_path), (0, 1))
        began_s = time.monotonic()
        assert await evidence.written_dumps(asked, FOUND_WITHIN_S) == asked
        took_s = time.monotonic() - began_s
        sizes = [path.stat().st_size for path in asked.values()]
        print(f"dumps after {took_s:.2f} s, {sizes} bytes")
        found = flight_recorder.verdict(flight_recorder.read_folder(tmp_path))
        assert found.culprits == (1,), found
        assert "all_reduce 4" in found.sentence
        assert took_s < evidence.WAIT_S
    finally:
        for process in context.processes:
            process.kill()
            process.join()
