"""Times of the tensor-parallel products of one layer: product, collective, one after the other, and
overlapped.

One process per device, started by torchrun; a CPU runs it dry, with everything made smaller:

    torchrun --nproc-per-node 8 benchmarks/tensor_overlap.py
    torchrun --nproc-per-node 2 benchmarks/tensor_overlap.py --device cpu --shrink 32 --repeats 2

Each model's input projection (all-gather, then product) and output projection (product, then
reduce-scatter) of the parallel block has the widths of one rank at the model's own tp, whatever the
number of ranks. "pull" and "push" move what the collective moves by copies between peer memories,
with two barriers and without a product. Overlapped columns say into how many steps the peers' rows
are cut. A figure is the
slowest rank's, the median of rounds, in milliseconds; the JSON lines, one per shape as it is
measured, have the least and the most as well. Data are random: zeros would flatter a product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.peer_memory import PeerMemory, open_peer_memory, why_unreachable
from megascale_kernels.overlap.row_transfers import region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.matmul import PlainMatmuls, gather, reduce_scatter

# hidden size, sequence, micro-batch, one rank's width of the merged input projection and of the
# merged output one
MODELS: dict[str, tuple[int, int, int, int, int]] = {
    "7b": (4096, 2048, 4, 14336, 10240),
    "13b": (5120, 2048, 4, 17920, 12800),
    "30b": (7168, 4096, 2, 6272, 4480),
    "175b": (12288, 2048, 4, 10752, 7680),
}
CHUNKS = (1, 2, 4, 8)
TIMEOUT_S = 120.0
Run = Callable[[], object]


def main() -> None:
    """Measure all shapes; rank 0 prints a JSON line for each as it comes, and the table."""
    arguments = _parser().parse_args()
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.group.WORLD
    assert world is not None
    if reason := why_unreachable(world, device):
        raise SystemExit(f"nothing to overlap: {reason}")
    tp = Group("tp", tuple(range(dist.get_world_size())), dist.get_rank(), world, None)
    torch.manual_seed(tp.index)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {
        "device": name,
        "ranks": tp.size,
        "torch": torch.__version__,
        "shrink": arguments.shrink,
    }
    found = []
    for model in arguments.models:
        for row in _measure(model, tp, device, arguments):
            if tp.index == 0:
                print(json.dumps({**about, **row}), flush=True)
            found.append(row)
    if tp.index == 0:
        _report(found, about)
    dist.destroy_process_group()


def _measure(
    model: str, tp: Group, device: torch.device, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Both projections of a model."""
    sizes = MODELS[model]
    hidden, sequence, width_in, width_out = (sizes[i] // arguments.shrink for i in (0, 1, 3, 4))
    sequence = max(sequence // tp.size, 1) * tp.size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    whole = random(sequence, sizes[2], hidden)
    part = whole[: sequence // tp.size].clone()
    wide = random(sequence, sizes[2], width_out)
    into, out_of = random(width_in, hidden).t(), random(width_out, hidden)
    assert tp.handle is not None
    memory = open_peer_memory(tp.handle, region_bytes(whole.nbytes), device, timeout_s=TIMEOUT_S)
    # one memory for all of them: each has ended on all ranks before the next is measured
    plain, overlapped = (
        PlainMatmuls(tp),
        {number: CollectiveMatmuls(memory, number) for number in arguments.chunks},
    )
    gathering: dict[str, Run] = {
        "product": lambda: torch.matmul(whole, into),
        "collective": lambda: gather(part, tp),
        "pull": lambda: _copy_all(memory, part, whole, pull=True),
        "push": lambda: _copy_all(memory, part, whole, pull=False),
        "sequential": lambda: plain.all_gather_matmul(part, into),
        **{
            str(n): lambda n=n: overlapped[n].all_gather_matmul(part, into)
            for n in arguments.chunks
        },
    }
    scattering: dict[str, Run] = {
        **gathering,
        "product": lambda: torch.matmul(wide, out_of),
        "collective": lambda: reduce_scatter(whole, tp),
        "sequential": lambda: plain.matmul_reduce_scatter(wide, out_of),
        **{
            str(n): lambda n=n: overlapped[n].matmul_reduce_scatter(wide, out_of)
            for n in arguments.chunks
        },
    }
    tokens = sequence * sizes[2]
    shapes = (
        (f"all-gather + [{tokens} x {hidden}] x [{hidden} x {width_in}]", gathering),
        (f"[{tokens} x {width_out}] x [{width_out} x {hidden}] + reduce-scatter", scattering),
    )
    for shape, runs in shapes:
        times = {
            key: _time(run, tp, device, memory, arguments)
            for key, run in runs.items()
            if key in (arguments.ways or runs)
        }
        yield {"model": model, "shape": shape, **times}


def _copy_all(memory: PeerMemory, part: torch.Tensor, whole: torch.Tensor, *, pull: bool) -> None:
    """Move one part between this rank and each peer, in cyclic order."""
    memory.barrier()
    for step in range(1, memory.size):
        peer = (memory.rank + step) % memory.size
        if pull:
            whole[: part.shape[0]].copy_(memory.tensor_of(peer, part.shape, part.dtype))
        else:
            memory.tensor_of(peer, part.shape, part.dtype, memory.rank * part.nbytes).copy_(part)
    memory.barrier()


def _time(
    run: Run, tp: Group, device: torch.device, memory: PeerMemory, arguments: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of one run on the slowest rank: median, least and most over the rounds."""
    rounds = []
    for number in range(arguments.rounds + 1):  # the first warms up
        _wait(device)
        memory.barrier()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(arguments.repeats):
            run()
        _wait(device)
        took = torch.tensor(
            [(time.perf_counter() - begin) * 1000 / arguments.repeats], device=device
        )
        tp.all_reduce_max(took)
        if number:
            rounds.append(took.item())
    return {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    columns = list(
        dict.fromkeys(key for row in rows for key in row if key not in ("model", "shape"))
    )
    titles = [f"overlapped, {key}" if key.isdigit() else key for key in columns]
    print(
        f"| model | shape (ms; {about['ranks']} ranks, {about['device']}) | {' | '.join(titles)} |"
    )
    print("|---" * (len(columns) + 2) + "|")
    for row in rows:
        figures = [f"{row[key]['median']:.3f}" if key in row else "-" for key in columns]
        print(f"| {row['model']} | {row['shape']} | {' | '.join(figures)} |")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--chunks", nargs="+", type=int, default=list(CHUNKS))
    parser.add_argument(
        "--ways", nargs="+", help="columns to measure: their titles, chunks by number (all)"
    )
    parser.add_argument("--repeats", type=int, default=20, help="runs of a round, back to back")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one that warms up")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide widths and sequence by this (dry runs)"
    )
    return parser


if __name__ == "__main__":
    main()
