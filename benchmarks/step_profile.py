"""Splits a step by kinds of work, from a profiler's trace of rank 0, and draws it as a waterfall.

:func:`split` is pure. Streams run side by side, so there are two counts: *busy* is how long each
kind ran at all; *exclusive* gives every instant to one kind only, computation before communication
before copies, and adds up to the whole. Communication that runs during computation is hidden; a
communication kernel that waits for its peer counts as communication.

Kinds are read from the names of kernels. ``rows`` are copies of tokens to experts and back, with
the plan of the rows (sort, offsets); ``optimizer`` includes the zeroing of gradients; what has no
kind of its own (elementwise kernels of torch, sums) is ``other``.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from megascale_job.config import JobConfig
from megascale_job.sizes.flops import flops_per_token
from megascale_job.sizes.parameter_table import parameter_table
from megascale_kernels.torch_calls import cuda_event

if TYPE_CHECKING:
    from benchmarks.options import Run
    from benchmarks.session import Session

GEMM, GROUPED, ATTENTION, ROWS = "gemm", "grouped gemm", "attention", "rows"
COMPUTATION = (
    *(GEMM, GROUPED, ATTENTION, ROWS, "router", "quantization"),
    *("activation", "norm", "rotary", "loss", "optimizer", "other"),
)
KINDS = (*COMPUTATION, "communication", "copies")
_WITH_FLOOR = (GEMM, GROUPED, ATTENTION, ROWS)
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# Parts of kernels' names, searched in this order: cuDNN's and flash attention are built of GEMM
# templates. Ours begin with the operator's name.
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "symmetric_memory", "barrier_kernel", "signal_kernel")),
    # The last two are what cuDNN runs before and after the backward of attention.
    (ATTENTION, ("flash", "fmha", "sdpa", "attention", "compute_dot_do_o", "convert_dq")),
    (GROUPED, ("_grouped_gemm",)),
    (GEMM, ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "xmma")),
    ("activation", ("_activation_", "_rows_activation", "silu", "gelu")),
    ("quantization", ("_quantize_",)),
    (ROWS, ("_rows_", "radixsort", "searchsorted", "index_elementwise", "index_put")),
    ("router", ("_router_",)),
    ("norm", ("_norm_", "_head_norm_", "_residual_", "_partial_sums_", "_parts_", "_column_")),
    ("rotary", ("_rotary_",)),
    ("loss", ("_entropy_", "softmax")),
    ("optimizer", ("_adamw_", "_lamb_", "memset", "fillfunctor")),
)
_TOP = 16
STEPS = 2
_COPY_BYTES = 1 << 30  # past any cache


def profile_steps(session: Session, run: Run, path: Path) -> dict[str, Any]:
    """Two more bare steps of ``run`` under the profiler on rank 0; writes its trace to ``path``.

    Bare, because the product's loop begins and ends a run on an idle device.

    Returns:
        On rank 0 the path of the trace (for Perfetto) and, if a device was used, the split in
        milliseconds per step; elsewhere nothing.
    """
    run = replace(run, loop="bare")
    session.steps(run, 1)
    if session.rank:
        session.steps(run, STEPS)
        return {}
    # Only what the device does: recording every operation of the host as well would slow the host,
    # and show as idle time of the device.
    activity = ProfilerActivity.CUDA if session.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        session.steps(run, STEPS)
    recorded.export_chrome_trace(str(path))
    found = split(read_events(path), STEPS)
    if found:
        found["copy_bytes_per_s"] = _copy_rate(session.device)
    return {"trace": str(path), **found}


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), list[float]()
    for _ in range(4):
        begin, end = cuda_event(timed=True), cuda_event(timed=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * _COPY_BYTES / min(times)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace in Chrome's format, plain or gzipped."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def split(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds per step by kind, from first to last device event; empty without any.

    Args:
        events: of a trace: ``cat``, ``name``, ``ts`` and ``dur`` in microseconds, ``args`` with the
            stream.
        steps: how many steps they cover.
    """
    found = [event for event in events if event.get("cat") in _DEVICE_CATEGORIES]
    if not found:
        return {}
    computing = {_stream(event) for event in found if _named(event) in (GEMM, GROUPED)}
    marks: list[tuple[float, int, str]] = []
    names: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in found:
        kind = kind_of(event, computing)
        marks += [(event["ts"], 1, kind), (event["ts"] + event["dur"], -1, kind)]
        names[kind, event["name"]] += event["dur"]
    exclusive, busy, hidden = _sweep(marks)
    scale = 1e3 * steps
    largest = sorted(names.items(), key=lambda item: -item[1])[:_TOP]
    return {
        "step_ms": sum(exclusive.values()) / scale,
        "launches": len(found) / steps,
        "exclusive_ms": {kind: time / scale for kind, time in exclusive.items()},
        "busy_ms": {kind: time / scale for kind, time in busy.items()},
        "communication_hidden_ms": hidden / scale,
        "largest": [
            {"kind": kind, "kernel": name, "ms": time / scale} for (kind, name), time in largest
        ],
    }


def kind_of(event: Mapping[str, Any], computing: set[Any]) -> str:
    """The kind of one device event; ``computing`` are the streams that run GEMMs.

    A copy between devices, or one within the device on another stream than GEMMs, is how parts
    travel over peer memory.
    """
    if event["cat"] != "gpu_memcpy":
        return _named(event)
    name = event["name"]
    apart = "DtoD" in name and _stream(event) not in computing
    return "communication" if "PtoP" in name or apart else "copies"


def _named(event: Mapping[str, Any]) -> str:
    name = event["name"].lower()
    return next((kind for kind, parts in _NAMES if any(part in name for part in parts)), "other")


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def _sweep(marks: list[tuple[float, int, str]]) -> tuple[dict[str, float], dict[str, float], float]:
    """Exclusive and busy time by kind, and hidden communication.

    A mark is (time, +1 or -1, kind): an event of the kind starts or ends.
    """
    exclusive = dict.fromkeys((*KINDS, "idle"), 0.0)
    busy = dict.fromkeys(KINDS, 0.0)
    running = dict.fromkeys(KINDS, 0)
    hidden, before = 0.0, min(marks)[0]
    for now, change, kind in sorted(marks):
        passed = now - before
        active = [name for name in KINDS if running[name] > 0]
        exclusive[active[0] if active else "idle"] += passed
        for name in active:
            busy[name] += passed
        if "communication" in active and active[0] in COMPUTATION:
            hidden += passed
        running[kind] += change
        before = now
    return exclusive, busy, hidden


# Dense operations of one multiprocessor of Hopper in a clock (NVIDIA H100 Tensor Core GPU
# Architecture, white paper: 989.4 TFLOP/s in bf16 and 1978.9 in FP8 with 132 SMs at 1.83 GHz).
_BF16_PER_CLOCK = 4096
_FP8_PER_CLOCK = 8192


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of rank 0 in a step, forward and backward, without recomputation.

    ``gemm_fp8`` are those of layers in FP8; ``gemm_bf16`` all other GEMMs; ``grouped`` those of
    experts, in FP8 if ``fp8``; attention counts the scores that the mask leaves. ``row_bytes`` are
    those that a copy of all experts' rows would move, made forward and backward, there and back.
    """

    gemm_bf16: float
    gemm_fp8: float
    attention: float
    grouped: float = 0.0
    grouped_fp8: bool = False
    row_bytes: float = 0.0


def work_of(config: JobConfig) -> Work:
    """The work of rank 0, which is on the first stage, in one step."""
    chunks = parameter_table(config, 0).chunks
    layers = [index for chunk in chunks for index in chunk.layers]
    in_fp8 = sum(index in config.fp8_layers for index in layers)
    tokens = config.training.global_batch_size * config.model.sequence_length
    share = tokens / (config.parallelism.dp * config.parallelism.tp)
    one, two = (flops_per_token(replace(config.model, layers=number)).gemm for number in (1, 2))
    layer, attention = two - one, flops_per_token(config.model).attention_exact
    ends = one - layer if chunks[-1].last else 0.0
    model, chosen = config.model, config.model.experts
    rows = chosen.top_k if chosen.count else 0
    # Forward and two gradients, a multiply-add per weight, of gate, up and back.
    per_width = 18.0 * model.hidden_size
    experts = per_width * rows * model.expert_width
    in_bf16 = per_width * (chosen.shared_ffn_size + chosen.count / 3)  # with the router
    layer -= experts + in_bf16
    of_row = 2 * torch.bfloat16.itemsize * model.hidden_size  # read and written
    return Work(
        gemm_bf16=share * (layer * (len(layers) - in_fp8) + in_bf16 * len(layers) + ends),
        gemm_fp8=share * layer * in_fp8,
        attention=share * attention * len(layers) / config.model.layers,
        grouped=share * experts * len(layers),
        grouped_fp8=in_fp8 == len(layers),
        row_bytes=4.0 * of_row * share * rows * len(layers),
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
    grouped = work.grouped / (_FP8_PER_CLOCK if work.grouped_fp8 else _BF16_PER_CLOCK) / per_ms
    copies = work.row_bytes / profiled["copy_bytes_per_s"] * 1e3
    exclusive = profiled["exclusive_ms"]
    computing = sum(exclusive[kind] for kind in COMPUTATION)
    waiting = exclusive["communication"] + exclusive["copies"]
    ideal = min(bubble * computing, waiting + exclusive["idle"])
    exposed = max(0.0, waiting - ideal)
    rows = {
        "GEMMs at the clock's peak": floor,
        "GEMMs above that": exclusive[GEMM] - floor,
        "experts' GEMMs at the clock's peak": grouped,
        "experts' GEMMs above that": exclusive[GROUPED] - grouped,
        "attention at the clock's peak": attention_floor,
        "attention above that": exclusive[ATTENTION] - attention_floor,
        "rows of experts as copies in bf16": copies,
        "rows of experts above that": exclusive[ROWS] - copies,
        **{kind: exclusive[kind] for kind in COMPUTATION if kind not in _WITH_FLOOR},
        "ideal bubble": ideal,
        "exposed communication and copies": exposed,
        "idle": waiting + exclusive["idle"] - ideal - exposed,
    }
    step = profiled["step_ms"]
    return [{"what": what, "ms": ms, "share": ms / step} for what, ms in rows.items() if ms]
