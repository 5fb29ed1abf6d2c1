"""What the bar scripts share: options, how a step is timed, and the line of a result.

A peer is measured as `throughput.py` measures the trainer: the same models and batches, three steps
that warm up, CUDA events at the ends of the others, of each step the slowest rank, of those the
median; FLOP counted by the same formula.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import timing
from benchmarks.presets import PRESETS, ConfigurationRefused, Run, job, sizes
from benchmarks.sensors import Sensors, Window, shared, summary

from megascale_job.config import JobConfig
from megascale_job.sizes import flops

WARMUP_STEPS = 3
TIMEOUT_S = 120.0
SHAPE = ("preset", "layers", "tp", "pp", "vpp", "seq", "micro_batch", "global_batch", "steps")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every bar has: those of `throughput.py` of the same names."""
    found = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--preset", choices=PRESETS, default="7b")
    for name in ("layers", "seq", "micro-batch", "global-batch"):
        found.add_argument(f"--{name}", type=int, default=0, help="default: the preset's")
    for name in ("tp", "pp", "vpp"):
        found.add_argument(f"--{name}", type=int, default=1)
    found.add_argument(
        "--attention", choices=["cudnn", "flash"], default="cudnn", help="torch's backend"
    )
    found.add_argument("--steps", type=int, default=10, help=f"the first {WARMUP_STEPS} warm up")
    found.add_argument("--results", type=Path, help="add the result to this file, as a JSON line")
    found.add_argument(
        "--dry-run",
        type=int,
        default=0,
        metavar="RANKS",
        help="print what this many ranks would run",
    )
    return found


def job_of(options: argparse.Namespace, ranks: int) -> JobConfig:
    """Our job of the same shape.

    Raises:
        SystemExit: with status 2, the layout does not fit the ranks or the model.
    """
    run = Run(**{name: getattr(options, name) for name in SHAPE}, bias=True)
    try:
        return job(run, ranks, cuda=True)
    except ConfigurationRefused as refusal:
        print(f"{Path(sys.argv[0]).name}: {refusal}", file=sys.stderr)
        raise SystemExit(2) from refusal


def describe(config: JobConfig, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The configuration by the names of our own results, and ``more`` of the bar's own."""
    return {
        "preset": options.preset,
        "torch": torch.__version__,
        **sizes(config),
        "attention": options.attention,
        **more,
    }


def swiglu(config: JobConfig, multiple: int) -> JobConfig:
    """The job with SwiGLU of nearly as many weights as its GELU layer of 4 h: 8/3 h, rounded up."""
    width = -(-2 * 4 * config.model.hidden_size // 3 // multiple) * multiple
    return replace(config, model=replace(config.model, mlp="swiglu", ffn_size=width))


def connect(device: torch.device) -> None:
    """Join the other ranks, on ``device``."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=TIMEOUT_S))


def own_device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def take_times(
    step: Callable[[], Any], steps: int, device: torch.device
) -> tuple[list[float], Window | None]:
    """Seconds of each step after those that warm up, on this rank, and its device meanwhile.

    The host launches ahead if ``step`` does not wait.
    """
    gc.collect()
    gc.disable()
    with Sensors(device) as sensors:
        clock = timing.StepClock(device)
        for _ in range(steps):
            step()
            clock.lap()
        times_s = clock.times_s()[WARMUP_STEPS:]
        seen = sensors.over(sum(times_s))
    gc.enable()
    return times_s, seen


def result(
    config: JobConfig,
    timed: tuple[list[float], Window | None],
    device: torch.device,
    loss: float | None,
) -> dict[str, Any]:
    """Figures over all ranks, from this rank's times and its loss, if it has one; collective.

    Args:
        timed: what :func:`take_times` returned.
    """
    times_s, seen = timed
    ranks = config.layout.world_size
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    values = [*times_s, float(peak), -1.0 if loss is None else loss]
    values += shared(seen, dist.get_rank(), ranks)
    slowest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    steps = len(times_s)
    times, (memory, largest_loss), sensed = (
        slowest[:steps].tolist(),
        slowest[steps : steps + 2].tolist(),
        slowest[steps + 2 :].tolist(),
    )
    found = timing.summary(times)
    tokens = config.training.global_batch_size * config.model.sequence_length
    tokens_per_s = tokens / found["p50"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    mfu = flops.mfu(config.model, tokens_per_s, ranks, name)
    return {
        "device": name,
        "tokens_per_s_per_device": tokens_per_s / ranks,
        "step_time_s": found,
        "mfu_causal": asdict(mfu)["exact"] if mfu else None,
        "mfu_full": asdict(mfu)["full"] if mfu else None,
        "memory_gib": memory / 2**30,
        "sensors": summary(sensed, ranks, tokens * steps),
        "loss": largest_loss,
    }


def report(line: Mapping[str, Any], path: Path | None) -> None:
    """Print a line, and add it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(text + "\n")
