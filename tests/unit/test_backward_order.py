"""The order that overlapping data parallelism relies on is counted in the first backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.training import tiny_job
from tests.unit.test_overlapped_data import _backward_passes, _groups, _Recorder

from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import parameter_table
from megascale_trainer.parallel.data.buffers import Place
from megascale_trainer.parallel.data.overlapped_buffers import (
    BackwardOrder,
    OverlappedBuffers,
    WrongOrder,
)
from megascale_trainer.weights import Weight, WeightGradients


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, unit: str, order: BackwardOrder) -> torch.Tensor:
        ctx.unit, ctx.order = unit, order
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.order.left(ctx.unit)
        return gradient, None, None


def _weight() -> Weight:
    value = torch.full((3,), 2.0)
    return Weight(value.requires_grad_(), torch.zeros(3))


def _unit(order: BackwardOrder, weights: list[Weight], early: bool) -> torch.Tensor:
    """One unit with its weights; ``early``: one is made before the boundary and so runs late."""
    hidden = torch.ones(3, requires_grad=True)
    used = [weights[0].tracked()] if early else []
    passed: torch.Tensor = _Boundary.apply(hidden, "layer 1", order)  # type: ignore[no-untyped-call]
    for weight in weights[len(used) :]:
        passed = passed * weight.tracked()
    for tracked in used:
        passed = passed * tracked
    order.watch(passed)
    return passed


def test_what_runs_before_the_boundary_is_counted() -> None:
    order, weights = BackwardOrder(_Boundary), [_weight(), _weight()]
    _unit(order, weights, early=False).sum().backward()
    assert order.expected == {"layer 1": 2}
    assert all(bool(weight.main_grad.any()) for weight in weights)


def test_a_weight_whose_gradient_comes_late_is_an_error() -> None:
    order, weights = BackwardOrder(_Boundary), [_weight(), _weight()]
    out = _unit(order, weights, early=True)
    with pytest.raises(WrongOrder, match=r"left layer 1 when 1 of its 2 operators .*overlap.dp"):
        out.sum().backward()


def test_only_the_first_backward_of_a_unit_is_watched() -> None:
    order, weights = BackwardOrder(_Boundary), [_weight(), _weight()]
    _unit(order, weights, early=False).sum().backward()
    _unit(order, weights, early=True).sum().backward()


@pytest.mark.parametrize("block", ["parallel", "serial"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_units_of_a_model_are_counted_but_its_ends(block: str, recompute: str) -> None:
    config = from_accepted(
        tiny_job(model={"layers": 4, "block": block}, parallelism={"recompute": recompute})
    )
    table = parameter_table(config, 0)
    buffers = OverlappedBuffers(
        Place(table, torch.float32, torch.device("cpu"), _groups(_Recorder())),
        micro_batches=2,
        weight_gradients=WeightGradients(),
    )
    _backward_passes(config, table, buffers)
    units = [unit for chunk in table.chunks for unit in chunk.units]
    counted = buffers._order.expected
    assert set(counted) == set(units[1:-1]), counted
    if recompute == "none":
        assert min(counted.values()) >= 3, counted  # a norm and two products at least
