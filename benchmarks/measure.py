"""One measurement: variants in turn, and a profile.

A result is plain values, the same on every rank except for the profile, which rank 0 records.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks import timing
from benchmarks.options import Entry, Run, sizes
from benchmarks.session import Leg, Session
from benchmarks.step_profile import profile_steps, waterfall, work_of

from megascale_job.sizes import flops
from megascale_job.sizes.flops import ideal_bubble
from megascale_job.sizes.memory import largest_rank_memory

_Legs = dict[str, list[Leg]]
# A round that would end after the budget is not started: the ranks would be killed, and the results
# of the entry in progress are lost.
_MARGIN = 1.25  # of what the longest round so far took
_PROFILE_S = 60.0  # for two steps, and for collecting and writing their trace


def measure(session: Session, entry: Entry, folder: Path) -> dict[str, Any]:
    """Run ``entry``; ends early, after a whole round, when the session's time is up.

    Raises:
        ConfigurationRefused: a configuration cannot run; raised before anything has started.
    """
    for variant in entry.variants:
        session.config(variant.run)
    legs = _rounds(session, entry)
    last = entry.variants[-1].label
    result = {"name": entry.name, **describe(session, entry.run)}
    result |= figures(session, entry.run, legs[last])
    if len(entry.variants) > 1:
        result["variants"] = _compared(session, entry, legs)
    if entry.profile and not session.out_of_time(_PROFILE_S):
        result["profile"] = _profile(session, entry, folder, result["sensors"])
    return result


def _profile(
    session: Session, entry: Entry, folder: Path, sensors: dict[str, Any] | None
) -> dict[str, Any]:
    found = profile_steps(session, entry.run, folder / entry.profile)
    if "exclusive_ms" in found and sensors is not None:
        config, device = session.config(entry.run), session.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        seen = sensors["clock_mhz"], processors, found
        found["waterfall"] = waterfall(work_of(config), ideal_bubble(config), *seen)
    return found


def describe(session: Session, run: Run) -> dict[str, Any]:
    """The configuration and the machine, as results name them."""
    config = session.config(run)
    model, parallel, training = config.model, config.parallelism, config.training
    return {
        "preset": run.preset,
        "device": _device_name(session.device),
        "torch": torch.__version__,
        **sizes(config),
        "stage_layers": list(parallel.stage_layers),
        "precision": training.precision,
        "fast_accumulation": training.fp8.fast_accumulation if config.fp8_layers else None,
        "optimizer": config.optimizer.name,
        "block": model.block,
        "mlp": model.mlp,
        "ffn_size": model.ffn_width,
        "norm": model.norm,
        "experts": model.experts.count,
        "routing": run.routing if model.experts.count else None,
        "bias": model.bias,
        "attention": run.attention,
        "window": model.window,
        "overlap": [axis for axis, on in asdict(parallel.overlap).items() if on],
        "kernels": training.kernels,
        "recompute": parallel.recompute,
        "schedule": parallel.pipeline_schedule,
        "bucket_mib": training.bucket_mib,
        "deterministic": training.deterministic,
        "cuda_graphs": training.cuda_graphs,
        "data": run.data or "random",
        "loop": run.loop,
    }


def figures(session: Session, run: Run, legs: list[Leg]) -> dict[str, Any]:
    """Speed of one configuration over all its legs; memory, sensors and loss are the first's."""
    config = session.config(run)
    times = timing.summary([time_s for leg in legs for time_s in leg.times_s])
    tokens_per_s = config.training.global_batch_size * config.model.sequence_length / times["p50"]
    ranks = session.world_size
    mfu = flops.mfu(config.model, tokens_per_s, ranks, _device_name(session.device))
    return {
        "tokens_per_s_per_device": tokens_per_s / ranks,
        "model_tflops": flops.flops_per_token(config.model).exact * tokens_per_s / ranks / 1e12,
        "step_time_s": times,
        "mfu_causal": mfu.exact if mfu else None,
        "mfu_full": mfu.full if mfu else None,
        "memory_gib": legs[0].memory_bytes / 2**30,
        "memory_estimate_gib": largest_rank_memory(config).total_bytes / 2**30,
        "sensors": legs[0].sensors,
        "loss": legs[0].losses[-1],
        "loss_after_steps": len(legs[0].losses),
        "rounds": len(legs),
    }


def _rounds(session: Session, entry: Entry) -> _Legs:
    """Every variant in turn, so that a slow drift of the machine affects all alike."""
    legs: _Legs = {variant.label: [] for variant in entry.variants}
    longest_s = 0.0
    for number in range(entry.rounds):
        if number and session.out_of_time(_MARGIN * longest_s):
            break
        begin = time.monotonic()
        for variant in entry.variants:
            legs[variant.label].append(session.leg(variant.run))
        longest_s = max(longest_s, time.monotonic() - begin)
    return legs


def _compared(session: Session, entry: Entry, legs: _Legs) -> list[dict[str, Any]]:
    """The variants in order, with gains in tokens per second over the first and the one before."""
    rows: list[dict[str, Any]] = []
    speeds: list[list[float]] = []
    for variant in entry.variants:
        config = session.config(variant.run)
        tokens = config.training.global_batch_size * config.model.sequence_length
        speeds.append([tokens / statistics.median(leg.times_s) for leg in legs[variant.label]])
        row = {"label": variant.label, **figures(session, variant.run, legs[variant.label])}
        row["mean_step_times_s"] = [statistics.fmean(leg.times_s) for leg in legs[variant.label]]
        if len(speeds) > 1:
            row["gain_over_first"] = timing.gain(speeds[0], speeds[-1])
            row["gain_over_previous"] = timing.gain(speeds[-2], speeds[-1])
        rows.append(row)
    return rows


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
