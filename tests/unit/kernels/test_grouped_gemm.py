"""GEMMs of experts: the plain loops against float64, the fused kernels against the plain loops.

Triton's interpreter multiplies float32 alone (and FP8): bf16 is compared on a GPU
(tests/gpu/test_grouped_gemm_gpu.py). Tiles are smaller here, so that a few rows make several.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.harness.descriptors import sums_through_descriptors  # noqa: F401
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401
from tests.harness.kernels import DEVICE, blank, relative_error

from megascale_kernels import expert_rows
from megascale_kernels import grouped_gemm as plain
from megascale_kernels.grouped_gemm import GROUP_ROWS, ExpertGroups, expert_groups
from megascale_kernels.quantize import E4M3, Factor, Operand, dequantize, quantize

pytest.importorskip("triton")


def _compile(experts: int, rows: int, hidden: int, ffn: int) -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    counts = [rows // experts] * experts
    groups = expert_groups(torch.tensor([0, *counts]).cumsum(0).int(), rows)
    x, w, y = blank(rows, hidden), blank(experts, ffn, hidden), blank(rows, ffn)
    fused.multiply(Factor(x, None), Factor(w, None), groups, y)
    fused.multiply(Factor(y, None), Factor(w, None), groups, x, over_rows=True)
    scaled = Factor(x.to(E4M3), torch.ones(rows))
    weights = Factor(w.to(E4M3), torch.ones(experts, ffn))
    for fast in (True, False):
        fused.multiply(scaled, weights, groups, y, fast=fast)
    gradient = torch.zeros(w.shape)
    for accumulate in (True, False):
        fused.add_weight_gradients(y, x, groups, gradient, accumulate=accumulate)
        fused.add_weight_gradients_in_fp8(
            *(_flipped(y, groups), _flipped(x, groups), groups, gradient), accumulate=accumulate
        )


def _flipped(x: torch.Tensor, groups: ExpertGroups) -> plain.FlippedRows:
    return expert_rows.flip(Operand(x.to(E4M3), torch.ones(x.shape[0])), groups)


COMPILED = {"grouped gemm": lambda: _compile(4, 1024, 2048, 1536)}
# Rows of each expert: some have none, one has all, none has any.
LOADS = [(40, 0, 7, 165, 0, 33), (0, 0, 128), (130, 0), (5, 3, 1, 0), (0, 0)]


def _groups(counts: Sequence[int]) -> ExpertGroups:
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    return expert_groups(offsets, sum(counts))


def _random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    for name, depth in (("_ROWS_TILE", 32), ("_ROWS_TILE_FP8", 32), ("_ROWS_TILE_EXACT", 128)):
        monkeypatch.setattr(fused, name, fused.Tile(GROUP_ROWS, 32, depth, stages=1))
    tile = fused.Tile(GROUP_ROWS, 32, 32, stages=1, parts=1)
    monkeypatch.setattr(fused, "_OVER_ROWS_TILE", tile)
    tile = fused.Tile(32, 32, 32, stages=1, parts=4)
    monkeypatch.setattr(fused, "_WEIGHTS_TILE", tile)


pytestmark = pytest.mark.usefixtures(
    "_small_tiles", "sums_through_descriptors", "right_fp8_conversion"
)


@pytest.mark.parametrize("counts", LOADS)
def test_groups_of_rows(counts: tuple[int, ...]) -> None:
    groups = _groups(counts)
    each = [-(-count // GROUP_ROWS) for count in counts]
    assert groups.starts.tolist() == [sum(each[:one]) for one in range(len(counts) + 1)]
    owners = [expert for expert, number in enumerate(each) for _ in range(number)]
    assert groups.expert.tolist()[: len(owners)] == owners
    assert set(groups.expert.tolist()[len(owners) :]) <= {len(counts)}
    assert len(owners) <= groups.expert.numel() == sum(counts) // GROUP_ROWS + len(counts)


@pytest.mark.parametrize("counts", LOADS)
def test_plain_loops_are_products_in_float64(counts: tuple[int, ...]) -> None:
    groups, rows = _groups(counts), sum(counts)
    x, w, dy = _random(rows, 24), _random(len(counts), 40, 24, seed=2), _random(rows, 40, seed=3)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(DEVICE)
    y, dx = torch.empty(rows, 40, device=DEVICE), torch.empty(rows, 24, device=DEVICE)
    plain.multiply(Factor(x, None), Factor(w, None), groups, y)
    plain.multiply(Factor(dy, None), Factor(w, None), groups, dx, over_rows=True)
    exact = torch.einsum("rk,rnk->rn", x.double(), w.double()[owner])
    assert relative_error(y, exact) < 1e-5
    assert relative_error(dx, torch.einsum("rn,rnk->rk", dy.double(), w.double()[owner])) < 1e-5
    each = torch.einsum("rn,rk->rnk", dy.double(), x.double())
    right = torch.zeros(w.shape, dtype=torch.float64, device=DEVICE).index_add(0, owner, each)
    for accumulate in (False, True):
        found = torch.ones(w.shape, device=DEVICE)
        plain.add_weight_gradients(dy, x, groups, found, accumulate=accumulate)
        assert relative_error(found, right + float(accumulate)) < 1e-5


@pytest.mark.parametrize("shape", [pytest.param((64, 96), marks=pytest.mark.slow), (40, 72)])
@pytest.mark.parametrize("counts", LOADS)
def test_products(counts: tuple[int, ...], shape: tuple[int, int]) -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    width, depth = shape
    groups, rows = _groups(counts), sum(counts)
    x, dy = _random(rows, depth), _random(rows, width, seed=3)
    w = _random(len(counts), width, depth, seed=2)
    results = []
    for module in (plain, fused):
        # An element that is not written stays NaN.
        y, dx = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan)
        module.multiply(Factor(x, None), Factor(w, None), groups, y)
        module.multiply(Factor(dy, None), Factor(w, None), groups, dx, over_rows=True)
        added, written = torch.ones_like(w), torch.full_like(w, torch.nan)
        module.add_weight_gradients(dy, x, groups, added)
        module.add_weight_gradients(dy, x, groups, written, accumulate=False)
        results.append((y, dx, added, written))
    for found, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", LOADS[:-1])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_products_in_fp8(counts: tuple[int, ...], fast: bool) -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    groups, rows = _groups(counts), sum(counts)
    x, dy = _random(rows, 64), _random(rows, 48, seed=3)
    w = quantize(_random(len(counts) * 48, 64, seed=2), per="row")
    weights = Factor(w.data.view(len(counts), 48, 64), w.scale.view(len(counts), 48))
    left = quantize(x, per="row", power_of_two=True)
    gradient = quantize(dy, per="row", power_of_two=True)
    flipped = expert_rows.flip(gradient, groups), expert_rows.flip(left, groups)
    results = []
    for module in (plain, fused):
        y = torch.full_like(dy, torch.nan)
        if module is fused:
            fused.multiply(left.over_columns(), weights, groups, y, fast=fast)
        else:
            plain.multiply(left.over_columns(), weights, groups, y)
        added = torch.ones(len(counts), 48, 64, device=DEVICE)
        written = torch.full_like(added, torch.nan)
        module.add_weight_gradients_in_fp8(*flipped, groups, added)
        module.add_weight_gradients_in_fp8(*flipped, groups, written, accumulate=False)
        results.append((y, added, written))
    for found, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # And the transposed copies hold what the rows hold.
    exact = torch.zeros(len(counts), 48, 64, device=DEVICE)
    values = dequantize(gradient.over_columns()), dequantize(left.over_columns())
    plain.add_weight_gradients(*values, groups, exact)
    torch.testing.assert_close(results[0][2], exact, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["rows", "weights", "out"])
def test_rows_that_bulk_copies_cannot_address_are_refused(name: str) -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    shapes = {"rows": (4, 16), "weights": (1, 32, 16), "out": (4, 32)}
    made = {key: torch.zeros(shape, device=DEVICE) for key, shape in shapes.items()}
    broken = torch.zeros(*shapes[name][:-1], shapes[name][-1] + 1, device=DEVICE)
    made[name] = broken[..., :-1]
    with pytest.raises(ValueError, match=f"{name} of shape .* multiples of 4"):
        factors = Factor(made["rows"], None), Factor(made["weights"], None)
        fused.multiply(*factors, _groups((4,)), made["out"])


def test_weights_in_fp8_are_not_read_over_their_rows() -> None:
    from megascale_kernels.fused import grouped_gemm as fused

    rows = Factor(torch.zeros(4, 16, device=DEVICE).to(E4M3), torch.ones(4, device=DEVICE))
    weights = Factor(torch.zeros(1, 16, 32, device=DEVICE).to(E4M3), torch.ones(1, 32))
    with pytest.raises(ValueError, match="must be transposed"):
        fused.multiply(rows, weights, _groups((4,)), torch.empty(4, 32), over_rows=True)
