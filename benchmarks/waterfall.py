"""A step as a waterfall: from what its GEMMs need at the measured clock down to what is left.

:func:`waterfall` is pure. It starts with the floor of the GEMMs that rank 0 must do, at the dense
rate of its multiprocessors at the clock that the sensors saw over the timed steps: below the power
limit a device does not reach the clock of its data sheet. Then follow, in milliseconds and as
shares of the step: what the GEMMs took above that, attention, other kernels, the pipeline's ideal
bubble, the rest of exposed communication and copies, and the device's idle time. The rows add up to
the profiled step.

A transfer that waits for its sender is a kernel of NCCL that runs: so the ideal bubble is taken out
of communication first, and what exceeds it out of idle time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megascale_job.config import JobConfig
from megascale_job.sizes.flops import flops_per_token
from megascale_job.sizes.parameter_table import parameter_table

# Dense operations of one multiprocessor of Hopper in a clock (NVIDIA H100 Tensor Core GPU
# Architecture, white paper: 989.4 TFLOP/s in bf16 and 1978.9 in FP8 with 132 SMs at 1.83 GHz).
_BF16_PER_CLOCK = 4096
_FP8_PER_CLOCK = 8192


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of rank 0 in a step, forward and backward, without recomputation.

    ``gemm_fp8`` are those of layers in FP8; ``gemm_bf16`` all other GEMMs; attention counts the
    scores that the mask leaves.
    """

    gemm_bf16: float
    gemm_fp8: float
    attention: float


def work_of(config: JobConfig) -> Work:
    """What one step asks of rank 0, which is on the first stage."""
    chunks = parameter_table(config, 0).chunks
    layers = [index for chunk in chunks for index in chunk.layers]
    in_fp8 = sum(index in config.fp8_layers for index in layers)
    tokens = config.training.global_batch_size * config.model.sequence_length
    share = tokens / (config.parallelism.dp * config.parallelism.tp)
    one, two = (flops_per_token(replace(config.model, layers=number)).gemm for number in (1, 2))
    layer, attention = two - one, flops_per_token(config.model).attention_exact
    ends = one - layer if chunks[-1].last else 0.0
    return Work(
        gemm_bf16=share * (layer * (len(layers) - in_fp8) + ends),
        gemm_fp8=share * layer * in_fp8,
        attention=share * attention * len(layers) / config.model.layers,
    )


def waterfall(
    work: Work, bubble: float, clock_mhz: float, processors: int, profiled: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows, largest floor first: ``what``, ``ms``, ``share`` of the step.

    Args:
        bubble: the pipeline's ideal bubble over its computing time.
        clock_mhz: mean over the timed steps.
        processors: multiprocessors of the device.
        profiled: what :func:`benchmarks.step_profile.split` found.
    """
    per_ms = processors * clock_mhz * 1e3  # clocks of all multiprocessors in a millisecond
    floor = (work.gemm_bf16 / _BF16_PER_CLOCK + work.gemm_fp8 / _FP8_PER_CLOCK) / per_ms
    attention_floor = work.attention / _BF16_PER_CLOCK / per_ms
    exclusive = profiled["exclusive_ms"]
    computing = exclusive["gemm"] + exclusive["attention"] + exclusive["other"]
    waiting = exclusive["communication"] + exclusive["copies"]
    ideal = min(bubble * computing, waiting + exclusive["idle"])
    exposed = max(0.0, waiting - ideal)
    rows = {
        "GEMMs at the clock's peak": floor,
        "GEMMs above that": exclusive["gemm"] - floor,
        "attention at the clock's peak": attention_floor,
        "attention above that": exclusive["attention"] - attention_floor,
        "other kernels": exclusive["other"],
        "ideal bubble": ideal,
        "exposed communication and copies": exposed,
        "idle": waiting + exclusive["idle"] - ideal - exposed,
    }
    step = profiled["step_ms"]
    return [{"what": what, "ms": ms, "share": ms / step} for what, ms in rows.items()]
