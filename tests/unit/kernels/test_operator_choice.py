"""Which operators a job gets, and that the fused ones train like torch's own."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.kernels import DEVICE
from tests.harness.training import micro_batches, tiny_job

from megascale_job.loading import from_accepted
from megascale_kernels import operators
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.trainer import StepRecord, Trainer

STEPS = 2


def test_an_operator_has_one_name_its_plain_version_its_fused_one_and_their_test() -> None:
    pytest.importorskip("triton")
    plain, fused = operators.torch_operators(), operators.triton_operators()
    tests = Path(__file__).parent
    for name in (field.name for field in fields(operators.Operators) if field.name != "name"):
        function, kernel = getattr(plain, name), getattr(fused, name)
        assert function.__name__ == kernel.__name__ == name
        package, _, module = function.__module__.rpartition(".")
        assert kernel.__module__ == f"{package}.fused.{module}"
        found = [tests / f"test_{prefix}{module}.py" for prefix in ("", "fused_")]
        assert any("fused" in path.read_text() for path in found if path.exists()), name


def test_torch_is_asked_for_and_got() -> None:
    assert operators.choose("torch", DEVICE).name == "torch"


def test_fused_operators_are_for_cuda_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter runs on any device
    assert operators.choose("auto", torch.device("cuda")).name == "triton"
    assert operators.choose("auto", torch.device("cpu")).name == "torch"


def test_where_triton_cannot_run_torch_does_and_one_line_gives_the_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    operators._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [operators.choose("triton", torch.device("cpu")) for _ in range(3)]
    assert {one.name for one in found} == {"torch"}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("trainer.training.kernels is triton, but ")


def test_a_host_that_cannot_build_tritons_driver_trains_with_torchs_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capable device is not enough: Triton compiles C when it starts, which takes a compiler."""
    runtime = pytest.importorskip("triton").runtime

    class NoCompiler:
        @property
        def active(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(runtime, "driver", NoCompiler())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    operators._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert operators.choose("auto", torch.device("cuda")).name == "torch"
    assert (
        "trainer.training.kernels is auto, but Triton cannot build its driver "
        "(Failed to find C compiler)" in caplog.text
    )


def _train(
    kernels: str, model: dict[str, Any], recompute: str
) -> tuple[list[StepRecord], torch.Tensor]:
    """Records of STEPS steps of one process, and the gradients of the last."""
    job = tiny_job(
        model={"layers": 2, "hidden_size": 16, "sequence_length": 8, "vocab_size": 64, **model},
        parallelism={"recompute": recompute},
        training={"kernels": kernels, "global_batch_size": 2, "micro_batch_size": 1},
    )
    config = from_accepted(job)
    trainer = Trainer(config, 0, single_process_groups(), DEVICE)
    trainer.initialise()
    records = [
        trainer.train_step(micro_batches(config, number, 0, DEVICE)).read()
        for number in range(STEPS)
    ]
    return records, trainer.state.states()["exp_avg"]


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        pytest.param(
            {"block": "parallel", "mlp": "gelu", "norm": "layernorm"},
            "none",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"block": "parallel", "mlp": "swiglu", "norm": "rmsnorm", "kv_heads": 2},
            "selective",
            marks=pytest.mark.slow,
        ),
        ({"block": "serial", "mlp": "gelu", "norm": "layernorm", "window": 3}, "full"),
        pytest.param(
            {
                "block": "serial",
                "mlp": "swiglu",
                "norm": "rmsnorm",
                "positions": "learned",
                "bias": False,
            },
            "selective",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_fused_operators_train_as_torchs_own(model: dict[str, Any], recompute: str) -> None:
    pytest.importorskip("triton")
    records, moments = _train("torch", model, recompute)
    found, ours = _train("triton", model, recompute)
    for one, other in zip(found, records, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=5e-6)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5)
    # Every gradient of the model is in the moments: none is missing, none is counted twice.
    torch.testing.assert_close(ours, moments, atol=float(moments.abs().max()) * 1e-5, rtol=1e-4)
