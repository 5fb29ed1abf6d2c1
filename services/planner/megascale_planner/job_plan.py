"""The plan of a running job, and the comparison of its measured steps with the plan. Pure.

The plan predicts the steps of a job on the devices that it has. The terms of the step model
(:mod:`megascale_planner.step_time`) are summed to the terms that spans of a running job can
distinguish.

Note [Slower than planned]. One slow step proves nothing, nor does one slow window, because the
steps of a running job vary. A job becomes slower than planned when the medians of several windows
in a row are all above the prediction's interval, and the common median by more than chance. It is
as planned again when all these medians are clearly inside the interval. The two limits are apart,
so that a job at the edge does not change its verdict at every look; in between the verdict stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megascale_job.config import JobConfig
from megascale_job.sizes.memory import head_share
from megascale_job.sizes.parameter_table import stage_layers
from megascale_planner.devices import (
    GPUS,
    BadCalibration,
    Gpu,
    calibrated,
    calibrated_alone,
    device_of,
)
from megascale_planner.prediction import plain, predict, with_measured_share
from megascale_planner.search import LEAST_GAIN, Balance, Split, balance_of, gain_of
from megascale_planner.systems import EXACT_SUMS, SYSTEMS, System
from megascale_planner.workload import Refused, Workload, illegal, point_of

# Measured term of a running job -> terms of the step model.
# Collectives of all groups but tp and ep count as data-parallel. Waits for the rank whose experts
# have the most rows are measured apart from other waits.
PARTS: dict[str, tuple[str, ...]] = {
    "compute": (
        "gemm",
        "attention",
        "elementwise",
        "recompute",
        "experts",
        "router",
        "permutation",
    ),
    "tensor_parallel": ("tensor_parallel",),
    "pipeline": ("pipeline_transfers", "bubble"),
    "data_parallel": ("data_parallel",),
    "expert_parallel": ("dispatch", "imbalance"),
    "optimizer": ("optimizer",),
    "host": ("host",),
    "straggler": ("straggler",),
}
# Part of a device's name in CUDA -> the planner's device. Other variants (PCIe, 40 GB) have other
# rates and are not listed.
_NAMES = (("H200", "h200"), ("H100 80GB HBM3", "h100"), ("A100-SXM4-80GB", "a100-80g"))
_BALANCE_GPU = "h100"
# By ``fp8.fast_accumulation``: the FP8 products of a layer that are summed in float32, relative to
# those of the default. Counted in twelfths of the forward; in a GELU layer the output projections
# are 5 of 12.
_SUMMED_IN_FLOAT32 = {
    "all": 0 / 5,
    "all_but_output_projections": 5 / 5,
    "forward": 24 / 5,
    "input_projections": 29 / 5,
    "none": 36 / 5,
}
# The share of the experts' FP8 products that is summed in float32: the second forward product is a
# ninth of a layer's.
_EXPERT_PRODUCTS = {
    "all": 0 / 9,
    "all_but_output_projections": 1 / 9,
    "forward": 6 / 9,
    "input_projections": 7 / 9,
    "none": 9 / 9,
}


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A predicted step in seconds, with its interval and terms (keys of PARTS)."""

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float]
    hardware: str


def plan_of(
    config: JobConfig, device: str, node_devices: int, calibrations: Mapping[str, str]
) -> JobPlan:
    """Predict a step of the job.

    Args:
        device: name of the devices in the nodes' reports; "cpu" for CPU nodes.
        node_devices: devices per node.
        calibrations: texts of calibration files, by measured device.

    Raises:
        Refused: there is no prediction; the message has the reason and the remedy.
    """
    gpu, hardware = _hardware(device, calibrations)
    system = _system(config)
    if device in calibrations:
        system = with_measured_share(system, gpu, calibrations[device])
    gpu = replace(gpu, devices_per_node=max(1, node_devices))
    workload = _workload(config, gpu)
    if not gpu.node_bytes_s and workload.gpus > 1:
        raise Refused(
            f"the calibration of {device} has no rate of collectives; measure it on two ranks: "
            "torchrun --nproc-per-node 2 -m megascale_trainer.commands.calibrate"
        )
    found = plain(predict(point_of(workload), gpu, system))
    return JobPlan(
        step_s=found["step_time_s"],
        low_s=max(0.0, found["low"]),
        high_s=found["high"],
        terms={
            name: sum(found["terms"].get(part, 0.0) for part in parts)
            for name, parts in PARTS.items()
        },
        hardware=hardware,
    )


def job_balance(config: JobConfig, fits: Callable[[Split], bool]) -> Balance | None:
    """A ``parallelism.stage_layers`` with which the job is predicted to train faster; else None.

    H100s are assumed as devices; layers in bf16 and in FP8 have their usual ratio there.

    Raises:
        Refused: there is no prediction for the job.
    """
    gpu = GPUS[_BALANCE_GPU]
    return balance_of(_workload(config, gpu), gpu, _system(config), fits)


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """A predicted step in seconds with its interval, and what follows from it.

    ``imbalance``: rows of the fullest rank of ep over the mean, as assumed.
    """

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_of_a_device: float
    mfu_causal: float
    gpu: str
    imbalance: float


def job_prediction(config: JobConfig, node_devices: int) -> JobPrediction:
    """The step of a job on H100s, in nodes of so many devices.

    Raises:
        Refused: there is no prediction for the job.
    """
    gpu = replace(GPUS[_BALANCE_GPU], devices_per_node=max(1, node_devices))
    workload = _workload(config, gpu)
    found = plain(predict(point_of(workload), gpu, _system(config)))
    tokens = workload.global_batch * workload.sequence
    return JobPrediction(
        step_s=found["step_time_s"],
        low_s=max(0.0, found["low"]),
        high_s=found["high"],
        tokens_per_s_of_a_device=tokens / found["step_time_s"] / workload.gpus,
        mfu_causal=found["mfu_causal"],
        gpu=gpu.name,
        imbalance=workload.load,
    )


def zero_bubble_gain(config: JobConfig) -> float:
    """Predicted relative gain in tokens per second with split backwards (zero_bubble).

    0 if the gain is not above LEAST_GAIN, or if the job splits its backwards already. Devices are
    assumed as in :func:`job_balance`.

    Raises:
        Refused: there is no prediction for the job.
    """
    gpu, system = GPUS[_BALANCE_GPU], _system(config)
    own = _workload(config, gpu)
    gain = gain_of(replace(own, schedule="zero_bubble"), own, gpu, system)
    return gain if gain > LEAST_GAIN else 0.0


def _hardware(device: str, calibrations: Mapping[str, str]) -> tuple[Gpu, str]:
    known = next((name for part, name in _NAMES if part in device), None)
    text = calibrations.get(device)
    if text is not None:
        gpu = calibrated(GPUS[known], text) if known else calibrated_alone(text)
        return gpu, f"{device}, measured by `megascale plan calibrate`"
    if known is None:
        raise Refused(
            f"no prediction for {device or 'devices without a name'}: measure them with "
            "`megascale plan calibrate --output FILE`, and start the driver with --calibration FILE"
        )
    return GPUS[known], f"{device}, the planner's table of devices"


def by_device(texts: Mapping[str, str]) -> dict[str, str]:
    """Calibrations by device, from texts by file name.

    Raises:
        BadCalibration: one is invalid, or two are for the same device.
    """
    found: dict[str, str] = {}
    for name, text in texts.items():
        device = device_of(text, name)
        if device in found:
            raise BadCalibration(f"{name}: there is another calibration of {device}; give one")
        try:  # check it now instead of in a running driver
            gpu, _ = _hardware(device, {device: text})
            with_measured_share(SYSTEMS["ours"], gpu, text)
        except BadCalibration as error:
            raise BadCalibration(f"{name}: {error}") from None
        found[device] = text
    return found


def _system(config: JobConfig) -> System:
    """The constants of this project's trainer, for the options of the job."""
    ours, overlap = SYSTEMS["ours"], config.parallelism.overlap
    summed = _SUMMED_IN_FLOAT32[config.training.fp8.fast_accumulation]
    return replace(
        ours,
        logit_bytes=ours.logit_bytes * head_share(config),
        hidden_tp=ours.hidden_tp if overlap.tp else 0.0,
        hidden_pp=ours.hidden_pp if overlap.pp else 0.0,
        hidden_dp=ours.hidden_dp if overlap.dp else 0.0,
        gather_bytes=ours.gather_bytes / 2 if config.gathers_fp8 else ours.gather_bytes,
        fp8_sums=1 + summed * (ours.fp8_sums - 1),
        expert_sums=1 + _EXPERT_PRODUCTS[config.training.fp8.fast_accumulation] * EXACT_SUMS,
    )


def _workload(config: JobConfig, gpu: Gpu) -> Workload:
    model, sizes, training = config.model, config.parallelism, config.training
    if model.layer_windows:
        raise Refused("model.layer_windows: the planner has only layers alike; no prediction")
    if sizes.cp > 1:
        raise Refused(f"parallelism.cp: {sizes.cp}, and the planner has no exchange of heads")
    split = tuple(map(len, stage_layers(config)))
    found = Workload(
        system="ours",
        gpu=gpu.name,
        layers=model.layers,
        hidden=model.hidden_size,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        ffn=model.ffn_width,
        sequence=model.sequence_length,
        vocab=model.vocab_size,
        gpus=sizes.layout.world_size,
        tp=sizes.tp,
        pp=sizes.pp,
        vpp=sizes.virtual_stages,
        dp=sizes.dp,
        micro_batch=training.micro_batch_size,
        global_batch=training.global_batch_size,
        recompute=sizes.recompute,
        block=model.block,
        window=model.window,
        mlp=model.mlp,
        precision="fp8" if training.precision == "fp8" else "bf16",
        schedule=sizes.pipeline_schedule,
        stage_layers=split if len(set(split)) > 1 else (),
        bf16_layers=model.layers - len(config.fp8_layers),
        head_dim=model.head_dim,
        qk_norm=int(model.qk_norm),
    )
    if model.experts.count:
        found = _with_experts(found, config)
    # A job that runs is legal for the trainer; the planner's model covers less.
    problem = illegal(found, gpu)
    if problem:
        raise Refused(f"no prediction: {problem}")
    return found


def _with_experts(workload: Workload, config: JobConfig) -> Workload:
    """The workload with the job's experts; forced balance is even, other loads are assumed."""
    model, experts = config.model, config.model.experts
    return replace(
        workload,
        experts=experts.count,
        top_k=experts.top_k,
        expert_ffn=model.expert_width,
        shared_ffn=experts.shared_ffn_size,
        dense_layers=experts.dense_layers,
        groups=experts.groups,
        groups_kept=experts.groups_kept,
        ep=config.parallelism.ep,
        ep_across_nodes=config.parallelism.ep_across_nodes,
        imbalance=1.0 if config.training.forced_balance else 0.0,
    )


Floats = npt.NDArray[np.float64]
_MAD_TO_DEVIATION, _MEDIAN_ERROR = 1.4826, 1.2533  # of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRule:
    """Limits at which a verdict changes; see Note [Slower than planned] above.

    ``windows`` windows of ``window_steps`` steps must agree, and their common median must be
    ``least_z`` robust standard errors beyond the limit. ``inside``: the limit for the return to
    "as planned", as a position in the upper half of the interval, 0 to 1. A named term stays named
    while its excess is at least ``keep_share`` of the largest excess.
    """

    window_steps: int = 10
    windows: int = 3
    inside: float = 0.75
    keep_share: float = 0.7
    least_z: float = 3.0


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a step, in seconds."""

    name: str
    planned_s: float
    measured_s: float

    @property
    def excess_s(self) -> float:
        """Measured minus planned seconds."""
        return self.measured_s - self.planned_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps ``first`` to ``last`` compared with their plan.

    ``slower_by``: while the job is slower than planned, the term with the largest excess, or "step"
    if terms were not measured; else "". ``terms``: they add up to the step on both sides; empty if
    they were not measured.
    """

    first: int
    last: int
    step_s: float
    plan: JobPlan
    terms: tuple[Term, ...]
    slower_by: str
    sentence: str


def compare_steps(
    steps: Sequence[int] | npt.NDArray[np.int64],
    step_s: Floats,
    terms: Mapping[str, Floats],
    plan: JobPlan,
    before: str = "",
    rule: PlanRule = PlanRule(),
) -> Comparison | None:
    """Compare the newest steps with their plan; None while there are fewer than a window.

    Args:
        steps: step numbers in order. ``step_s`` and each of ``terms``: seconds, of equal length.
        terms: empty if they were not measured.
        before: ``slower_by`` of the previous comparison.
    """
    count = min(len(steps), rule.windows * rule.window_steps)
    if count < rule.window_steps:
        return None
    newest = slice(len(steps) - count, None)
    measured = float(np.median(step_s[newest]))
    found = tuple(
        Term(name, plan.terms[name], float(np.median(values[newest])))
        for name, values in terms.items()
    )
    slower = _slower(step_s[newest], plan, bool(before), rule)
    slower_by = _largest(found, before, rule) if slower else ""
    sentence = sentence_of(measured, plan, found, slower_by)
    return Comparison(
        int(steps[newest][0]), int(steps[-1]), measured, plan, found, slower_by, sentence
    )


def sentence_of(step_s: float, plan: JobPlan, terms: Sequence[Term], slower_by: str) -> str:
    """``step 7.4 s, plan 6.5 s (6.1 to 6.9 s): data-parallel term +0.7 s (1.0 s, plan 0.3 s)``."""
    text = (
        f"step {_text(step_s)}, plan {_text(plan.step_s)} ({_text(plan.low_s)} to "
        f"{_text(plan.high_s)})"
    )
    term = next((term for term in terms if term.name == slower_by), None)
    if term is None:
        return text
    return (
        f"{text}: {term.name.replace('_', '-')} term +{_text(term.excess_s)} "
        f"({_text(term.measured_s)}, plan {_text(term.planned_s)})"
    )


def _slower(step_s: Floats, plan: JobPlan, before: bool, rule: PlanRule) -> bool:
    if len(step_s) < rule.windows * rule.window_steps:
        return before
    # The margin is that of the common median's standard error; the deviation is robust, so single
    # slow steps do not widen it.
    medians = np.median(step_s.reshape(rule.windows, rule.window_steps), axis=1)
    median = float(np.median(step_s))
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(step_s - median)))
    margin = rule.least_z * _MEDIAN_ERROR * deviation / len(step_s) ** 0.5
    if not before:
        return bool(np.all(medians > plan.high_s)) and median - margin > plan.high_s
    within = plan.step_s + rule.inside * (plan.high_s - plan.step_s)
    return not (bool(np.all(medians <= within)) and median + margin <= within)


def _largest(terms: Sequence[Term], before: str, rule: PlanRule) -> str:
    if not terms:
        return "step"
    # Two terms of about equal excess would otherwise alternate in the log.
    most = max(terms, key=lambda term: term.excess_s)
    kept = next((term for term in terms if term.name == before), most)
    return kept.name if kept.excess_s >= rule.keep_share * most.excess_s else most.name


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
