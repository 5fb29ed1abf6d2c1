"""One measurement: variants in turn, exposed communication, repeats, losses and a profile.

A result is plain values, the same on every rank except for the profile, which rank 0 records.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks import timing
from benchmarks.options import Entry
from benchmarks.presets import Run, sizes
from benchmarks.session import Leg, Session
from benchmarks.step_profile import profile_steps
from benchmarks.waterfall import waterfall, work_of

from megascale_job.sizes import flops
from megascale_job.sizes.flops import ideal_bubble

_Legs = dict[str, list[Leg]]
# What would end after the budget is not started: at its end the ranks are killed, and the results
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
    if entry.environment:
        result["environment"] = dict(entry.environment)
    result |= figures(session, entry.run, legs[last])
    if len(entry.variants) > 1:
        result["variants"] = _compared(session, entry, legs)
    if entry.exposed:
        result["exposed"] = {
            dimension: _exposure(
                session, entry.run, legs[last], legs[_without(dimension)], dimension
            )
            for dimension in entry.exposed
        }
    if entry.losses and session.rank == 0:
        (folder / entry.losses).write_text(_loss_lines(legs[last][0].losses))
    if entry.repeats:
        result["repeats"] = _repeats(session, entry)
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
        "trackers": run.trackers,
    }


def figures(session: Session, run: Run, legs: list[Leg]) -> dict[str, Any]:
    """Speed of one configuration over all its legs; memory, sensors and loss are the first's."""
    config = session.config(run)
    times = timing.summary([time_s for leg in legs for time_s in leg.times_s])
    tokens_per_s = config.training.global_batch_size * config.model.sequence_length / times["p50"]
    mfu = flops.mfu(config.model, tokens_per_s, session.world_size, _device_name(session.device))
    return {
        "tokens_per_s_per_device": tokens_per_s / session.world_size,
        "step_time_s": times,
        "mfu_causal": mfu.exact if mfu else None,
        "mfu_full": mfu.full if mfu else None,
        "memory_gib": legs[0].memory_bytes / 2**30,
        "sensors": legs[0].sensors,
        "loss": legs[0].losses[-1],
        "loss_after_steps": len(legs[0].losses),
        "rounds": len(legs),
    }


def _without(dimension: str) -> str:
    return f"without {dimension}"


def _rounds(session: Session, entry: Entry) -> _Legs:
    """Every variant, and the last without communication, in turn.

    So a slow drift of the machine affects all alike.
    """
    turns: list[tuple[str, Run, tuple[str, ...]]] = [(v.label, v.run, ()) for v in entry.variants]
    turns += [(_without(name), _plain(entry.run, name), (name,)) for name in entry.exposed]
    legs: _Legs = {label: [] for label, _, _ in turns}
    longest_s = 0.0
    for number in range(entry.rounds):
        if number and session.out_of_time(_MARGIN * longest_s):
            break
        begin = time.monotonic()
        for label, run, without in turns:
            # A curve that is compared with others has all steps, whatever was measured before.
            legs[label].append(session.leg(run, without, whole=bool(entry.losses)))
        longest_s = max(longest_s, time.monotonic() - begin)
    return legs


def _plain(run: Run, dimension: str) -> Run:
    """``run`` without overlap in ``dimension``: the cost of cutting a GEMM counts as exposed."""
    kept = tuple(axis for axis in run.overlap if dimension not in ("all", axis))
    return run if kept == run.overlap else _replaced(run, kept)


def _replaced(run: Run, overlap: tuple[str, ...]) -> Run:
    return Run(**{**asdict(run), "overlap": overlap})


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


def _exposure(
    session: Session, run: Run, legs: list[Leg], without: list[Leg], dimension: str
) -> dict[str, Any]:
    """Exposed communication, and what limits its meaning: stand-in copies and the ideal bubble."""
    whole = [statistics.median(leg.times_s) for leg in legs]
    silent = [statistics.median(leg.times_s) for leg in without]
    config = session.config(run)
    found: dict[str, Any] = timing.exposed(whole, silent)
    found["step_time_s"], found["step_time_without_s"] = (
        statistics.median(whole),
        statistics.median(silent),
    )
    # Still part of the silent step, and so missing in the exposed share: copies that stand in for
    # collectives.
    copies_s = without[0].copied_bytes / session.copy_bytes_per_s()
    found["stand_in_copies_share"] = copies_s / found["step_time_s"]
    if config.parallelism.pp > 1 and dimension in ("all", "pp"):
        # Missing in the silent step, and so counted as exposed: waiting for another stage's
        # computation.
        without_s = found["step_time_without_s"]
        found["of_which_ideal_bubble"] = ideal_bubble(config) * without_s / found["step_time_s"]
    return found


def _repeats(session: Session, entry: Entry) -> dict[str, Any]:
    """Runs from the same initial values: whether losses are equal, and how far times differ."""
    legs: list[Leg] = []
    longest_s = 0.0
    for _ in range(entry.repeats):
        # At least two: one run would always equal itself.
        if len(legs) > 1 and session.out_of_time(_MARGIN * longest_s):
            break
        begin = time.monotonic()
        session.forget(entry.run)
        legs.append(session.leg(entry.run))
        longest_s = max(longest_s, time.monotonic() - begin)
    steps = list(zip(*(leg.losses for leg in legs), strict=True))
    medians = [statistics.median(leg.times_s) for leg in legs]
    return {
        "runs": len(legs),
        "losses_bitwise_equal": all(losses.count(losses[0]) == len(losses) for losses in steps),
        "largest_loss_difference": max(max(losses) - min(losses) for losses in steps),
        "median_step_times_s": medians,
        "spread": (max(medians) - min(medians)) / statistics.median(medians),
    }


def _loss_lines(losses: list[float]) -> str:
    return "".join(
        json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1)
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
