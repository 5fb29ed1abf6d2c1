"""Replayed stages on a CPU: when slots are captured, and that they hold what the schedule needs.

A CPU has no graphs. Here a "replay" computes its unit again, from the memory of the slot that a
graph would read. What graphs themselves do is tested on GPUs (tests/gpu/test_graphs_gpu.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from tests.harness.training import CPU, EXPERTS, micro_batches, tiny_job
from tests.unit.test_weight_gradients import split

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.parallel.pipeline import graphs
from megascale_trainer.parallel.pipeline.graphs import GraphedStage, graphed
from megascale_trainer.parallel.pipeline.stage import Stage
from megascale_trainer.trainer import Trainer
from megascale_trainer.weights import WeightGradients, Work, run_all


class _Recomputed:
    """Stands for a graph."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class _RecordedCapture:
    """Makes slots whose replays compute; notes for how many documents they were captured."""

    rooms: ClassVar[list[int]] = []
    replays: ClassVar[list[str]] = []  # of backwards, and of weight gradients apart from them

    def __init__(
        self,
        stage: Stage,
        stream: object,
        inner: object,
        even: object,
        weight_gradients: WeightGradients | None,
    ) -> None:
        self._stage, self._weight_gradients = stage, weight_gradients

    def slot(self, hidden: torch.Tensor, batch: MicroBatch) -> graphs._Slot:
        self.rooms.append(batch.documents.number)
        stage, d_hidden = self._stage, torch.empty_like(hidden)
        output = torch.zeros(()) if stage.last else torch.empty_like(hidden)
        d_output = None if stage.last else torch.empty_like(hidden)
        sums = torch.zeros(3, dtype=torch.float64) if stage.last else None
        indices = [*stage.layers, *([None] if stage.last else [])]
        terms = {
            index: torch.zeros(2, dtype=torch.float64)
            for index in stage.layers
            if stage._config.model.has_experts(index)
        }
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        contexts: dict[int, Any] = {}
        works: dict[int, deque[Work]] = {}
        collected = nullcontext if self._weight_gradients is None else self._collected

        def forward(at: int, index: int | None) -> None:
            if at == 0:
                contexts.update(stage.contexts(batch))
            x = (hidden if at == 0 else made[at - 1][1]).detach().requires_grad_()
            with torch.enable_grad():
                if index is None:
                    y, found = stage.head(x, batch)
                    assert sums is not None
                    sums.copy_(found)
                else:
                    y, figures = stage.layer(index, x, contexts)
                    if figures is not None:
                        terms[index].copy_(figures)
            made[at] = x, y
            if at == len(indices) - 1:
                output.copy_(y.detach())

        def backward(at: int) -> None:
            y = made[at][1]
            d_y = made[at + 1][0].grad if at + 1 < len(indices) else d_output
            self.replays.append(f"backward {at}")
            with collected() as works[at]:
                torch.autograd.backward(y, d_y)
            if at == 0:
                d_hidden.copy_(made[0][0].grad)  # type: ignore[arg-type]

        def weights(at: int) -> None:
            self.replays.append(f"weights {at}")
            run_all(works.pop(at))

        units = tuple(
            graphs._Unit(
                index,
                _Recomputed(lambda at=at, index=index: forward(at, index)),  # type: ignore[arg-type,misc]
                _Recomputed(lambda at=at: backward(at)),  # type: ignore[arg-type,misc]
                None if self._weight_gradients is None else _Recomputed(lambda at=at: weights(at)),  # type: ignore[arg-type,misc]
            )
            for at, index in enumerate(indices)
        )
        return graphs._Slot(
            batch, hidden, d_hidden, output, d_output, sums, tuple(terms.values()), units
        )

    @contextmanager
    def _collected(self) -> Iterator[deque[Work]]:
        """Inside a backward whose program collects already."""
        assert self._weight_gradients is not None
        around, self._weight_gradients._collected = self._weight_gradients._collected, None
        with self._weight_gradients.collected() as found:
            yield found
        self._weight_gradients._collected = around


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rooms of the slots that were captured."""
    found: list[int] = []
    monkeypatch.setattr(_RecordedCapture, "rooms", found)
    monkeypatch.setattr(_RecordedCapture, "replays", [])
    monkeypatch.setattr(graphs, "_Capture", _RecordedCapture)
    for name in ("Stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **options: None)
    return found


def _config(model: dict[str, Any] | None = None, **data: Any) -> JobConfig:
    return from_accepted(tiny_job(model=model, data=data, parallelism={"overlap": {"dp": True}}))


def _trainer(config: JobConfig, *, replayed: bool) -> Trainer:
    trainer = Trainer(config, 0, single_process_groups(), CPU)
    if replayed:
        _replay(trainer)
    trainer.initialise()
    return trainer


def _replay(trainer: Trainer) -> None:
    """Have ``trainer`` replay its stages in its program."""
    pipeline = trainer._pipeline
    stages = [stage for stage in pipeline.chunks if isinstance(stage, Stage)]
    pipeline.chunks = pipeline._chunks = graphed(
        stages,
        trainer.config,
        trainer._program,
        trainer._buffers,
        stages[0]._tp,
        pipeline._empty_hidden,
    )


def _losses(trainer: Trainer, steps: range) -> list[tuple[float, float]]:
    records = [trainer.train_step(micro_batches(trainer.config, step, 0)).read() for step in steps]
    return [(record.loss, record.gradient_norm) for record in records]


@pytest.mark.parametrize(
    ("documents", "model"), [(True, {}), (False, {}), (True, EXPERTS)], ids=str
)
def test_replays_train_as_the_stage_does(
    documents: bool, model: dict[str, Any], rooms: list[int]
) -> None:
    config = _config(model, document_attention=documents)
    plain, replayed = (_trainer(config, replayed=there) for there in (False, True))
    wanted = _losses(plain, range(6))
    assert _losses(replayed, range(2)) == wanted[:2]
    assert not rooms, "the first steps compile, plan and choose: without graphs"
    evaluated = replayed.evaluate([micro_batches(config, 9, 0)])
    assert _losses(replayed, range(2, 6)) == wanted[2:]
    assert rooms == [16 if documents else 1], "one slot, captured once"
    assert evaluated > 0
    replayed.settle()
    _losses(replayed, range(6, 7))
    assert len(rooms) == 2, "graphs were freed, and are captured again for a further step"


@pytest.mark.parametrize("later", [0, 1])
def test_a_split_backward_replays_its_weights_apart_and_holds_the_slot(
    later: int, rooms: list[int]
) -> None:
    config = _config(document_attention=False)
    plain, replayed = (_trainer(config, replayed=False) for _ in range(2))
    replayed._program = split(replayed._program, later)
    _replay(replayed)
    assert _losses(replayed, range(4)) == _losses(plain, range(4))
    assert len(rooms) == 1 + later, "slots are held until their weight gradients have run"
    units = [f"backward {at}" for at in reversed(range(config.model.layers + 1))]
    weights = [unit.replace("backward", "weights") for unit in units]
    one = units + weights
    expected = one * config.micro_batches
    if later:
        expected = units + (units + weights) * (config.micro_batches - 1) + weights
    assert _RecordedCapture.replays == expected * 2, "in each of the two replayed steps"


def test_a_step_with_more_documents_has_its_slots_captured_before_it(rooms: list[int]) -> None:
    config = _config(document_attention=True)
    trainer = _trainer(config, replayed=True)
    [stage] = trainer._pipeline.chunks
    assert isinstance(stage, GraphedStage)
    few, many = (_with_documents(config, number) for number in (3, 20))
    for _ in range(2):
        trainer.train_step(few)
    for batches, captured in ((few, [16]), (few, [16]), (many, [16, 32]), (few, [16, 32])):
        trainer.train_step(batches)
        assert rooms == captured


def test_a_capture_that_fails_names_the_field_to_set(
    rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> graphs._Slot:
        raise torch.OutOfMemoryError("no memory for the pool")

    trainer = _trainer(_config(document_attention=False), replayed=True)
    monkeypatch.setattr(_RecordedCapture, "slot", failing)
    _losses(trainer, range(2))
    with pytest.raises(torch.OutOfMemoryError) as found:
        _losses(trainer, range(2, 3))
    [note] = found.value.__notes__
    assert "set trainer.training.cuda_graphs to false" in note


def _with_documents(config: JobConfig, number: int) -> list[MicroBatch]:
    """Micro-batches of so many documents each."""
    batches = []
    for batch in micro_batches(config, 0, 0):
        offsets = torch.full_like(batch.documents.offsets, batch.tokens.numel())
        offsets[:number] = torch.arange(number)
        documents = type(batch.documents)(
            offsets, batch.documents.shape, number, batch.tokens.numel() - number + 1
        )
        batches.append(
            MicroBatch(batch.tokens, batch.targets, batch.loss_weight, batch.position, documents)
        )
    return batches
