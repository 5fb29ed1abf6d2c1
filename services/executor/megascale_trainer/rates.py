"""Measured rates of this machine's devices, and the time of one training step, for the planner.

Matrix products, attention, copies and a collective are each measured for a share of a time budget,
after a warm-up; a rate is the median of the repetitions. On a GPU the shapes are those of training;
on a CPU they are small, so that the same code runs anywhere.

Rates of single operations do not predict a step: a GPU that multiplies without a pause draws its
full power and clocks lower than one that trains (688 TFLOP/s alone on an H100). So a step of the
trainer itself is measured too, on one device, and the planner fits to it the share of the rates
that training reaches (docs/planner.md).
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.trainer import Trainer, set_determinism

# Widths of a 7B model, of which a few layers are enough, and a step that fills the device.
ON_GPU = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 51200, "sequence": 2048}
ON_CPU = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 64}
MICRO_BATCH, MICRO_BATCHES = 4, 4
_WARM_UP_STEPS, _LEAST_STEPS, _MOST_STEPS = 3, 5, 60


def measure_step(device: torch.device, budget_s: float) -> dict[str, Any]:
    """A row of the planner with ``step_time_s``: the median of the steps that fit the budget.

    Needs 24 GiB on a GPU.

    Raises:
        torch.OutOfMemoryError: the device has less.
    """
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    config = _job(sizes, "bf16" if device.type == "cuda" else "fp32")
    set_determinism(config, device)
    groups = single_process_groups()
    trainer = Trainer(config, 0, groups, device)
    trainer.initialise()
    batches = [_micro_batch(config, number, device) for number in range(MICRO_BATCHES)]
    taken: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(taken) < _WARM_UP_STEPS + _LEAST_STEPS or (
        len(taken) < _MOST_STEPS and time.perf_counter() < end_s
    ):
        begin_s = time.perf_counter()
        trainer.train_step(batches).read()  # which waits for the device
        taken.append(time.perf_counter() - begin_s)
    del trainer, batches
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        **sizes,
        "micro_batch": MICRO_BATCH,
        "global_batch": MICRO_BATCH * MICRO_BATCHES,
        "step_time_s": statistics.median(taken[_WARM_UP_STEPS:]),
    }


def _job(sizes: dict[str, int], precision: str) -> JobConfig:
    return from_accepted(
        {
            "name": "calibrate",
            "model": {
                "layers": sizes["layers"],
                "hidden_size": sizes["hidden"],
                "heads": sizes["heads"],
                "vocab_size": sizes["vocab"],
                "sequence_length": sizes["sequence"],
            },
            "training": {
                "steps": _MOST_STEPS + _WARM_UP_STEPS,
                "global_batch_size": MICRO_BATCH * MICRO_BATCHES,
                "micro_batch_size": MICRO_BATCH,
                "precision": precision,
            },
            "data": {"document_attention": False},
        }
    )


def _micro_batch(config: JobConfig, number: int, device: torch.device) -> MicroBatch:
    length, generator = config.model.sequence_length, np.random.default_rng(number)
    tokens = generator.integers(0, config.model.vocab_size, (MICRO_BATCH, length + 1))
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_weight": np.ones((MICRO_BATCH, length), np.float32),
        "position": np.tile(np.arange(length), (MICRO_BATCH, 1)),
        "document_start": np.zeros((MICRO_BATCH, length), np.int64),
    }
    return MicroBatch.from_numpy(arrays).to(device)


VERSION = 1
_FP8_CAPABILITY = (8, 9)
_MAX_REPETITIONS = 200
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the measurements: of a square product, attention and a copy."""

    width: int
    heads: int
    sequence: int
    copied_bytes: int


_ON_GPU = Shapes(width=8192, heads=64, sequence=8192, copied_bytes=2**30)
_ON_CPU = Shapes(width=256, heads=2, sequence=256, copied_bytes=2**22)
_HEAD_SIZE = 128


@contextmanager
def ranks_of_environment(kind: str) -> Iterator[tuple[torch.device, int]]:
    """The device (``kind`` auto, cuda or cpu) and rank of this process, in a group under torchrun.

    Raises:
        ValueError: an unknown kind, or no GPU where one is asked for.
    """
    if kind not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {kind}: give auto, cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; give cpu")
    cuda = kind != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        rank = dist.get_rank() if dist.is_initialized() else 0
        yield device or torch.device("cpu"), rank
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def measure(device: torch.device, budget_s: float) -> dict[str, Any]:
    """Rates of ``device`` in FLOP/s and bytes/s, measured for about ``budget_s`` together.

    The collective is measured if torch.distributed runs with more than one rank, which then all
    call this. On a GPU a step of the trainer itself is measured as well, on each device alone.
    Returns the object of the calibration file.
    """
    shapes = _ON_GPU if device.type == "cuda" else _ON_CPU
    together = dist.is_initialized() and dist.get_world_size() > 1
    share_s = budget_s / 6
    rates: dict[str, float] = {}
    how: dict[str, str] = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")

    left, right = (_values(shapes.width, device, dtype) for _ in range(2))
    rates["gemm_flops"] = 2 * shapes.width**3 / _seconds(lambda: left @ right, device, share_s)
    how["gemm_flops"] = f"{shapes.width}^3 in {name}"

    rates["attention_flops"] = _attention(shapes, device, dtype, share_s)
    how["attention_flops"] = f"causal, {shapes.sequence} tokens, both directions, {name}"

    source = torch.zeros(shapes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), device, share_s)
    rates["copy_bytes_s"] = 2 * shapes.copied_bytes / copy_s
    how["copy_bytes_s"] = f"copies of {shapes.copied_bytes} bytes, read and written"

    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        rates["gemm_fp8_flops"] = _fp8(left, right, device, share_s)
        how["gemm_fp8_flops"] = f"{shapes.width}^3 in float8_e4m3fn"
    if together:
        rates["collective_bytes_s"] = _collective(device, shapes.copied_bytes // 16)
        how["collective_bytes_s"] = f"bus bandwidth of all-reduce, {dist.get_world_size()} ranks"
    # Last: it chooses other kernels for the whole process, and finds the device warm.
    training = {} if device.type == "cpu" else {"training": measure_step(device, share_s)}
    return {
        "version": VERSION,
        **training,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "attention_tokens": shapes.sequence,
        "rates": rates,
        "how": how,
    }


def _values(width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Random values: products of zeros draw less power and run faster than training does."""
    return torch.randn(width, width, device=device, dtype=dtype)


def _attention(shapes: Shapes, device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    """Causal FLOP/s of forward and backward together: 4 and 10 per head size, query and key."""
    size = (1, shapes.heads, shapes.sequence, _HEAD_SIZE)
    query, key, value = (
        torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(size, device=device, dtype=dtype)

    def both() -> object:
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.autograd.grad(
            attend(query, key, value, is_causal=True), (query, key, value), gradient
        )

    flops = 14 * shapes.heads * _HEAD_SIZE * shapes.sequence * (shapes.sequence + 1) / 2
    return flops / _seconds(both, device, budget_s)


def _fp8(left: torch.Tensor, right: torch.Tensor, device: torch.device, budget_s: float) -> float:
    one = torch.ones((), device=device)
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()

    def product() -> object:
        return torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2.0 * left.shape[0] ** 3 / _seconds(product, device, budget_s)


def _collective(device: torch.device, size: int) -> float:
    """Bus bandwidth of an all-reduce in bytes/s; the same number of repetitions on every rank."""
    ranks = dist.get_world_size()
    values = torch.zeros(size, dtype=torch.uint8, device=device)

    def once() -> object:
        return dist.all_reduce(values)

    seconds = _seconds(once, device, budget_s=float("inf"), repetitions=20)
    return 2 * (ranks - 1) / ranks * size / seconds


def _seconds(
    action: Callable[[], object],
    device: torch.device,
    budget_s: float,
    repetitions: int = _MAX_REPETITIONS,
) -> float:
    """Median seconds of ``action``; at least three repetitions, whatever the budget."""
    for _ in range(_WARM_UP):
        action()
    _wait(device)
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < 3 or (len(taken) < repetitions and time.perf_counter() < end):
        start = time.perf_counter()
        action()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
