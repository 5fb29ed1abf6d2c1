"""LAMB's trust ratio of every matrix, cut over the ranks of any layout, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.harness.piece_layouts import Section, jobs
from tests.harness.properties import examples

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import ParameterTable, matrix_counts, parameter_table
from megascale_trainer.optimizer.adamw import AdamW
from megascale_trainer.optimizer.interface import Optimizer, OptimizerFactory, OptimizerSetup
from megascale_trainer.optimizer.lamb import Lamb
from megascale_trainer.optimizer.step_control import StepControl

Whole = dict[str, NDArray[Any]]
RATE, EPSILON, DECAY, BETA1, BETA2, UPDATES = 0.05, 1e-6, 0.1, 0.9, 0.95, 2
SETTINGS = {"name": "lamb", "epsilon": EPSILON, "weight_decay": DECAY}
EXPERTS: Section = {
    "layers": 3,
    "hidden_size": 16,
    "heads": 4,
    "vocab_size": 20,
    "sequence_length": 8,
    "block": "serial",
    "mlp": "swiglu",
    "experts": {"count": 12, "ffn_size": 5, "dense_layers": 1, "bias_rate": 0.001},
}
GRIDS: list[Section] = [
    {},
    {"dp": 4, "ep": 4},
    {"tp": 2, "dp": 2, "ep": 2},
    {"pp": 3, "dp": 2, "ep": 2},  # the first stage has no experts
]


class _Rank:
    """One rank's shard and its optimizer; sums over ranks are made by :func:`_update`."""

    def __init__(self, config: JobConfig, rank: int, factory: OptimizerFactory) -> None:
        self.table = parameter_table(config, rank)
        self.states = torch.zeros((3, self.table.shard_elements))
        matrices = matrix_counts(config.model)
        self.all_reduce: Callable[[torch.Tensor], None] = lambda vector: None
        self.optimizer: Optimizer = factory(
            OptimizerSetup(
                config.optimizer,
                self.table,
                self.states,
                "torch",
                matrices,
                self._sum,
            )
        )

    def _sum(self, vector: torch.Tensor) -> None:
        self.all_reduce(vector)

    def update(self, gradients: Whole, number: int) -> None:
        """Update the shard by its part of ``gradients``; its parameters are the masters."""
        flat = torch.zeros(self.table.shard_elements)
        _scatter(self.table, gradients, flat)
        ranges = self.table.shard_ranges
        sizes = [owned.stop - owned.start for owned in ranges]
        one, none = torch.ones(()), torch.zeros((), dtype=torch.float64)
        control = StepControl(one, one, one, one, none, none)
        parameters = [shard.clone() for shard in self.states[0].split(sizes)]
        self.optimizer.update(list(flat.split(sizes)), parameters, control, RATE, number)


def _scatter(table: ParameterTable, values: Whole, flat: torch.Tensor) -> None:
    """Write the rank's part of whole parameters into its flat shard."""
    for owned, piece, start, stop in table.overlaps():
        place = owned.shard_offset + start - owned.start
        first = piece.global_offset + start - piece.offset
        part = values[piece.name].reshape(-1)[first : first + stop - start]
        flat[place : place + stop - start] = torch.from_numpy(part.astype(np.float32))


def _gathered(ranks: list[_Rank], values: Whole) -> Whole:
    """Whole parameters out of all shards; what several ranks hold must be equal on them."""
    found = {name: np.full(value.size, np.nan) for name, value in values.items()}
    for rank in ranks:
        for owned, piece, start, stop in rank.table.overlaps():
            place = owned.shard_offset + start - owned.start
            first = piece.global_offset + start - piece.offset
            there = found[piece.name][first : first + stop - start]
            mine = rank.states[0, place : place + stop - start].double().numpy()
            assert np.all(np.isnan(there) | (there == mine)), f"{piece.name}: replicas differ"
            there[:] = mine
    return {name: found[name].reshape(value.shape) for name, value in values.items()}


def _update(ranks: list[_Rank], gradients: Whole, number: int) -> None:
    """One update of all ranks: a first pass on copies, for the sum of what each contributes."""
    sums: list[torch.Tensor] = []
    for rank in ranks:
        before = rank.states.clone()
        rank.all_reduce = lambda vector: sums.append(vector.clone())
        rank.update(gradients, number)
        rank.states.copy_(before)
    total = torch.stack(sums).sum(dim=0) if sums else torch.zeros(())

    def summed(vector: torch.Tensor) -> None:
        vector.copy_(total)

    for rank in ranks:
        rank.all_reduce = summed
        rank.update(gradients, number)


def _reference(
    values: Whole,
    gradients: list[Whole],
    *,
    lamb: bool,
    axes: tuple[int, ...] | None = (-2, -1),
    most: float = math.inf,
) -> Whole:
    """Algorithm 2 of arXiv 1904.00962 in float64, with norms over ``axes``; without ``lamb`` AdamW.

    The last two axes are those of a matrix, of which experts have one each. ``most`` bounds the
    norm of weights.
    """
    found: Whole = {}
    for name, value in values.items():
        if name.endswith((".router.bias", ".router.load")):
            found[name] = value  # no optimizer's
            continue
        x = value.astype(np.float64)
        mean, square = np.zeros_like(x), np.zeros_like(x)
        for number, of_step in enumerate(gradients, start=1):
            gradient = of_step[name].astype(np.float64)
            mean = BETA1 * mean + (1 - BETA1) * gradient
            square = BETA2 * square + (1 - BETA2) * gradient * gradient
            along = (mean / (1 - BETA1**number)) / (np.sqrt(square / (1 - BETA2**number)) + EPSILON)
            ratio = np.ones((1,) * x.ndim)
            if x.ndim > 1:
                along = along + DECAY * x
                if lamb:
                    norms = [np.sqrt((v * v).sum(axes, keepdims=True)) for v in (x, along)]
                    ratio = np.minimum(norms[0], most) / norms[1]
            x = x - RATE * ratio * along
        found[name] = x
    return found


def _config(model: Section, grid: Section, most: float = math.inf) -> JobConfig:
    training = {"steps": 1, "global_batch_size": 12, "bucket_mib": 0}
    optimizer = {**SETTINGS, "beta1": BETA1, "beta2": BETA2}
    job = {"name": "t", "model": model, "parallelism": grid, "training": training}
    if most < math.inf:
        optimizer["lamb"] = {"max_weight_norm": most}
    return from_accepted({**job, "optimizer": optimizer})


def _trained(config: JobConfig, factory: OptimizerFactory) -> tuple[Whole, list[Whole], Whole]:
    """The values before, the gradients, and the values after the updates of all ranks."""
    ranks = [_Rank(config, rank, factory) for rank in range(config.layout.world_size)]
    shapes = {piece.name: piece.global_shape for rank in ranks for piece in rank.table.slices}
    random = np.random.default_rng(0)

    def drawn() -> Whole:
        found: Whole = {}
        for name in sorted(shapes):
            value = random.standard_normal(shapes[name])
            if value.ndim == 3:  # expert e is e + 1 times as large as the first
                value *= np.arange(1, len(value) + 1)[:, None, None]
            found[name] = value.astype(np.float32)
        return found

    values = drawn()
    for rank in ranks:
        _scatter(rank.table, values, rank.states[0])
    gradients = [drawn() for _ in range(UPDATES)]
    for number, of_step in enumerate(gradients, start=1):
        _update(ranks, of_step, number)
    return values, gradients, _gathered(ranks, values)


def _check(found: Whole, wanted: Whole) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@examples(30)
@given(jobs(), st.sampled_from([math.inf, 2.0]))
def test_every_layout_follows_an_independent_lamb_in_float64(
    job: tuple[Section, Section], most: float
) -> None:
    """Also with a bound, without which a norm that counts twice on both sides goes unseen."""
    values, gradients, found = _trained(_config(*job, most), Lamb)
    _check(found, _reference(values, gradients, lamb=True, most=most))


@pytest.mark.parametrize("factory", [Lamb, AdamW])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_experts_are_updated_in_every_layout_and_the_state_of_routers_in_none(
    grid: Section, factory: OptimizerFactory
) -> None:
    values, gradients, found = _trained(_config(EXPERTS, grid), factory)
    _check(found, _reference(values, gradients, lamb=factory is Lamb))
    for name, value in values.items():
        still = name.endswith((".router.bias", ".router.load"))
        assert np.array_equal(found[name], value) == still, name


def test_one_trust_ratio_for_all_experts_would_be_another() -> None:
    values, gradients, found = _trained(_config(EXPERTS, {}), Lamb)
    wrong = _reference(values, gradients, lamb=True, axes=None)
    different = {name for name in found if not np.allclose(found[name], wrong[name], rtol=1e-2)}
    matrices = matrix_counts(_config(EXPERTS, {}).model)
    assert different == {name for name, number in matrices.items() if number == 12}
    assert len(different) == 4, "two layers have experts"
