"""GEMMs of experts on Hopper: against float32 and torch's own, at any load, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import grouped_gemm as plain
from megascale_kernels.grouped_gemm import ExpertGroups, expert_groups
from megascale_kernels.quantize import Factor, dequantize, quantize

rows_kernels = pytest.importorskip("megascale_kernels.fused.expert_rows", exc_type=ImportError)
fused = pytest.importorskip("megascale_kernels.fused.grouped_gemm", exc_type=ImportError)
fused_quantize = pytest.importorskip("megascale_kernels.fused.quantize", exc_type=ImportError)

CUDA = torch.device("cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

LOADS = {
    "even": [512] * 8,
    "uneven": [0, 3, 1000, 129, 127, 1, 0, 2836],
    "one has all": [0, 0, 4096, 0],
    "small": [5, 0, 7],
}
SHAPES = [(1536, 2048), (2048, 768), (264, 136)]  # width, depth
BF16_ROUNDING = 2e-3
# Tensor cores align the summands of FP8 before they add them.
SUM_ERROR = {True: 4e-3, False: 2e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False


def _groups(counts: Sequence[int]) -> ExpertGroups:
    offsets = torch.tensor([0, *counts], device=CUDA).cumsum(0).to(torch.int32)
    return expert_groups(offsets, sum(counts))


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device=CUDA)).bfloat16()


def _blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An element that is not written stays NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", LOADS)
def test_products(load: str, shape: tuple[int, int]) -> None:
    counts, (width, depth) = LOADS[load], shape
    groups, rows = _groups(counts), sum(LOADS[load])
    x, dy = _random(rows, depth), _random(rows, width)
    w = _random(len(counts), width, depth)
    for left, size, over_rows in ((x, width, False), (dy, depth, True)):
        found, exact = _blank(rows, size), _blank(rows, size, dtype=torch.float32)
        factors = Factor(left, None), Factor(w, None)
        fused.multiply(*factors, groups, found, over_rows=over_rows)
        plain.multiply(*factors, groups, exact, over_rows=over_rows)
        assert relative_error(found, exact) < BF16_ROUNDING
    for accumulate in (True, False):
        exact = torch.ones(w.shape, device=CUDA)
        plain.add_weight_gradients(dy, x, groups, exact, accumulate=accumulate)
        repeats = []
        for _ in range(2):
            found = torch.ones(w.shape, device=CUDA) if accumulate else _blank(*w.shape).float()
            fused.add_weight_gradients(dy, x, groups, found, accumulate=accumulate)
            assert relative_error(found, exact) < 2e-5
            repeats.append(found)
        assert torch.equal(*repeats)


@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (272, 144)])
@pytest.mark.parametrize("load", LOADS)
def test_products_in_fp8(load: str, shape: tuple[int, int]) -> None:
    counts, (width, depth) = LOADS[load], shape
    groups, rows = _groups(counts), sum(LOADS[load])
    x, dy = _random(rows, depth), _random(rows, width)
    x[rows // 2] *= 100
    w = quantize(_random(len(counts) * width, depth), per="row")
    weights = Factor(w.data.view(len(counts), width, depth), w.scale.view(len(counts), width))
    left = fused_quantize.quantize_rows(x)
    exact = _blank(rows, width, dtype=torch.float32)
    plain.multiply(left.over_columns(), weights, groups, exact)
    for fast in (True, False):
        found = _blank(rows, width)
        fused.multiply(left.over_columns(), weights, groups, found, fast=fast)
        assert relative_error(found, exact) < SUM_ERROR[fast]
    of_dy, of_x = (rows_kernels.flip(fused_quantize.quantize_rows(one), groups) for one in (dy, x))
    for accumulate in (True, False):
        shaped = (len(counts), width, depth)
        right = torch.ones(shaped, device=CUDA)
        plain.add_weight_gradients_in_fp8(of_dy, of_x, groups, right, accumulate=accumulate)
        repeats = []
        for _ in range(2):
            added = torch.ones(shaped, device=CUDA) if accumulate else _blank(*shaped).float()
            fused.add_weight_gradients_in_fp8(of_dy, of_x, groups, added, accumulate=accumulate)
            assert relative_error(added, right) < SUM_ERROR[True]
            repeats.append(added)
        assert torch.equal(*repeats)


def test_exact_sums_of_fp8_are_nearer_over_a_long_sum() -> None:
    """What the experts' second product needs (docs/evidence.md): it is 14,336 long in Mixtral."""
    groups, depth, width = _groups([256, 256]), 14336, 256
    left = fused_quantize.quantize_rows(_random(512, depth))
    w = quantize(_random(2 * width, depth), per="row")
    weights = Factor(w.data.view(2, width, depth), w.scale.view(2, width))
    exact = torch.empty(512, width, device=CUDA)
    plain.multiply(left.over_columns(), weights, groups, exact)
    errors = {}
    for fast in (True, False):
        found = _blank(512, width)
        fused.multiply(left.over_columns(), weights, groups, found, fast=fast)
        errors[fast] = relative_error(found, exact)
    assert errors[False] < 1.8e-3 < 1.2 * errors[False] < errors[True]


def test_a_broken_row_stays_with_its_expert() -> None:
    groups = _groups([100, 200, 84])
    x, w, dy = _random(384, 256), _random(3, 512, 256), _random(384, 512)
    x[120, 3] = torch.nan
    y, added = _blank(384, 512), torch.zeros(3, 512, 256, device=CUDA)
    fused.multiply(Factor(x, None), Factor(w, None), groups, y)
    assert y.isnan().any(-1).nonzero().flatten().tolist() == [120]
    fused.add_weight_gradients(dy, x, groups, added)
    assert added.isnan().flatten(1).any(-1).tolist() == [False, True, False]


def test_other_loads_need_no_other_graph() -> None:
    """Static shapes and counts on the device: one capture serves every routing."""
    experts, rows, width, depth = 4, 1024, 512, 256
    x, w, y = _random(rows, depth), _random(experts, width, depth), _blank(rows, width)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=CUDA)

    def run() -> None:
        groups = expert_groups(offsets, rows)
        fused.multiply(Factor(x, None), Factor(w, None), groups, y)

    offsets[1:] = rows
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for counts in ([256] * 4, [0, 1000, 24, 0], [1, 2, 3, 1018]):
        offsets.copy_(torch.tensor([0, *counts]).cumsum(0))
        y.fill_(torch.nan)
        graph.replay()
        exact = torch.empty(rows, width, device=CUDA)
        plain.multiply(Factor(x, None), Factor(w, None), _groups(counts), exact)
        assert relative_error(y, exact) < BF16_ROUNDING


def test_transposed_copies_hold_the_rows() -> None:
    groups = _groups([3, 0, 200, 53])
    rows = fused_quantize.quantize_rows(_random(256, 192))
    flipped = rows_kernels.flip(rows, groups)
    values = dequantize(rows.over_columns())
    offsets, starts = groups.offsets.tolist(), (groups.starts * plain.GROUP_ROWS).tolist()
    for expert in range(4):
        begin, end = offsets[expert], offsets[expert + 1]
        own = flipped.data[:, starts[expert] : starts[expert + 1]].float() * flipped.scale[expert]
        # Values at the lower end of FP8's range round a second time: half of its smallest number.
        torch.testing.assert_close(
            own[:, : end - begin],
            values[begin:end].t(),
            rtol=0.0,
            atol=float(flipped.scale[expert]) * 2**-10,
        )
        assert not own[:, end - begin :].any()
