"""Rows on their way to experts and back: the plan, and the fused kernels against the plain ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401
from tests.harness.kernels import DEVICE, blank

from megascale_kernels import expert_rows as plain
from megascale_kernels.expert_rows import RowPlan, row_plan
from megascale_kernels.grouped_gemm import GROUP_ROWS, FlippedRows
from megascale_kernels.quantize import Operand, dequantize

pytest.importorskip("triton")


def _compile(tokens: int, top_k: int, experts: int, hidden: int, ffn: int) -> None:
    from megascale_kernels.fused import expert_rows as fused

    plan = row_plan(torch.arange(tokens * top_k).view(tokens, top_k) % experts, experts)
    rows, x, weights = tokens * top_k, blank(tokens, hidden), torch.ones(tokens * top_k)
    fused.join(fused.spread(x, plan), plan)
    fused.flip(fused.spread_in_fp8(x, plan), plan.groups)
    h, d_result = blank(rows, 2 * ffn), blank(rows, ffn)
    fused.activate(h, weights)
    fused.activate_in_fp8(h, weights)
    fused.activation_gradient(d_result, h, weights)
    fused.activation_gradient_in_fp8(d_result, h, weights)


COMPILED = {
    "experts of Qwen3-30B-A3B": lambda: _compile(256, 8, 128, 2048, 768),
    "experts of Mixtral": lambda: _compile(256, 2, 8, 4096, 14336),
}


def _chosen(tokens: int, top_k: int, experts: int, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]


def _plan(tokens: int, top_k: int, experts: int, *, seed: int = 1) -> RowPlan:
    return row_plan(_chosen(tokens, top_k, experts, seed=seed).to(DEVICE), experts)


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _is_plan_of(plan: RowPlan, chosen: torch.Tensor, experts: int) -> None:
    """Against a list of (expert, position of the token, choice), sorted in Python."""
    tokens, top_k = chosen.shape
    order = sorted(
        (int(chosen[token, number]), token, number)
        for token in range(tokens)
        for number in range(top_k)
    )
    assert plan.source.tolist() == [token for _, token, _ in order]
    assert plan.choice.tolist() == [token * top_k + number for _, token, number in order]
    for row, (_, token, number) in enumerate(order):
        assert int(plan.place[token, number]) == row
    counts = [sum(expert == one for expert, _, _ in order) for one in range(experts)]
    offsets = plan.groups.offsets.tolist()
    assert offsets == [sum(counts[:one]) for one in range(experts + 1)]
    groups = [-(-count // GROUP_ROWS) for count in counts]
    starts = plan.groups.starts.tolist()
    assert starts == [sum(groups[:one]) for one in range(experts + 1)]
    most = len(order) // GROUP_ROWS + experts
    owners = [one for one, count in enumerate(groups) for _ in range(count)]
    assert plan.groups.expert.tolist() == owners + [experts] * (most - len(owners))
    for tensor in (plan.groups.offsets, plan.groups.starts, plan.groups.expert, plan.source):
        assert tensor.dtype == torch.int32


@settings(max_examples=30, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 300), experts=st.integers(1, 12))
def test_rows_are_ordered_by_expert_and_position(
    data: st.DataObject, tokens: int, experts: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    chosen = _chosen(tokens, top_k, experts, seed=data.draw(st.integers(0, 9)))
    _is_plan_of(row_plan(chosen, experts), chosen, experts)


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_choose_one_expert(expert: int) -> None:
    chosen = torch.full((200, 1), expert)
    _is_plan_of(row_plan(chosen, 8), chosen, 8)


@pytest.mark.parametrize(
    "shape",
    [(50, 3, 8, 256), (7, 1, 4, 40), pytest.param((33, 8, 128, 200), marks=pytest.mark.slow)],
)
def test_there_and_back(shape: tuple[int, int, int, int]) -> None:
    from megascale_kernels.fused import expert_rows as fused

    tokens, top_k, experts, hidden = shape
    plan = _plan(tokens, top_k, experts)
    x = _random(tokens, hidden + 8)[:, 8:]  # rows of a wider matrix
    rows = plain.spread(x, plan)
    assert torch.equal(fused.spread(x, plan), rows)
    weights = _random(tokens, top_k, dtype=torch.float32, seed=2)
    y = _random(rows.shape[0], hidden, seed=3)
    # bf16 has 8 bits: one rounding at the end may differ.
    torch.testing.assert_close(fused.join(y, plan), plain.join(y, plan), rtol=8e-3, atol=1e-6)
    torch.testing.assert_close(
        fused.join(y, plan, weights), plain.join(y, plan, weights), rtol=8e-3, atol=1e-6
    )


@settings(max_examples=20, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 40), experts=st.integers(2, 12))
def test_rows_of_experts_elsewhere_are_neither_written_nor_read(
    data: st.DataObject, tokens: int, experts: int
) -> None:
    from megascale_kernels.fused import expert_rows as fused

    top_k = data.draw(st.integers(1, experts))
    first = data.draw(st.integers(0, experts - 1))
    here = data.draw(st.integers(1, experts - first))
    chosen = _chosen(tokens, top_k, experts, seed=data.draw(st.integers(0, 9)))
    whole, plan = row_plan(chosen, experts), row_plan(chosen, here, first)
    end = int(plan.end)
    begin = int(whole.groups.offsets[first])
    assert plan.groups.offsets.tolist() == [
        int(offset) - begin for offset in whole.groups.offsets[first : first + here + 1]
    ]
    assert torch.equal(plan.choice[:end], whole.choice[begin : begin + end])
    x = _random(tokens, 24)
    assert torch.equal(fused.spread(x, plan)[:end], plain.spread(x, plan)[:end])
    rows = _random(tokens * top_k, 24, seed=4)
    rows[end:] = torch.nan
    joined = plain.join(rows, plan)
    assert joined.isfinite().all()
    torch.testing.assert_close(fused.join(rows, plan), joined, rtol=8e-3, atol=1e-6)
    inside = (chosen >= first) & (chosen < first + here)
    assert torch.equal(plan.here, inside)


def test_spread_and_join_are_each_others_backward() -> None:
    plan = _plan(20, 3, 5)
    x = _random(20, 16, dtype=torch.float32).requires_grad_()
    gradient = _random(60, 16, dtype=torch.float32, seed=2)
    torch.autograd.backward(plain.spread(x, plan), gradient)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, plain.join(gradient, plan))


def _is_same(found: Operand, wanted: Operand) -> None:
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))


@pytest.mark.usefixtures("right_fp8_conversion")
@pytest.mark.parametrize("shape", [(50, 3, 8, 256), (200, 2, 3, 72)])
def test_rows_in_fp8(shape: tuple[int, int, int, int]) -> None:
    from megascale_kernels.fused import expert_rows as fused

    tokens, top_k, experts, hidden = shape
    plan = _plan(tokens, top_k, experts)
    x = _random(tokens, hidden)
    x[tokens // 2] *= 30
    wanted = plain.spread_in_fp8(x, plan)
    found = fused.spread_in_fp8(x, plan)
    _is_same(found, wanted)
    _is_flipped(fused.flip(found, plan.groups), plain.flip(wanted, plan.groups), plan)


def _is_flipped(found: FlippedRows, wanted: FlippedRows, plan: RowPlan) -> None:
    """Equal bits up to the last group; the memory behind it is nobody's."""
    assert torch.equal(found.scale, wanted.scale)
    used = int(plan.groups.starts[-1]) * GROUP_ROWS
    assert torch.equal(
        found.data.view(torch.uint8)[:, :used], wanted.data.view(torch.uint8)[:, :used]
    )


@pytest.mark.usefixtures("right_fp8_conversion")
def test_a_transposed_copy_holds_the_values_of_the_rows() -> None:
    from megascale_kernels.fused import expert_rows as fused

    chosen = torch.tensor([[0], [2], [2], [0]] * 40, device=DEVICE)  # expert 1 and 3 have no rows
    plan = row_plan(chosen, 4)
    rows = fused.spread_in_fp8(_random(160, 64), plan)
    flipped = fused.flip(rows, plan.groups)
    values = dequantize(rows.over_columns())
    for expert in range(4):
        begin, end = plan.groups.offsets[expert : expert + 2].tolist()
        first, last = (plan.groups.starts[expert : expert + 2] * GROUP_ROWS).tolist()
        own = flipped.data[:, first:last].float() * flipped.scale[expert]
        # Values at the lower end of FP8's range round a second time: half of its smallest number.
        torch.testing.assert_close(
            own[:, : end - begin],
            values[begin:end].t(),
            rtol=0.0,
            atol=float(flipped.scale[expert]) * 2**-10,
        )
        assert not own[:, end - begin :].any()
    assert flipped.scale[[1, 3]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [64, 200])
def test_activation(width: int, weighted: bool) -> None:
    from megascale_kernels.fused import expert_rows as fused

    h, d_result = _random(30, 2 * width), _random(30, width, seed=2)
    weights = _random(30, dtype=torch.float32, seed=3) if weighted else None
    torch.testing.assert_close(
        fused.activate(h, weights), plain.activate(h, weights), rtol=8e-3, atol=1e-5
    )
    found, d_weights = fused.activation_gradient(d_result, h, weights)
    wanted, right = plain.activation_gradient(d_result, h, weights)
    torch.testing.assert_close(found, wanted, rtol=8e-3, atol=1e-5)
    if weighted:
        torch.testing.assert_close(d_weights, right, rtol=1e-4, atol=1e-4)
    else:
        assert d_weights is None


@pytest.mark.usefixtures("right_fp8_conversion")
def test_activation_in_fp8() -> None:
    from megascale_kernels.fused import expert_rows as fused

    h, d_result = _random(30, 400), _random(30, 200, seed=2)
    weights = _random(30, dtype=torch.float32, seed=3)
    found, wanted = fused.activate_in_fp8(h, weights), plain.activate_in_fp8(h, weights)
    torch.testing.assert_close(found.scale, wanted.scale)
    # e4m3 has 4 bits: a value in the middle of two may go either way.
    ours, theirs = dequantize(found.over_columns()), dequantize(wanted.over_columns())
    torch.testing.assert_close(ours, theirs, rtol=0.13, atol=1e-3)
    gradient, d_weights = fused.activation_gradient_in_fp8(d_result, h, weights)
    wanted, right = plain.activation_gradient_in_fp8(d_result, h, weights)
    torch.testing.assert_close(gradient.scale, wanted.scale)
    torch.testing.assert_close(
        dequantize(gradient.over_columns()),
        dequantize(wanted.over_columns()),
        rtol=0.13,
        atol=float(wanted.scale.max()) * 2**-8,
    )
    torch.testing.assert_close(d_weights, right, rtol=1e-4, atol=1e-4)


def test_a_broken_value_breaks_the_scale_of_its_row() -> None:
    from megascale_kernels.fused import expert_rows as fused

    plan = _plan(8, 2, 4)
    x = _random(8, 32)
    x[3, 4] = float("nan")
    for scale in (fused.spread_in_fp8(x, plan).scale, plain.spread_in_fp8(x, plan).scale):
        assert scale.isnan().tolist() == [token == 3 for token in plan.source.tolist()]
