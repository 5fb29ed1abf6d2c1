"""LAMB in every layout against an independent one in float64, and its state across layouts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.ranks import RankPool
from tests.harness.reference_model import ReferenceModel
from tests.harness.training import EXPERTS, assemble, hiding, sample, tiny_job

from megascale_job.loading import from_accepted
from megascale_trainer.optimizer.step_control import learning_rate

TRAIN = "tests.harness.training:train"
STEPS = 4
SETTINGS = {"name": "lamb", "learning_rate": 0.02, "epsilon": 1e-6, "weight_decay": 0.1}
GROUPED = {  # padded widths, learned positions (held by every tp rank), tied embeddings
    "hidden_size": 32,
    "mlp": "swiglu",
    "kv_heads": 2,
    "ffn_size": 101,
    "vocab_size": 299,
    "positions": "learned",
    "tie_embeddings": True,
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp4": ({"tp": 4}, {}),
    "dp4, overlapped": ({"dp": 4, **hiding("dp")}, {}),
    "pp2vpp2dp2": ({"pp": 2, "virtual_stages": 2, "dp": 2}, {}),
    "tp2pp2dp2, tied": ({"tp": 2, "pp": 2, "dp": 2}, GROUPED),
    "tp2pp2vpp2, tied, all overlapped": (
        {"tp": 2, "pp": 2, "virtual_stages": 2, **hiding("tp", "pp")},
        GROUPED,
    ),
    "one, tied, bounded norms": ({}, GROUPED),
    "tp2dp2ep4, experts": ({"tp": 2, "dp": 2, "ep": 4}, EXPERTS),
    "pp2dp2ep2 in uneven stages, overlapped, experts": (
        {"pp": 2, "dp": 2, "ep": 2, "stage_layers": [1, 3], **hiding("dp")},
        EXPERTS,
    ),
    "one, bounded norms, experts": ({}, EXPERTS),
}
FAST = ("pp2vpp2dp2", "tp2pp2dp2, tied", "tp2dp2ep4, experts")  # the others in `make test-slow`
BOUNDED = {"min_weight_norm": 0.5, "max_weight_norm": 1.0}


class _Lamb:
    """Algorithm 2 of arXiv 1904.00962 for a dictionary of parameters, in float64."""

    def __init__(self, parameters: dict[str, torch.Tensor], bounds: dict[str, float]) -> None:
        self._parameters, self._bounds = parameters, bounds
        self._moments = {
            name: (0.0 * p.detach(), 0.0 * p.detach()) for name, p in parameters.items()
        }

    def step(self, rate: float, number: int, beta1: float, beta2: float) -> dict[str, torch.Tensor]:
        """Update all; returns the trust ratios: one per matrix, of which experts have one each."""
        ratios = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            assert gradient is not None
            mean, square = self._moments[name]
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient * gradient
            self._moments[name] = mean, square
            along = (mean / (1 - beta1**number)) / (
                torch.sqrt(square / (1 - beta2**number)) + SETTINGS["epsilon"]
            )
            x = parameter.detach()
            ratio = torch.ones((), dtype=torch.float64)
            if x.dim() > 1:
                along = along + SETTINGS["weight_decay"] * x
                size = torch.sqrt((x * x).sum((-2, -1), keepdim=True))
                if self._bounds:
                    size = size.clamp(self._bounds["min_weight_norm"], 1.0)
                ratio = size / torch.sqrt((along * along).sum((-2, -1), keepdim=True))
            ratios[name] = ratio
            x -= rate * ratio * along
        return ratios


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.slow] if layout not in FAST else [])
        for layout in LAYOUTS
    ],
)
def test_every_layout_follows_an_independent_lamb_in_float64(
    layout: str, pool: RankPool, tmp_path: Path
) -> None:
    sizes, model = LAYOUTS[layout]
    bounds = BOUNDED if "bounded" in layout else {}
    job = tiny_job(
        model=model,
        parallelism=sizes,
        training={"bucket_mib": 0, "micro_batch_size": 2},
        optimizer={**SETTINGS, **({"lamb": bounds} if bounds else {})},
    )
    config = from_accepted(job)
    world_size = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    results = pool.run(TRAIN, world_size, tmp_path, job=job, steps=STEPS)
    exact = ReferenceModel(config, assemble(tmp_path, "initial", world_size))
    lamb, batch = _Lamb(exact.parameters, bounds), config.training.global_batch_size
    for number in range(STEPS):
        samples = [sample(config, number * batch + row) for row in range(batch)]
        entropy, z_loss = exact.loss(samples)
        for parameter in exact.parameters.values():
            parameter.grad = None
        torch.autograd.backward(sum(exact.auxiliary, entropy + z_loss))
        torch.nn.utils.clip_grad_norm_(exact.parameters.values(), config.optimizer.clip_norm)
        betas = config.optimizer.beta1, config.optimizer.beta2
        ratios = lamb.step(learning_rate(config, number), number + 1, *betas)
        exact.move_routers()
        record = results[0]["records"][number]
        assert record["loss"] == pytest.approx(entropy.item(), abs=2e-5)
    matrices = [ratios[name] for name, value in exact.parameters.items() if value.dim() > 1]
    assert all(((ratio - 1).abs() > 0.1).any() for ratio in matrices), "the ratios change nothing"
    final = assemble(tmp_path, "final", world_size)
    for name, parameter in exact.parameters.items():
        wanted = parameter.detach().flatten().numpy()
        np.testing.assert_allclose(final[name], wanted, rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (GROUPED, {"pp": 2, "dp": 2}),
        pytest.param(GROUPED, {"tp": 2, "pp": 2, "dp": 2}, marks=pytest.mark.slow),
        (EXPERTS, {"dp": 4, "ep": 2}),
    ],
    ids=["tied, pp2dp2", "tied, tp2pp2dp2", "experts, dp4ep2"],
)
def test_replicas_stay_equal_and_a_run_repeats_and_resumes_bit_for_bit(
    model: dict[str, Any], sizes: dict[str, int], pool: RankPool, tmp_path: Path
) -> None:
    """With tied embeddings and learned positions, which several ranks update side by side."""
    job = tiny_job(model=model, parallelism=sizes, optimizer=SETTINGS)
    program = "tests.harness.training:train_and_resume"
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    results = pool.run(program, ranks, tmp_path / "first", job=job, steps=2)
    again = pool.run(TRAIN, ranks, tmp_path / "second", job=job, steps=4)
    for result, repeated in zip(results, again, strict=True):
        assert result["resumed"] == result["uninterrupted"] == results[0]["uninterrupted"]
        assert result["states_equal"]
        losses = [record["loss"] for record in repeated["records"]]
        assert losses[2:] == result["uninterrupted"]


def test_overlap_changes_no_bit_and_a_nan_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    jobs = [
        tiny_job(parallelism={"dp": 2, **overlap}, optimizer=SETTINGS)
        for overlap in ({}, hiding("dp"))
    ]
    program = "tests.harness.training:train_in_several_ways"
    for plain, hidden in pool.run(program, 2, tmp_path, jobs=jobs):
        assert plain == hidden
        assert ["skipped=True" in record for record in plain[:4]] == [False, True, False, False]
