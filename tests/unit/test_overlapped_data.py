"""Overlapped data parallelism in one process: when buckets of gradients leave, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.harness.training import CPU, micro_batches, tiny_job

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import ParameterTable, parameter_table
from megascale_kernels.operators import torch_operators
from megascale_trainer import compat
from megascale_trainer.model.initial_values import fill_shard
from megascale_trainer.parallel.data.bucket_parameters import fp8_gather_of
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.data.overlapped_buffers import OverlappedBuffers
from megascale_trainer.parallel.groups import Group, Groups, Pending, single_process_groups
from megascale_trainer.parallel.pipeline.stage import Stage
from megascale_trainer.parallel.tensor.sharding import plain_tensor_parallel
from megascale_trainer.weights import WeightGradients, bind_weights

ALONE = single_process_groups().world


def _groups(dp: Group) -> Groups:
    alone = single_process_groups()
    return replace(alone, named={**alone.named, "gradient": dp})


class _LateGather:
    """A gather whose result is not there before it is waited for."""

    def __init__(self, output: torch.Tensor, waited: list[int]) -> None:
        self._output, self._result, self._waited = output, output.clone(), waited
        output.view(torch.uint8).fill_(255)  # NaN in bf16, float32 and e4m3

    def wait(self) -> None:
        self._output.copy_(self._result)
        self._waited.append(self._output.numel())


class _Recorder(Group):
    """A group of one that copies each bucket it is given to reduce, as it is at that moment."""

    def __init__(self, note: Callable[[torch.Tensor], None] = lambda source: None) -> None:
        super().__init__("dp", (0,), 0, None, None)
        self.reduced: list[torch.Tensor] = []
        self.started: list[int] = []
        self.waited: list[int] = []
        self._note = note

    def start_all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        self.started.append(output.numel())
        return _LateGather(output, self.waited)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self._note(source)
        self.reduced.append(source.clone())

    def start_reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        self.reduce_scatter(output, source)
        return None


def _backward_passes(config: JobConfig, table: ParameterTable, buffers: FlatBuffers) -> None:
    """All micro-batches of a step through the table's one chunk, forward and backward in turn."""
    torch.set_num_threads(1)
    chunk = table.chunks[0]
    master = torch.zeros(table.shard_elements)
    fill_shard(master, table, seed=1)
    buffers.publish(master)
    weights = bind_weights(table, buffers.values, buffers.gradients)
    stage = Stage(config, chunk, weights, plain_tensor_parallel(ALONE), buffers, torch_operators())
    buffers.zero_gradients()
    shape = (
        config.model.sequence_length,
        config.training.micro_batch_size,
        config.model.hidden_size,
    )
    generator = torch.Generator().manual_seed(3)
    for batch in micro_batches(config, 0, 0):
        received = None if chunk.first else torch.randn(shape, generator=generator).requires_grad_()
        output = stage.forward(received, batch).output
        objective = stage.loss(output, batch)[0] if chunk.last else output.square().sum()
        torch.autograd.backward(objective)
    buffers.reduce_gradients()


def _reduced(config: JobConfig, rank: int, *, overlapped: bool) -> list[torch.Tensor]:
    """What the buckets held when they were handed over, in the order of a plain run."""
    table, recorder = parameter_table(config, rank), _Recorder()
    place = Place(table, torch.float32, CPU, _groups(recorder))
    if not overlapped:
        _backward_passes(config, table, FlatBuffers(place))
        return recorder.reduced
    _backward_passes(
        config,
        table,
        OverlappedBuffers(
            place, micro_batches=config.micro_batches, weight_gradients=WeightGradients()
        ),
    )
    ends = len(
        table.buffers[0].buckets
    )  # of the sharded buffer, which leaves first; each backwards
    return recorder.reduced[:ends][::-1] + recorder.reduced[ends:][::-1]


@examples(20)
@given(
    layers=st.integers(2, 9),
    stage=st.sampled_from(["whole", "first", "last"]),
    micro_batch_count=st.integers(1, 3),
    bucket_mib=st.sampled_from([0, 1, 64]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    model=st.fixed_dictionaries(
        {
            "block": st.sampled_from(["parallel", "serial"]),
            "mlp": st.sampled_from(["gelu", "swiglu"]),
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "positions": st.sampled_from(["rope", "learned"]),
            "bias": st.booleans(),
        }
    ),
)
def test_every_bucket_leaves_once_with_the_gradients_of_the_whole_step(
    layers: int,
    stage: str,
    micro_batch_count: int,
    bucket_mib: int,
    recompute: str,
    model: dict[str, Any],
) -> None:
    config = from_accepted(
        tiny_job(
            model={**model, "layers": layers, "sequence_length": 8},
            parallelism={"pp": 1 if stage == "whole" else 2, "recompute": recompute},
            training={"global_batch_size": micro_batch_count, "bucket_mib": bucket_mib},
        )
    )
    rank = 1 if stage == "last" else 0
    plain, overlapped = (
        _reduced(config, rank, overlapped=overlapped) for overlapped in (False, True)
    )
    assert len(plain) == len(overlapped)
    for ours, theirs in zip(overlapped, plain, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any(), "a bucket without gradients proves nothing"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_a_bucket_leaves_before_the_backward_of_earlier_layers(
    block: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(
        model={"block": block, "layers": 3},
        parallelism={"recompute": recompute},
        training={"global_batch_size": 2, "bucket_mib": 0},
    )
    config = from_accepted(job)
    table, events = parameter_table(config, 0), list[str]()

    def note(kind: str, tensor: torch.Tensor) -> None:
        [buffer] = [
            name for name, flat in buffers.gradients.items() if flat.data_ptr() == _base(tensor)
        ]
        offset = (tensor.data_ptr() - _base(tensor)) // 4
        [unit] = [
            bucket.units[0]
            for plan in table.buffers
            if plan.name == buffer
            for bucket in plan.buckets
            if bucket.start <= offset < bucket.stop
        ]
        if events[-1:] != [f"{kind} {buffer} {unit}"]:  # a layer has several GEMMs
            events.append(f"{kind} {buffer} {unit}")

    recorder = _Recorder(lambda source: note("reduce", source))
    buffers = OverlappedBuffers(
        Place(table, torch.float32, CPU, _groups(recorder)),
        micro_batches=2,
        weight_gradients=WeightGradients(),
    )
    accumulate = compat.accumulate_matmul

    def accumulate_and_note(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        accumulate(total, left, right)
        note("gradient", total)

    monkeypatch.setattr(compat, "accumulate_matmul", accumulate_and_note)
    _backward_passes(config, table, buffers)
    units = ["head", "layers.2", "layers.1", "layers.0"]
    expected = [f"gradient sharded {unit}" for unit in units]
    for unit in units:
        expected += [f"gradient sharded {unit}", f"reduce sharded {unit}"]
    expected += ["reduce sharded embedding", *(f"reduce replicated {unit}" for unit in units)]
    assert events == expected


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_forward_waits_for_a_bucket_just_before_its_first_use(gather: str) -> None:
    fp8 = {"precision": "fp8", "fp8": {"parameter_gather": gather}}
    config = from_accepted(tiny_job(training={"bucket_mib": 0, "global_batch_size": 2, **fp8}))
    table, recorder = parameter_table(config, 0), _Recorder()
    buffers = OverlappedBuffers(
        Place(table, torch.bfloat16, CPU, _groups(recorder)),
        micro_batches=2,
        weight_gradients=WeightGradients(),
        fp8=fp8_gather_of(config, table, CPU, recorder, "torch"),
    )
    assert ("layers.0.in.weight" in buffers.scales) == (gather == "fp8")
    units = table.chunks[0].units
    buckets = [bucket for plan in table.buffers for bucket in plan.buckets]
    sizes = {
        unit: [bucket.stop - bucket.start for bucket in buckets if unit in bucket.units]
        for unit in units
    }
    in_forward_order = [size for unit in units for size in sizes[unit]]
    master = torch.zeros(table.shard_elements)
    buffers.publish(master)
    assert (recorder.started, recorder.waited) == (in_forward_order, [])
    expected = []
    for unit in units:
        for _ in range(2):  # it is there the second time
            buffers.await_parameters(unit)
            assert recorder.waited == expected + sizes[unit]
        expected += sizes[unit]
    buffers.publish(master)
    assert recorder.waited == in_forward_order
    buffers.publish(master)
    assert recorder.waited == 2 * in_forward_order, "nothing is written under a gather"
