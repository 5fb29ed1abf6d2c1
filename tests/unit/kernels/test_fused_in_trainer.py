"""The fused loss and update in the trainer: the head's objective, and the optimizer's runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tests.harness.fp8 import right_fp8_conversion  # noqa: F401
from tests.harness.fp8_gather import GatheredRank, gathering, master_of, same_bits
from tests.harness.kernels import DEVICE, relative_error
from tests.harness.training import EXPERTS, micro_batches, tiny_job

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import (
    ParameterTable,
    matrix_counts,
    parameter_table,
    shard_layout,
)
from megascale_kernels import cross_entropy as plain_cross_entropy
from megascale_kernels.operators import torch_operators
from megascale_trainer.model.blocks.ends import loss_sums
from megascale_trainer.optimizer.interface import OptimizerSetup
from megascale_trainer.optimizer.registry import optimizer_factory
from megascale_trainer.optimizer.step_control import StepControl
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.parallel.tensor.sharding import plain_tensor_parallel
from megascale_trainer.trainer import Trainer
from megascale_trainer.weights import bind_weights

pytest.importorskip("triton")


def _buffers(table: ParameterTable) -> FlatBuffers:
    groups = single_process_groups()
    return FlatBuffers(Place(table, torch.float32, DEVICE, groups))


def _head(config: JobConfig, entropy_of: Any) -> list[torch.Tensor]:
    """Objective, sums, and gradients of the hidden states and of the head's weights."""
    table = parameter_table(config, 0)
    buffers = _buffers(table)
    generator = torch.Generator().manual_seed(2)
    for flat in buffers.parameters.values():
        flat.copy_(torch.randn(flat.shape, generator=generator))
    weights = bind_weights(table, buffers.values, buffers.gradients)
    hidden = torch.randn(
        config.model.sequence_length, 1, config.model.hidden_size, generator=generator
    )
    hidden = hidden.to(DEVICE).requires_grad_()
    [batch, *_] = micro_batches(config, 0, 0, DEVICE)
    tp = plain_tensor_parallel(single_process_groups().tp)
    objective, sums = loss_sums(
        hidden, batch, weights, config, tp, replace(torch_operators(), cross_entropy=entropy_of)
    )
    torch.autograd.backward(objective)
    assert hidden.grad is not None
    return [objective.detach(), sums, hidden.grad, weights["head.weight"].main_grad]


@pytest.mark.parametrize("chunk_rows", [0, 10])
def test_the_head_has_the_same_objective_and_gradients(chunk_rows: int) -> None:
    from megascale_kernels.fused import cross_entropy as fused

    model = {"vocab_size": 299, "layers": 1}  # 5 columns of padding
    whole, config = (
        from_accepted(tiny_job(model=model, loss={"chunk_rows": rows})) for rows in (0, chunk_rows)
    )
    found = [_head(whole, plain_cross_entropy.cross_entropy), _head(config, fused.cross_entropy)]
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-5)
    assert not found[1][3][299:].any(), "padding must have no gradient"


def _alone(tensor: torch.Tensor) -> None:
    """The sum over one rank."""


def _updated(config: JobConfig, kernels: Literal["torch", "triton"]) -> list[torch.Tensor]:
    """States and parameters of the last of two replicas after an update, a skipped one, and
    another.
    """
    table = parameter_table(config, 1)
    factory = optimizer_factory(config.optimizer.name)
    states = torch.zeros((len(factory.state_names), table.shard_elements), device=DEVICE)
    names = matrix_counts(config.model)
    optimizer = factory(OptimizerSetup(config.optimizer, table, states, kernels, names, _alone))
    buffers = _buffers(table)
    generator = torch.Generator().manual_seed(3)
    # Values in what pieces describe alone: LAMB leaves padding as it is.
    for owned, _, start, stop in table.overlaps():
        place = owned.shard_offset + start - owned.start
        states[0, place : place + stop - start] = torch.randn(stop - start, generator=generator)
    for owned, shard in zip(table.shard_ranges, buffers.parameter_shards(), strict=True):
        shard.copy_(states[0, owned.shard_offset : owned.shard_offset + shard.numel()])
    found: list[torch.Tensor] = []
    for number, apply in enumerate((1.0, 0.0, 1.0), start=1):
        for flat in buffers.gradients.values():
            flat.copy_(torch.randn(flat.shape, generator=generator))
            flat[::9] *= 1.0 if apply else float("nan")
        scalars = torch.tensor([apply, 0.5 * apply], device=DEVICE)
        skipped = torch.tensor(float(number > 2), dtype=torch.float64, device=DEVICE)
        control = StepControl(
            norm=scalars[0],
            clip=scalars[0],
            scale=scalars[1],
            apply=scalars[0],
            reason=1.0 - scalars[0],
            skipped=skipped,
        )
        shards = [shard for _, shard in buffers.gradient_shards()]
        optimizer.update(shards, buffers.parameter_shards(), control, 1e-2, number)
        for owned, shard in zip(table.shard_ranges, buffers.parameter_shards(), strict=True):
            master = states[0, owned.shard_offset : owned.shard_offset + shard.numel()]
            assert torch.equal(shard, master)
        found.append(states.clone())
    assert torch.equal(found[0], found[1]), "a skipped step"
    return found


# Matrices that end within blocks of the kernel, and a shard that ends within one of them.
FEW_EXPERTS = {**EXPERTS, "experts": {"count": 5, "ffn_size": 20, "bias_rate": 0.01}}


@pytest.mark.parametrize("model", [{"ffn_size": 101}, FEW_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_optimizer_makes_the_same_updates_of_all_its_runs(
    name: str, model: dict[str, Any]
) -> None:
    config = from_accepted(
        tiny_job(
            model={"layers": 1, "vocab_size": 299, **model},
            parallelism={"dp": 2},
            optimizer={"name": name},
        )
    )
    for plain, ours in zip(_updated(config, "torch"), _updated(config, "triton"), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("right_fp8_conversion")
@pytest.mark.parametrize("block", ["parallel", pytest.param("serial", marks=pytest.mark.slow)])
def test_gradients_in_fp8_are_those_of_the_plain_operators(block: str) -> None:
    """From the embedding on, whose result is not contiguous."""
    exact, fused = (_gradients(block, kernels) for kernels in ("torch", "triton"))
    for name, gradient in exact.items():
        assert relative_error(fused[name], gradient.double()) < 0.15, name


@pytest.mark.usefixtures("right_fp8_conversion")
def test_weights_that_travel_in_fp8_have_the_bits_of_the_plain_casts() -> None:
    """Runs of a shard, under the largest magnitude of the whole weight."""
    job = tiny_job(model={"layers": 2, "vocab_size": 64}, training={"bucket_mib": 0})
    operands = []
    for kind, kernels in (("bf16", "torch"), ("fp8", "torch"), ("fp8", "triton")):
        config = gathering(job, kind)
        rank = GatheredRank(config, 0, single_process_groups(), DEVICE, kernels)
        rank.publish(master_of(config, 0, breaker=None).to(DEVICE))
        operands.append(rank.operands())
    for name, wanted in operands[0].items():
        assert all(same_bits(found[name], wanted) for found in operands[1:]), name


def _gradients(block: str, kernels: str) -> dict[str, torch.Tensor]:
    """Every weight's gradient after one micro-batch in FP8."""
    config = from_accepted(
        tiny_job(
            model={"layers": 1, "block": block},
            training={
                "precision": "fp8",
                "kernels": kernels,
                "global_batch_size": 2,
                "micro_batch_size": 2,
            },
        )
    )
    trainer = Trainer(config, 0, single_process_groups(), DEVICE)
    trainer.initialise()
    record = trainer.train_step(micro_batches(config, 0, 0, DEVICE)).read()
    assert not record.skipped
    table, means = parameter_table(config, 0), trainer.state.states()["exp_avg"]
    return {
        piece.name: means[piece.slot_offset_bytes // 4 :][: piece.flat_stop - piece.flat_start]
        / record.clip_factor
        for piece in shard_layout(table).pieces
        if piece.state == "master"
    }
