"""Rows to experts and back on CUDA: the plain operators' values, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import expert_rows as plain
from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.grouped_gemm import GROUP_ROWS
from megascale_kernels.quantize import dequantize

fused = pytest.importorskip("megascale_kernels.fused.expert_rows", exc_type=ImportError)

CUDA = torch.device("cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).bfloat16()


def _plan(tokens: int, top_k: int, experts: int) -> RowPlan:
    return row_plan(torch.rand(tokens, experts, device=CUDA).topk(top_k).indices, experts)


@pytest.mark.parametrize("shape", [(4096, 8, 128, 2048), (1000, 2, 8, 4096), (77, 6, 64, 1000)])
def test_there_and_back(shape: tuple[int, int, int, int]) -> None:
    tokens, top_k, experts, hidden = shape
    plan = _plan(tokens, top_k, experts)
    x, rows = _random(tokens, hidden), _random(tokens * top_k, hidden)
    assert torch.equal(fused.spread(x, plan), plain.spread(x, plan))
    exact = plain.join(rows.double(), plan)
    joined = fused.join(rows, plan)
    assert relative_error(joined, exact) < 2e-3
    assert torch.equal(joined, fused.join(rows, plan))
    found, wanted = fused.spread_in_fp8(x, plan), plain.spread_in_fp8(x, plan)
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    ours, theirs = fused.flip(found, plan.groups), plain.flip(wanted, plan.groups)
    used = int(plan.groups.starts[-1]) * GROUP_ROWS
    assert torch.equal(ours.scale, theirs.scale)
    assert torch.equal(
        ours.data.view(torch.uint8)[:, :used], theirs.data.view(torch.uint8)[:, :used]
    )


@pytest.mark.parametrize("width", [768, 1408, 14336])
def test_activation(width: int) -> None:
    h, d_result = _random(1000, 2 * width), _random(1000, width)
    weights = torch.rand(1000, device=CUDA)
    exact = plain.activate(h.double(), weights.double())
    assert relative_error(fused.activate(h, weights), exact) < 3e-3
    assert (
        relative_error(dequantize(fused.activate_in_fp8(h, weights).over_columns()), exact) < 0.04
    )
    right, right_weights = plain.activation_gradient(d_result, h.double(), weights)
    assert right_weights is not None
    found, d_weights = fused.activation_gradient(d_result, h, weights)
    assert d_weights is not None
    assert relative_error(found, right) < 3e-3
    assert relative_error(d_weights, right_weights) < 1e-4
    in_fp8, again = fused.activation_gradient_in_fp8(d_result, h, weights)
    assert again is not None
    assert relative_error(dequantize(in_fp8.over_columns()), right) < 0.04
    assert relative_error(again, d_weights.double()) < 1e-6


def test_one_graph_serves_every_routing() -> None:
    """Plan, rows and activation neither wait for the device nor depend on what was chosen."""
    tokens, top_k, experts, hidden = 512, 4, 16, 256
    x, chosen = _random(tokens, hidden), torch.zeros(tokens, top_k, dtype=torch.int64, device=CUDA)
    chosen.copy_(torch.rand(tokens, experts, device=CUDA).topk(top_k).indices)

    def run() -> torch.Tensor:
        plan = row_plan(chosen, experts)
        return fused.join(fused.activate(fused.spread(x, plan), None), plan)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for kept in (experts, top_k):  # any experts, then the same few for all tokens
        chosen.copy_(torch.rand(tokens, kept, device=CUDA).topk(top_k).indices)
        graph.replay()
        assert relative_error(result, _expected(x, top_k)) < 1e-2


def _expected(x: torch.Tensor, top_k: int) -> torch.Tensor:
    """Without weights all of a token's rows are equal, whatever it chose."""
    return top_k * plain.activate(x.double(), None)
