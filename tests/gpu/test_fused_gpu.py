"""The fused operators on CUDA: at training shapes as exact as torch's own, repeatable, in training.

Errors are against float64 on the same bf16 inputs. torch's own operators round between their steps,
so a fused one that is right is seldom further off; a kernel that reads or writes a wrong place is
off by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.kernels import gradients_of, relative_error
from tests.harness.ranks import RankPool
from tests.harness.training import tiny_job

from megascale_kernels.activation import Activation
from megascale_kernels.attention import BACKENDS, attention, attention_mask
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.norm import Kind
from megascale_kernels.operators import Operators, choose, torch_operators
from megascale_kernels.rotary import (
    HeadNorms,
    Heads,
    NormedOver,
    rotary_frequencies,
    rotary_table,
)
from megascale_trainer.weights import Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
SLACK = 1.3  # how much larger than torch eager's own error a fused one may be
FLOOR = 1e-5  # a relative error that needs no comparison
Run = Callable[
    [Operators, Sequence[torch.Tensor], Sequence[Weight]], torch.Tensor | tuple[torch.Tensor, ...]
]


def _random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(size, device=CUDA)).bfloat16()


def _is_as_good_as_torch(
    run: Run, inputs: list[torch.Tensor], weights: list[torch.Tensor], gradients: list[torch.Tensor]
) -> None:
    """Compare all results and gradients; of two fused runs all bits are equal."""
    fused = choose("triton", CUDA)
    assert fused.name == "triton"
    tensors = inputs, weights, gradients
    exact = gradients_of(partial(run, torch_operators()), *tensors, torch.float64)
    eager = gradients_of(partial(run, torch_operators()), *tensors, torch.bfloat16)
    found, again = (gradients_of(partial(run, fused), *tensors, torch.bfloat16) for _ in range(2))
    for number, (ours, other, theirs, right) in enumerate(
        zip(found, again, eager, exact, strict=True)
    ):
        assert relative_error(ours, right) < SLACK * relative_error(theirs, right) + FLOOR, (
            f"tensor {number}"
        )
        assert torch.equal(ours, other), f"tensor {number} does not repeat"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


@pytest.fixture
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without cuDNN's attention, whose backward does not repeat; cuBLAS needs a set workspace."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("kind", "bias"), [("layernorm", True), ("layernorm", False), ("rmsnorm", False)]
)
@pytest.mark.parametrize("shape", [(2048, 4, 4096), (256, 4, 5120), (256, 4, 12288), (33, 3, 1000)])
def test_norm(shape: tuple[int, int, int], kind: Kind, bias: bool, residual: bool) -> None:
    def run(
        operators: Operators, x: Sequence[torch.Tensor], bound: Sequence[Weight]
    ) -> tuple[torch.Tensor, ...]:
        added = bound[1 + bias :]
        return operators.norm(
            x[0],
            x[1] if residual else None,
            bound[0],
            bound[1] if bias else None,
            kind,
            1e-5,
            added,
        )

    inputs = [3 + _random(*shape) for _ in range(1 + residual)]
    weights = [1 + _random(shape[-1], scale=0.1) for _ in range(1 + bias + residual)]
    _is_as_good_as_torch(run, inputs, weights, [_random(*shape), _random(*shape)])


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("shape", [(2048, 4, 4096), (33, 3, 1000)])
def test_add(shape: tuple[int, int, int], biases: int) -> None:
    def run(
        operators: Operators, x: Sequence[torch.Tensor], bound: Sequence[Weight]
    ) -> torch.Tensor:
        return operators.add(x[0], x[1], bound)

    weights = [_random(shape[-1]) for _ in range(biases)]
    _is_as_good_as_torch(run, [_random(*shape) for _ in range(2)], weights, [_random(*shape)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "width"), [("gelu", 16384), ("gelu", 1000), ("swiglu", 13824)]
)
def test_activate(activation: Activation, width: int, bias: bool) -> None:
    def run(
        operators: Operators, x: Sequence[torch.Tensor], bound: Sequence[Weight]
    ) -> torch.Tensor:
        return operators.activate(x[0], bound[0] if bias else None, activation)

    wide = width * (2 if activation == "swiglu" else 1)
    weights = [_random(wide)] if bias else []
    _is_as_good_as_torch(
        run, [_random(1024, 2, wide, scale=2.0)], weights, [_random(1024, 2, width)]
    )


@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("heads", "activation", "turned"),
    [
        (Heads(8, 8, 128), "gelu", True),
        (Heads(8, 2, 128), "swiglu", True),
        (Heads(12, 12, 64), None, False),
    ],
    ids=["gelu", "grouped swiglu", "attention alone, learned positions"],
)
def test_block_inner(heads: Heads, activation: Activation | None, turned: bool, bias: bool) -> None:
    sequence, batch, ffn = 2048, 2, 4096 if activation else 0
    position = torch.arange(sequence, device=CUDA).expand(batch, -1)
    table = (
        rotary_table(position, rotary_frequencies(heads.size, 10_000.0, CUDA)) if turned else None
    )
    mask = attention_mask(sequence, device=CUDA)

    def run(
        operators: Operators, x: Sequence[torch.Tensor], bound: Sequence[Weight]
    ) -> torch.Tensor:
        context = AttentionContext(heads, table, mask)
        return operators.block_inner(x[0], bound[0] if bias else None, context, activation)

    width = heads.width + ffn * (2 if activation == "swiglu" else 1)
    weights = [_random(width)] if bias else []
    gradient = _random(sequence, batch, heads.query * heads.size + ffn)
    _is_as_good_as_torch(run, [_random(sequence, batch, width)], weights, [gradient])


@pytest.mark.usefixtures("_repeatable")
@pytest.mark.parametrize("over", ["heads", "projection"])
@pytest.mark.parametrize("heads", [Heads(8, 8, 128), Heads(8, 2, 128)], ids=["all", "grouped"])
def test_block_inner_with_norms_of_q_and_k(heads: Heads, over: NormedOver) -> None:
    sequence, batch = 2048, 2
    position = torch.arange(sequence, device=CUDA).expand(batch, -1)
    table = rotary_table(position, rotary_frequencies(heads.size, 1e6, CUDA))
    mask = attention_mask(sequence, device=CUDA)

    def run(
        operators: Operators, x: Sequence[torch.Tensor], bound: Sequence[Weight]
    ) -> torch.Tensor:
        norms = HeadNorms(bound[0], bound[1], 1e-6, over)
        context = AttentionContext(heads, table, mask, norms)
        return operators.block_inner(x[0], None, context, None)

    numbers = (heads.query, heads.key_value) if over == "projection" else (1, 1)
    weights = [1 + _random(number * heads.size, scale=0.2) for number in numbers]
    gradient = _random(sequence, batch, heads.query * heads.size)
    _is_as_good_as_torch(run, [_random(sequence, batch, heads.width)], weights, [gradient])


def test_block_inner_on_cudnn_is_right() -> None:
    """Without the deterministic flag: the fastest attention, on what the fused split writes."""
    heads, sequence, batch, ffn = Heads(8, 8, 128), 2048, 2, 4096
    table = rotary_table(
        torch.arange(sequence, device=CUDA).expand(batch, -1),
        rotary_frequencies(heads.size, 10_000.0, CUDA),
    )
    inputs = _random(sequence, batch, heads.width + ffn)
    gradient = _random(sequence, batch, heads.query * heads.size + ffn)

    def run(operators: Operators, x: Sequence[torch.Tensor], _: Sequence[Weight]) -> torch.Tensor:
        context = AttentionContext(heads, table, attention_mask(sequence))
        return operators.block_inner(x[0], None, context, "gelu")

    exact = gradients_of(partial(run, torch_operators()), [inputs], [], [gradient], torch.float64)
    eager = gradients_of(partial(run, torch_operators()), [inputs], [], [gradient], torch.bfloat16)
    found = gradients_of(
        partial(run, choose("triton", CUDA)), [inputs], [], [gradient], torch.bfloat16
    )
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        assert relative_error(ours, right) < SLACK * relative_error(theirs, right) + FLOOR


def test_offsets_beyond_two_to_the_31() -> None:
    rows, width = 2**31 // 16384 + 8, 16384
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    operators, plain = choose("triton", CUDA), torch_operators()
    x = torch.zeros(rows, 1, width, device=CUDA, dtype=torch.bfloat16)
    x[-4:] = _random(4, 1, width)
    weight = Weight(
        torch.ones(width, device=CUDA, dtype=torch.bfloat16), torch.zeros(width, device=CUDA)
    )
    with torch.no_grad():
        found = operators.activate(x, None, "gelu")[-4:]
        torch.testing.assert_close(
            found, plain.activate(x[-4:], None, "gelu"), atol=2e-2, rtol=2e-2
        )
        normed = operators.norm(x, None, weight, None, "rmsnorm", 1e-5)[1][-4:]
        expected = plain.norm(x[-4:], None, weight, None, "rmsnorm", 1e-5)[1]
        torch.testing.assert_close(normed, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_attention_backends_that_are_here(backend: str, window: int) -> None:
    sequence, batch, size = 512, 2, 128
    mask = attention_mask(sequence, window=window, device=CUDA)
    inputs = [_random(batch, heads, sequence, size, scale=0.5) for heads in (8, 8, 8)]
    obstacle = BACKENDS[backend].obstacle(inputs[0], mask)
    if obstacle is not None:
        pytest.skip(f"{backend}: {obstacle}")

    def run(x: Sequence[torch.Tensor], _: Sequence[Weight], name: str = backend) -> torch.Tensor:
        return attention(x[0], x[1], x[2], mask, name)

    gradient = [_random(batch, 8, sequence, size)]
    exact = gradients_of(partial(run, name="math"), inputs, [], gradient, torch.float64)
    for ours, right in zip(
        gradients_of(run, inputs, [], gradient, torch.bfloat16), exact, strict=True
    ):
        assert relative_error(ours, right) < 2e-2


def _job(kernels: str, model: dict[str, Any], tp: int, recompute: str) -> dict[str, Any]:
    return tiny_job(
        model={"hidden_size": 128, "heads": 8, "sequence_length": 64, **model},
        parallelism={"tp": tp, "recompute": recompute},
        training={"precision": "bf16", "kernels": kernels, "micro_batch_size": 2},
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({"block": "parallel"}, "none"),
        ({"block": "parallel", "mlp": "swiglu", "norm": "rmsnorm", "kv_heads": 4}, "selective"),
        ({"block": "serial"}, "full"),
        (
            {
                "block": "serial",
                "mlp": "swiglu",
                "norm": "rmsnorm",
                "positions": "learned",
                "bias": False,
            },
            "selective",
        ),
        (
            {
                "block": "serial",
                "mlp": "swiglu",
                "norm": "rmsnorm",
                "kv_heads": 4,
                "bias": False,
                "attention_bias": True,
                "qk_norm": True,
                "tie_embeddings": True,
            },
            "selective",
        ),
        (
            {
                "block": "serial",
                "mlp": "swiglu",
                "norm": "rmsnorm",
                "kv_heads": 4,
                "bias": False,
                "qk_norm": True,
                "qk_norm_over": "projection",
            },
            "selective",
        ),
    ],
)
def test_the_trainer_trains_alike_and_never_waits(
    model: dict[str, Any], recompute: str, tp: int, pool: RankPool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices, there are {torch.cuda.device_count()}")
    if tp > 1 and "qk_norm_over" in model:
        pytest.skip("tp would split the heads that the norm covers")
    jobs = [_job(kernels, model, tp, recompute) for kernels in ("torch", "triton")]
    found = pool.run(
        "tests.harness.training:train_each", tp, tmp_path / "train", jobs=jobs, steps=10
    )
    plain, fused = ([record["loss"] for record in records] for records in found[0])
    np.testing.assert_allclose(fused, plain, rtol=0, atol=3e-2)
    assert fused[-1] < fused[0] - 0.3, "the model did not learn: the comparison proves little"
    program = "tests.harness.training:step_without_sync"
    assert pool.run(program, tp, tmp_path / "wait", jobs=jobs[1:]) == [1] * tp
