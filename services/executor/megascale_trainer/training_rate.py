"""How long this machine takes for a step of the trainer itself, on one device, for the planner.

Rates of single operations do not tell it: a GPU that multiplies without a pause draws its full
power and clocks lower than one that trains (on an H100, 688 TFLOP/s alone). Megascale's planner
fits the share of the rates that training reaches to this step (docs/planner.md).
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.process.bootstrap import create_groups
from megascale_trainer.trainer import Trainer, set_determinism

# Widths of a 7B model, of which a few layers are enough, and a step that fills the device; on a CPU
# small ones, so that the same code runs anywhere.
ON_GPU = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 51200, "sequence": 2048}
ON_CPU = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 64}
MICRO_BATCH, MICRO_BATCHES = 4, 4
_WARM_UP, _LEAST_STEPS, _MOST_STEPS = 3, 5, 60
_GROUP_TIMEOUT_S = 60.0


def measure_step(device: torch.device, budget_s: float) -> dict[str, Any]:
    """A row of the planner with ``step_time_s``: the median of the steps that fit the budget.

    Needs 24 GiB on a GPU.

    Raises:
        torch.OutOfMemoryError: the device has less.
    """
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    config = _job(sizes, "bf16" if device.type == "cuda" else "fp32")
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, HashStore(), device, timeout_s=_GROUP_TIMEOUT_S)
    trainer = Trainer(config, 0, groups, device)
    trainer.initialise()
    batches = [_micro_batch(config, number, device) for number in range(MICRO_BATCHES)]
    taken: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(taken) < _WARM_UP + _LEAST_STEPS or (
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
        "step_time_s": statistics.median(taken[_WARM_UP:]),
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
                "steps": _MOST_STEPS + _WARM_UP,
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
