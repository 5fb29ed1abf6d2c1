"""Weight gradients that run later: nothing of them runs before, and then the same bits."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import pytest
import torch
from tests.harness.training import CPU, micro_batches, tiny_job

from megascale_job.loading import from_accepted
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.parallel.pipeline.schedule import Action, Kind
from megascale_trainer.trainer import StepRecord, Trainer
from megascale_trainer.weights import WeightGradients, run_all


def test_work_runs_at_once_or_in_its_order_and_is_released() -> None:
    gradients, done = WeightGradients(), list[int]()
    gradients.run(lambda: done.append(0))
    assert done == [0]
    held = torch.zeros(3)
    alive = weakref.ref(held)
    with gradients.collected() as works:
        gradients.run(lambda held=held: done.append(held.numel()))  # type: ignore[misc]
        gradients.run(lambda: done.append(0 if alive() is None else -1))
    del held
    assert done == [0] and alive() is not None
    run_all(works)
    assert done == [0, 3, 0], "the second ran when the first was released"
    gradients.run(lambda: done.append(7))
    assert done[-1] == 7


def split(program: list[Action], later: int) -> list[Action]:
    """``program`` of one stage with split backwards, weight gradients ``later`` of them behind."""
    split, waiting = list[Action](), deque[Action]()
    for action in program:
        if action.kind is Kind.BACKWARD:
            split.append(Action(Kind.BACKWARD_INPUT, action.micro_batch))
            waiting.append(Action(Kind.BACKWARD_WEIGHT, action.micro_batch))
        else:
            split.append(action)
        if len(waiting) > later:
            split.append(waiting.popleft())
    return [*split, *waiting]


def _matrices(trainer: Trainer) -> dict[str, float]:
    """The largest gradient of each matrix of the layers and of the head."""
    [stage] = trainer._pipeline.chunks
    return {
        name: float(weight.main_grad.abs().max())
        for name, weight in stage._weights.items()  # type: ignore[union-attr]
        if weight.value.dim() > 1 and not name.startswith("embedding")
    }


@pytest.mark.parametrize(
    ("precision", "block", "recompute"),
    [("fp32", "parallel", "none"), ("fp32", "serial", "full"), ("fp8", "parallel", "selective")],
)
def test_a_split_backward_adds_to_no_matrix_and_then_the_same_bits(
    precision: str, block: str, recompute: str
) -> None:
    records = list[list[StepRecord]]()
    for later in (None, 0, 2):
        trainer = _trainer(precision, block, recompute)
        if later is not None:
            trainer._program = split(trainer._program, later)
            _check_order(trainer, later)
        steps = [micro_batches(trainer.config, step, 0) for step in range(2)]
        records.append([trainer.train_step(batches).read() for batches in steps])
    assert records[1] == records[0] == records[2]


def _trainer(precision: str, block: str, recompute: str) -> Trainer:
    job = tiny_job(
        model={"block": block},
        parallelism={"recompute": recompute, "overlap": {"tp": False, "pp": False, "dp": True}},
        training={"precision": precision, "global_batch_size": 4, "bucket_mib": 0},
    )
    trainer = Trainer(from_accepted(job), 0, single_process_groups(), CPU)
    trainer.initialise()
    return trainer


def _check_order(trainer: Trainer, later: int) -> None:
    """In the first step: no matrix has a gradient, and no bucket leaves, before its weights ran."""
    pipeline, buffers = trainer._pipeline, trainer._buffers
    inputs, weights = (
        pipeline._actions[kind] for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )

    def check_inputs(place: Any) -> None:
        inputs(place)
        if place[0] <= later:
            assert not any(_matrices(trainer).values())
        assert not buffers._reductions  # type: ignore[attr-defined]

    def check_weights(place: Any) -> None:
        weights(place)
        assert all(_matrices(trainer).values())
        last = place[0] == trainer.config.micro_batches - 1
        assert bool(buffers._reductions) is last  # type: ignore[attr-defined]

    pipeline._actions[Kind.BACKWARD_INPUT] = check_inputs
    pipeline._actions[Kind.BACKWARD_WEIGHT] = check_weights
