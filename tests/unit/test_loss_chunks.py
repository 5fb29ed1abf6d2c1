"""The loss in chunks is the whole one, with a chunk of the logits at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.training import CPU, micro_batches, tiny_job

from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.parallel.pipeline.stage import Stage
from megascale_trainer.trainer import Trainer

SEQUENCES, LENGTH = 2, 32


def _started(chunk_rows: int, **model: Any) -> tuple[Trainer, Stage, MicroBatch]:
    torch.set_num_threads(1)
    config = from_accepted(
        tiny_job(
            model={"layers": 1, **model},
            training={"micro_batch_size": SEQUENCES},
            loss={"chunk_rows": chunk_rows, "z_loss": 0.1},
        )
    )
    trainer = Trainer(config, 0, single_process_groups(), CPU, None)
    trainer.initialise()
    [stage] = trainer._pipeline.chunks
    assert isinstance(stage, Stage)
    return trainer, stage, micro_batches(config, 0, 0)[0]


def _loss_and_gradients(chunk_rows: int, **model: Any) -> dict[str, torch.Tensor]:
    """Objective, sums, and the gradients of all weights and of the hidden states."""
    trainer, stage, batch = _started(chunk_rows, **model)
    trainer._buffers.zero_gradients()
    hidden = stage.forward(None, batch).output
    hidden.retain_grad()
    objective, sums = stage.loss(hidden, batch)
    torch.autograd.backward(objective)
    assert hidden.grad is not None
    gradients = {name: weight.main_grad for name, weight in stage._weights.items()}
    return {"objective": objective.detach(), "sums": sums, "hidden": hidden.grad, **gradients}


@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk_rows", [2, 14, 15, 16, 63])
def test_gradients_are_those_of_the_whole(chunk_rows: int, model: dict[str, Any]) -> None:
    whole, chunked = _loss_and_gradients(0, **model), _loss_and_gradients(chunk_rows, **model)
    assert chunked.keys() == whole.keys()
    for name, expected in whole.items():
        assert expected.any(), name
        scale = expected.abs().max().item()
        torch.testing.assert_close(chunked[name], expected, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("chunk_rows", [SEQUENCES * LENGTH, 1000])
def test_one_chunk_has_the_bits_of_the_whole(chunk_rows: int) -> None:
    whole, chunked = _loss_and_gradients(0), _loss_and_gradients(chunk_rows)
    for name, expected in whole.items():
        assert torch.equal(chunked[name], expected), name


def test_gradients_of_micro_batches_add_up() -> None:
    _, stage, batch = _started(14)
    head = stage._weights["head.weight"].main_grad
    found = []
    for _ in range(2):
        torch.autograd.backward(stage.run(None, batch).output)
        found.append(head.clone())
    torch.testing.assert_close(found[1], 2 * found[0])


@pytest.mark.parametrize("chunk_rows", [2, 14])
def test_evaluation_is_that_of_the_whole_and_adds_no_gradient(chunk_rows: int) -> None:
    found = []
    for rows in (0, chunk_rows):
        trainer, stage, _ = _started(rows)
        trainer._buffers.zero_gradients()
        found.append(trainer.evaluate([micro_batches(trainer.config, 3, 0)]))
        assert not any(weight.main_grad.any() for weight in stage._weights.values())
    assert found[1] == pytest.approx(found[0], rel=1e-6)
