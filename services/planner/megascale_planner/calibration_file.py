"""Rates that `megascale plan calibrate` measured, in place of the datasheet's; pure.

The file is one JSON object: ``version``, ``device`` (a name), ``rates`` (a number for each of
:data:`RATES`, in FLOP/s or bytes/s) and ``how`` (what was measured, by rate). Rates that are absent
keep the datasheet's value. ``attention_tokens`` is the length that attention was measured at, and
``training`` a step of this project's trainer (:mod:`megascale_planner.training_share`).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from megascale_planner.gpus import Gpu
from megascale_planner.step_time import ATTENTION_HALF_LENGTH

VERSION = 1
# Measured rate -> what it replaces. Shares are of the device's peak.
RATES = {
    "gemm_flops": "gemm_share",
    "gemm_fp8_flops": "gemm_fp8_share",
    "attention_flops": "attention_share",
    "copy_bytes_s": "hbm_bytes_s",
    "collective_bytes_s": "node_bytes_s",
}


_ALONE = ("gemm_flops", "attention_flops", "copy_bytes_s")  # of a device that no table has


class BadCalibration(ValueError):
    """A calibration that cannot be used; the message names the field and the remedy."""


def calibrated(gpu: Gpu, text: str) -> Gpu:
    """``gpu`` with the rates of the calibration ``text``, and their sources.

    Raises:
        BadCalibration: no such file, or a rate that is no positive number.
    """
    found = _read(text)
    rates: dict[str, float] = found["rates"]
    changes = {RATES[name]: _as_gpu(gpu, name, value) for name, value in rates.items()}
    if "attention_flops" in rates:
        changes["attention_share"] *= _long_sequences(found.get("attention_tokens"))
    device, how = str(found.get("device", "a device")), found.get("how")
    notes = how if isinstance(how, dict) else {}
    replaced = {
        RATES[name]: f"measured on {device}: {notes.get(name, 'megascale plan calibrate')}"
        for name in rates
    }
    sources = tuple((name, replaced.get(name, source)) for name, source in gpu.sources)
    return replace(gpu, sources=sources, **changes)  # type: ignore[arg-type]


def calibrated_alone(text: str) -> Gpu:
    """A device that no table has, from the calibration ``text``.

    Its peak is the measured rate of products, its network as fast as its measured collectives (0:
    not measured), and its memory is not known (0).

    Raises:
        BadCalibration: as :func:`calibrated`; or a rate is absent that no table can give.
    """
    found = _read(text)
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
    """The device that the calibration ``text`` of file ``name`` was measured on.

    Raises:
        BadCalibration: it cannot be used; the message begins with ``name``.
    """
    try:
        device = _read(text).get("device")
    except BadCalibration as error:
        raise BadCalibration(f"{name}: {error}") from None
    if not isinstance(device, str) or not device:
        raise BadCalibration(f"{name}: device: {device!r} is no name")
    return device


def _read(text: str) -> dict[str, Any]:
    """The object of a calibration, its rates checked."""
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
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise BadCalibration(f"rates.{name}: {value!r} is no positive number")
    return found


def _long_sequences(tokens: object) -> float:
    """What attention at ``tokens`` is multiplied with to give its rate at long sequences."""
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
