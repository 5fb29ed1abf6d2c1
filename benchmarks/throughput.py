"""Tokens per second, step-time spread, both MFUs and memory of the trainer on this machine's devices.

Forks one process per rank, trains on random tokens, and prints one line of figures (or JSON):

    python benchmarks/throughput.py --preset tiny --tp 2 --pp 2 --dp 2 --device cpu
    python benchmarks/throughput.py --preset 1b --tp 2 --pp 2 --device cuda --seq 2048 --micro-batch 4 --global-batch 64
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from megascale_common import flops
from megascale_common.job_config import JobConfig, from_dict
from megascale_executor.trainer.batch import MicroBatch
from megascale_executor.trainer.groups import create_groups
from megascale_executor.trainer.step import Trainer

# layers, hidden size, heads, vocabulary, sequence, micro-batch, global batch
PRESETS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "tiny": (4, 128, 4, 512, 128, 2, 16),
    "1b": (16, 2048, 16, 51200, 2048, 4, 64),
    "7b": (32, 4096, 32, 51200, 2048, 4, 128),
}
WARMUP_STEPS = 3
TIMEOUT_S = 300.0


def job(arguments: argparse.Namespace) -> JobConfig:
    """The job of the arguments, preset values where none is given."""
    layers, hidden, heads, vocabulary, sequence, micro, batch = PRESETS[arguments.preset]
    return from_dict(
        {
            "name": f"throughput-{arguments.preset}",
            "model": {
                "layers": layers,
                "hidden_size": hidden,
                "heads": heads,
                "vocab_size": vocabulary,
                "sequence_length": arguments.seq or sequence,
                "block": arguments.block,
            },
            "parallelism": {
                "tp": arguments.tp,
                "pp": arguments.pp,
                "dp": arguments.dp,
                "virtual_stages": arguments.vpp,
                "recompute": arguments.recompute,
            },
            "training": {
                "steps": arguments.steps,
                "global_batch_size": arguments.global_batch or batch,
                "micro_batch_size": arguments.micro_batch or micro,
                "precision": "bf16" if arguments.device == "cuda" else "fp32",
                "deterministic": arguments.deterministic,
            },
        }
    )


def run_rank(config: JobConfig, rank: int, port: int, device: torch.device) -> dict[str, Any]:
    """Train and time the steps of one rank; every step is read at once, so its time is the device's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = config.layout.world_size
    store = TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=TIMEOUT_S))
    ring = config.parallelism.virtual_stages > 1
    groups = create_groups(config.layout, rank, store, device, timeout_s=TIMEOUT_S, ring=ring)
    trainer = Trainer(config, rank, groups, device)
    trainer.initialise()
    random = np.random.default_rng(config.layout.coordinates(rank).dp)
    batches = [_random_batch(config, random).to(device) for _ in range(config.micro_batches)]
    times, loss = [], 0.0
    for _ in range(config.training.steps):
        start = time.perf_counter()
        loss = trainer.train_step(batches).read().loss
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"times_s": times[WARMUP_STEPS:], "loss": loss, "memory_gib": memory / 2**30}


def _random_batch(config: JobConfig, random: np.random.Generator) -> MicroBatch:
    shape = (config.training.micro_batch_size, config.model.sequence_length)
    tokens = random.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1))
    return MicroBatch.from_numpy(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_weight": np.ones(shape, np.float32),
            "position": np.broadcast_to(np.arange(shape[1]), shape),
            "document_start": np.zeros(shape, np.int32),
        }
    )


def main() -> int:
    """Fork the ranks, collect rank 0's figures, print them."""
    arguments = _parser().parse_args()
    config = job(arguments)
    world = config.layout.world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    read, write = os.pipe()
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
                figures = run_rank(config, rank, port, device)
                if rank == 0:
                    os.write(write, json.dumps(figures).encode())
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    failed = [status for pid in children if (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))]
    if failed or not text:
        print(f"{len(failed)} of {world} ranks failed", file=sys.stderr)
        return 1
    _report(arguments, config, json.loads(text))
    return 0


def _report(arguments: argparse.Namespace, config: JobConfig, figures: dict[str, Any]) -> None:
    times = sorted(figures["times_s"])
    median = statistics.median(times)
    world = config.layout.world_size
    tokens_per_s = config.training.global_batch_size * config.model.sequence_length / median
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "cpu"
    mfu = flops.mfu(config.model, tokens_per_s, world, name)
    result = {
        "preset": arguments.preset,
        "device": name,
        "tp": arguments.tp,
        "pp": arguments.pp,
        "dp": arguments.dp,
        "vpp": arguments.vpp,
        "recompute": arguments.recompute,
        "block": arguments.block,
        "sequence_length": config.model.sequence_length,
        "micro_batch_size": config.training.micro_batch_size,
        "global_batch_size": config.training.global_batch_size,
        "tokens_per_s_per_device": round(tokens_per_s / world, 1),
        "step_time_s": {"median": median, "min": times[0], "max": times[-1], "steps": len(times)},
        "mfu_causal": mfu.exact if mfu else None,
        "mfu_full": mfu.full if mfu else None,
        "memory_gib": round(figures["memory_gib"], 2),
        "loss": figures["loss"],
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:>24}  {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.device_count() else "cpu")
    for axis in ("tp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages per pipeline stage (interleaved 1F1B)")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--seq", type=int, default=0, help="sequence length in tokens (default: the preset's)")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences in a micro-batch")
    parser.add_argument("--global-batch", type=int, default=0, help="sequences in a step over all ranks")
    parser.add_argument("--block", choices=["parallel", "serial"], default="parallel")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help=f"steps, of which {WARMUP_STEPS} are warm-up")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
