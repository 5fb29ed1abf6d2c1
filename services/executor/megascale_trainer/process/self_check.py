"""Self-check of a device and of the path between ranks, of one node or of a group of nodes.

It runs in a process forked for it, where a worker would run: same template, same device index, same
library versions. It multiplies matrices whose exact product is known, then all-reduces among the
ranks of the check a vector whose exact sum is known (MegaScale section 4.3, the intra-node tests
and the tests of neighbours). The agent reads the answer; see SelfCheck in
:mod:`megascale_common.node.messages`.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megascale_common.node import framing
from megascale_common.node.messages import SelfCheck, SelfChecked, SelfCheckResult
from megascale_job.visible import counted
from megascale_trainer.process.system import pin_interface

_PERIOD = 16
_CPU_SIZE = 256
# Large enough to occupy every multiprocessor; a wrong one shows in some of the repeats.
_CUDA_SIZE = 4096
_CUDA_REPEATS = 8
_REDUCED_ELEMENTS = 1 << 16
# For the bandwidth: large enough that latency does not count.
_CPU_TIMED_ELEMENTS, _CUDA_TIMED_ELEMENTS = 1 << 19, 64 << 20
_TIMED_REPEATS = 5


def run(agent: socket.socket, message: SelfCheck, descriptors: list[int]) -> int:
    """Check as ``message`` asks and send the results; returns the exit status."""
    listen = descriptors[0] if descriptors else None
    framing.send(agent, all_reduce_check(message, listen))
    return 0


class CheckFailed(Exception):
    """A result of the device or of the path is wrong."""


def all_reduce_check(check: SelfCheck, store_listen_fd: int | None = None) -> SelfChecked:
    """Check this rank's device, then all-reduce among the ranks of the check; never raises.

    Args:
        store_listen_fd: the listening socket of the store through which the ranks meet, on rank 0.
    """
    device = _device_of(check)
    target = f"{check.device_kind}:{check.device_index}"
    results = [_timed("compute", target, lambda: check_compute(device))]
    if check.world_size > 1:
        rates: list[float] = []
        result = _timed(
            "all_reduce",
            target,
            lambda: _meet_and_reduce(check, device, store_listen_fd, rates),
        )
        if rates and result.verdict == "PASS":
            result = msgspec.structs.replace(result, bus_gb_s=rates[0])
        results.append(result)
    return SelfChecked(rank=check.rank, results=results)


def _device_of(check: SelfCheck) -> torch.device:
    if check.device_kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", check.device_index)


def check_compute(device: torch.device) -> str:
    """Multiply matrices whose product is known, and compare all of it; returns what was done.

    Values are whole numbers in float32, whose product is exact with fp32, tf32 and bf16 inputs.

    Raises:
        CheckFailed: an element of the product is wrong.
        RuntimeError: the device cannot be used.
    """
    size, repeats = (_CPU_SIZE, 1) if device.type == "cpu" else (_CUDA_SIZE, _CUDA_REPEATS)
    left, right, tile = _known_product(size)
    expected = torch.from_numpy(np.tile(tile, (size // _PERIOD, size // _PERIOD))).to(device)
    a, b = torch.from_numpy(left).to(device), torch.from_numpy(right).to(device)
    for repeat in range(repeats):
        wrong = int((a @ b != expected).sum())
        if wrong:
            raise CheckFailed(
                f"{wrong} of {counted(size * size, 'element')} of a known product are wrong "
                f"(repeat {repeat + 1})"
            )
    verb = "equals" if repeats == 1 else "equal"
    return f"{counted(repeats, 'product')} of {size}x{size} {verb} the known answer"


def _known_product(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two matrices that repeat every 16 rows or columns: their product repeats one 16 x 16 tile."""
    inner, edge = np.arange(size), np.arange(size) % _PERIOD
    left = (edge[:, None] * 5 + inner[None, :] * 3) % 7 - 3
    right = (inner[:, None] * 2 + edge[None, :] * 3) % 5 - 2
    tile = left[:_PERIOD].astype(np.int64) @ right[:, :_PERIOD].astype(np.int64)
    return left.astype(np.float32), right.astype(np.float32), tile.astype(np.float32)


def _meet_and_reduce(
    check: SelfCheck,
    device: torch.device,
    store_listen_fd: int | None,
    rates: list[float],
) -> str:
    """Check the sum and append the bus bandwidth in GB/s to ``rates``; returns what was done."""
    timeout = timedelta(seconds=check.timeout_s)
    pin_interface(check.store_host, device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = TCPStore(
        check.store_host,
        check.store_port,
        world_size=check.world_size,
        is_master=check.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=store_listen_fd if check.rank == 0 else None,
    )
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=PrefixStore("self-check", store),
        rank=check.rank,
        world_size=check.world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    pattern = torch.arange(_REDUCED_ELEMENTS, dtype=torch.float32, device=device) % 97
    values = pattern * (check.rank + 1)
    dist.all_reduce(values)
    wrong = int((values != pattern * (check.world_size * (check.world_size + 1) // 2)).sum())
    if not wrong:
        rates.append(_bus_gb_s(check.world_size, device))
    # Rank 0 holds the store and must leave last: a peer's last look-up would find a closed port.
    dist.barrier()
    if wrong:
        raise CheckFailed(f"{wrong} of {_REDUCED_ELEMENTS} elements of a known sum are wrong")
    return (
        f"sum of {_REDUCED_ELEMENTS} elements over {counted(check.world_size, 'rank')} equals "
        "the known answer"
    )


def _bus_gb_s(world_size: int, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce: 2(n-1)/n of its bytes over the median time (nccl-tests)."""
    elements = _CPU_TIMED_ELEMENTS if device.type == "cpu" else _CUDA_TIMED_ELEMENTS
    values = torch.zeros(elements, device=device)
    durations_s = []
    for _ in range(1 + _TIMED_REPEATS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append(time.perf_counter() - begin)
    moved_bytes = 2 * (world_size - 1) / world_size * elements * values.element_size()
    return moved_bytes / statistics.median(durations_s[1:]) / 1e9


def _timed(name: str, target: str, check: Callable[[], str]) -> SelfCheckResult:
    begin = time.monotonic()
    try:
        verdict, detail = "PASS", check()
    except Exception as error:
        # Any error of the device or the library is the finding.
        verdict, detail = "FAIL", f"{type(error).__name__}: {error}"[:2000]
    return SelfCheckResult(
        name=name,
        target=target,
        verdict=verdict,
        detail=detail,
        elapsed_s=time.monotonic() - begin,
    )
