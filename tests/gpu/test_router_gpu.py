"""The router on CUDA: the plain operator's choices, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import router as plain
from megascale_kernels.router import RouterSettings, RoutingGradients

fused = pytest.importorskip("megascale_kernels.fused.router", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "mixtral": (8, RouterSettings(2)),
    "qwen3": (128, RouterSettings(8)),
    "deepseek-v3": (256, RouterSettings(8, "sigmoid", scale=2.5, groups=8, groups_kept=4)),
    "60 experts": (60, RouterSettings(4, "sigmoid", normalise=False)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_routes_as_the_plain_one(name: str) -> None:
    experts, settings = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(1)
    logits = 2 * torch.randn(8192, experts, device="cuda", generator=generator)
    bias = 0.1 * torch.randn(experts, device="cuda", generator=generator)
    wanted = plain.choose(logits, bias, 4, settings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = fused.choose(logits, bias, 4, settings)
        again = fused.choose(logits, bias, 4, settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Scores that differ by their last bit only may change places.
    assert float((found.chosen != wanted.chosen).float().mean()) < 1e-3
    same = (found.chosen == wanted.chosen).all(-1)
    torch.testing.assert_close(found.weights[same], wanted.weights[same], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.score_sums, wanted.score_sums, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.z_sums, wanted.z_sums, rtol=1e-4, atol=1e-5)
    for one, other in zip(
        (found.chosen, found.weights, found.score_sums),
        (again.chosen, again.weights, again.score_sums),
        strict=True,
    ):
        assert torch.equal(one, other)
    slopes = RoutingGradients(
        torch.randn(found.weights.shape, device="cuda", generator=generator),
        torch.randn(found.score_sums.shape, device="cuda", generator=generator),
        torch.randn(found.z_sums.shape, device="cuda", generator=generator),
    )
    wide = RoutingGradients(
        slopes.weights.double(), slopes.score_sums.double(), slopes.z_sums.double()
    )
    exact = plain.gradient(wide, logits.double(), found.chosen, settings)
    assert relative_error(fused.gradient(slopes, logits, found.chosen, settings), exact) < 1e-5
