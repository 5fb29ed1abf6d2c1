"""The memory estimate of a job with fused kernels against what autograd really keeps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.kept_memory import kept_bytes, layers_job
from tests.harness.kernels import DEVICE

from megascale_job.loading import from_accepted
from megascale_job.sizes.memory import rank_memory
from megascale_kernels.operators import triton_operators

pytest.importorskip("triton")

SWIGLU = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "kv_heads": 2}
OVER_PROJECTION = {"qk_norm": True, "qk_norm_over": "projection"}


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({}, "none"),
        pytest.param({"block": "serial"}, "selective", marks=pytest.mark.slow),
        pytest.param({"block": "serial", **SWIGLU}, "none", marks=pytest.mark.slow),
        pytest.param(SWIGLU, "none", marks=pytest.mark.slow),
        pytest.param(SWIGLU, "full", marks=pytest.mark.slow),
        pytest.param(
            {"block": "serial", **SWIGLU, **OVER_PROJECTION}, "none", marks=pytest.mark.slow
        ),
        pytest.param({**SWIGLU, **OVER_PROJECTION}, "selective", marks=pytest.mark.slow),
    ],
    ids=[
        "parallel",
        "serial, selective recompute",
        "serial, swiglu",
        "swiglu",
        "swiglu, full recompute",
        "serial, q and k normalised over all heads",
        "q and k normalised over all heads, selective recompute",
    ],
)
def test_activations_of_a_layer(model: dict[str, Any], recompute: str) -> None:
    few, many = (layers_job(layers, model, recompute=recompute) for layers in (1, 2))
    for job in (few, many):
        job["training"]["kernels"] = "triton"
    measured = kept_bytes(many, triton_operators(), DEVICE) - kept_bytes(
        few, triton_operators(), DEVICE
    )
    estimate = [rank_memory(from_accepted(job), 0).activations_bytes for job in (few, many)]
    assert estimate[1] - estimate[0] == pytest.approx(measured, rel=0.03)
