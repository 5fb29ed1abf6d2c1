"""Rates of GPUs and their links: datasheet values, and rates measured on large transfers.

A calibration file, written by `megascale plan calibrate`, replaces these rates by rates measured on
the user's own devices. The file is one JSON object: ``version``, ``device`` (a name), ``rates`` (a
number for each of :data:`RATES`, in FLOP/s or bytes/s) and ``how`` (by rate, what was measured).
Absent rates keep the datasheet's value. ``attention_tokens`` is the sequence length at which
attention was measured; ``training`` is a measured step of this project's trainer
(:mod:`megascale_planner.prediction`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

# Attention reaches half of its rate at this length: causal rates of cuDNN on H200 at 2,048, 4,096
# and 8,192 tokens are 336, 455 and 515 TFLOP/s, both directions together (benchmarks/results).
ATTENTION_HALF_LENGTH = 1500.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of device.

    Attributes:
        peak_flops, peak_fp8_flops: dense, in FLOP/s; fp8 0: the device has none.
        gemm_share, gemm_fp8_share: share of the peak that a large GEMM sustains while training.
        attention_share: share of the peak that causal attention of long sequences reaches.
        hbm_bytes_s: memory bandwidth that an elementwise kernel reaches.
        node_bytes_s: bus bandwidth of a collective inside a node, per device and direction.
        network_bytes_s: bus bandwidth between nodes, per device and direction.
        sources: the source of each rate.
    """

    name: str
    peak_flops: float
    peak_fp8_flops: float
    memory_bytes: float
    gemm_share: float
    gemm_fp8_share: float
    attention_share: float
    hbm_bytes_s: float
    node_bytes_s: float
    network_bytes_s: float
    devices_per_node: int = 8
    sources: tuple[tuple[str, str], ...] = ()


_A100_SOURCES = (
    ("peak_flops", "NVIDIA A100 80GB SXM data sheet, dense bf16"),
    (
        "gemm_share",
        "assumed: 0.85 for large products; a system's kernel_share is fitted on top of it",
    ),
    ("attention_share", "FlashAttention-2 on A100 reaches 50 to 73 % (arXiv 2307.08691, abstract)"),
    ("hbm_bytes_s", "assumed: 0.85 of the data sheet's 2,039 GB/s"),
    ("node_bytes_s", "assumed: 77 % of NVLink 3's 300 GB/s a direction"),
    ("network_bytes_s", "assumed: 90 % of one 200 Gbit/s NIC a device"),
)
_HOPPER_SOURCES: tuple[tuple[str, str], ...] = (
    ("peak_flops", "NVIDIA H100 and H200 SXM data sheets, dense bf16; FP8 twice that"),
    (
        "gemm_share",
        "8192^3 in training on H200: 772 TFLOP/s of 989 (benchmarks/results, 2026-11-21)",
    ),
    ("gemm_fp8_share", "1,370 to 1,540 of 1,979 TFLOP/s (benchmarks/results, 2026-11-22, FP8)"),
    ("attention_share", "cuDNN at sequences of 2,048 to 8,192 on H200, both directions together"),
    ("hbm_bytes_s", "copies on H200: 4.09 of 4.8 TB/s; on H100 the same share of 3.35 TB/s"),
    ("node_bytes_s", "NCCL on 8 H200, 64 to 256 MB: 241 to 325 GB/s; the middle"),
    ("network_bytes_s", "assumed: 90 % of one 400 Gbit/s NIC a device"),
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100-80g",
            peak_flops=312e12,
            peak_fp8_flops=0.0,
            memory_bytes=80 * 2**30,
            gemm_share=0.85,
            gemm_fp8_share=0.0,
            attention_share=0.60,
            hbm_bytes_s=0.85 * 2.039e12,
            node_bytes_s=230e9,
            network_bytes_s=22.5e9,
            sources=_A100_SOURCES,
        ),
        Gpu(
            name="h100",
            peak_flops=989.5e12,
            peak_fp8_flops=1979e12,
            memory_bytes=80 * 2**30,
            gemm_share=0.78,
            gemm_fp8_share=0.74,
            attention_share=0.60,
            hbm_bytes_s=0.85 * 3.35e12,
            node_bytes_s=290e9,
            network_bytes_s=45e9,
            sources=_HOPPER_SOURCES,
        ),
        Gpu(
            name="h800",
            peak_flops=989.5e12,
            peak_fp8_flops=1979e12,
            memory_bytes=80 * 2**30,
            gemm_share=0.78,
            gemm_fp8_share=0.74,
            attention_share=0.60,
            hbm_bytes_s=0.85 * 3.35e12,
            node_bytes_s=290e9 * 400 / 900,
            network_bytes_s=45e9,
            sources=(
                *(item for item in _HOPPER_SOURCES if item[0] != "node_bytes_s"),
                ("node_bytes_s", "as H100, for NVLink of 400 GB/s (arXiv 2505.11432, Table 4)"),
            ),
        ),
        Gpu(
            name="h200",
            peak_flops=989.5e12,
            peak_fp8_flops=1979e12,
            memory_bytes=141e9,
            gemm_share=0.78,
            gemm_fp8_share=0.74,
            attention_share=0.60,
            hbm_bytes_s=4.09e12,
            node_bytes_s=290e9,
            network_bytes_s=45e9,
            sources=_HOPPER_SOURCES,
        ),
    )
}


VERSION = 1
# Measured rate -> the field that it replaces. Shares are of the device's peak.
RATES = {
    "gemm_flops": "gemm_share",
    "gemm_fp8_flops": "gemm_fp8_share",
    "attention_flops": "attention_share",
    "copy_bytes_s": "hbm_bytes_s",
    "collective_bytes_s": "node_bytes_s",
}


# Rates that a calibration must have if the table has no such device.
_ALONE = ("gemm_flops", "attention_flops", "copy_bytes_s")


class BadCalibration(ValueError):
    """A calibration that cannot be used; the message names the field and the remedy."""


def calibrated(gpu: Gpu, text: str) -> Gpu:
    """``gpu`` with the rates of the calibration ``text``, and their sources.

    Raises:
        BadCalibration: the text is no calibration, or a rate is not a positive number.
    """
    found = _rates_of(text)
    rates: dict[str, float] = found["rates"]
    changes: dict[str, Any] = {
        RATES[name]: _as_gpu(gpu, name, value) for name, value in rates.items()
    }
    if "attention_flops" in rates:
        changes["attention_share"] *= _long_sequences(found.get("attention_tokens"))
    device, how = str(found.get("device", "a device")), found.get("how")
    notes = how if isinstance(how, dict) else {}
    replaced = {
        RATES[name]: f"measured on {device}: {notes.get(name, 'megascale plan calibrate')}"
        for name in rates
    }
    sources = tuple((name, replaced.get(name, source)) for name, source in gpu.sources)
    return replace(gpu, sources=sources, **changes)


def calibrated_alone(text: str) -> Gpu:
    """A device that is not in the table, from the calibration ``text``.

    Its peak is the measured rate of GEMMs. Its network is as fast as its measured collectives (0:
    not measured). Its memory is not known (0).

    Raises:
        BadCalibration: as :func:`calibrated`, or a required rate is missing.
    """
    found = _rates_of(text)
    rates: dict[str, float] = found["rates"]
    if missing := [name for name in _ALONE if name not in rates]:
        raise BadCalibration(f"rates: {', '.join(missing)} missing; measure again")
    links = rates.get("collective_bytes_s", 0.0)
    base = Gpu(
        name=str(found.get("device", "a device")),
        peak_flops=rates["gemm_flops"],
        peak_fp8_flops=rates.get("gemm_fp8_flops", 0.0),
        memory_bytes=0.0,
        gemm_share=1.0,
        gemm_fp8_share=1.0,
        attention_share=1.0,
        hbm_bytes_s=rates["copy_bytes_s"],
        node_bytes_s=links,
        network_bytes_s=links,
        sources=tuple((name, "") for name in dict.fromkeys(RATES.values())),
    )
    return calibrated(base, text)


def device_of(text: str, name: str) -> str:
    """The device on which the calibration ``text`` of file ``name`` was measured.

    Raises:
        BadCalibration: the calibration is invalid; the message begins with ``name``.
    """
    try:
        device = _rates_of(text).get("device")
    except BadCalibration as error:
        raise BadCalibration(f"{name}: {error}") from None
    if not isinstance(device, str) or not device:
        raise BadCalibration(f"{name}: device: {device!r} is no name")
    return device


def _rates_of(text: str) -> dict[str, Any]:
    """The parsed calibration, with checked rates."""
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise BadCalibration(f"the calibration is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise BadCalibration(
            f"version: the calibration is not of version {VERSION}; measure again with "
            "`megascale plan calibrate`"
        )
    rates = found.get("rates")
    if not isinstance(rates, dict) or not set(rates) <= set(RATES):
        raise BadCalibration(f"rates: give some of {', '.join(RATES)}")
    for name, value in rates.items():
        if not is_positive(value):
            raise BadCalibration(f"rates.{name}: {value!r} is no positive number")
    return found


def is_positive(value: Any) -> bool:
    """True for a finite number above 0 from JSON."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def _long_sequences(tokens: object) -> float:
    """Factor from the rate of attention at ``tokens`` to its rate at long sequences."""
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise BadCalibration(f"attention_tokens: {tokens!r} is no positive number")
    return (tokens + ATTENTION_HALF_LENGTH) / tokens


def _as_gpu(gpu: Gpu, name: str, value: float) -> float:
    if name == "gemm_fp8_flops":
        if not gpu.peak_fp8_flops:
            raise BadCalibration(f"rates.{name}: {gpu.name} has no fp8")
        return value / gpu.peak_fp8_flops
    if name in ("gemm_flops", "attention_flops"):
        return value / gpu.peak_flops
    return value
