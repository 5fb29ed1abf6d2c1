"""A dry run of benchmarks/grouped_gemm.py, its arithmetic, and the layer that it times."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import grouped_gemm as benchmark
from benchmarks.grouped_gemm import SHAPES, TINY, Bench, ExpertLayer, chosen_experts, loads
from tests.harness.kernels import DEVICE, relative_error

pytest.importorskip("triton")


def _bench() -> Bench:
    torch.manual_seed(1)
    return Bench(DEVICE, 0.0, 100.0)


@pytest.mark.parametrize(
    ("name", "gigaflop", "billions"),
    [("m1", 4.98, 2.92), ("m2", 2.88, 3.82), ("m2-ep8", 2.88, 0.64), ("m3", 3.68, 3.62)],
)
def test_the_models_are_those_of_the_bars(name: str, gigaflop: float, billions: float) -> None:
    # A device's share under EP8 routes over all experts: its router is wider than counted here.
    assert SHAPES[name].flop_per_token() / 1e9 == pytest.approx(gigaflop, rel=0.01)
    assert SHAPES[name].parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loads_hold_all_rows(shape: benchmark.Shape) -> None:
    assert set(loads(shape, even=True)) == {shape.rows // shape.experts}
    uneven = loads(shape, even=False)
    assert sum(uneven) == shape.rows and min(uneven) >= 0
    assert max(uneven) > 1.5 * shape.rows / shape.experts


@pytest.mark.parametrize("load", ["even", "uneven"])
def test_tokens_choose_different_experts(load: str) -> None:
    chosen = chosen_experts(_bench(), TINY, load)
    assert all(len(set(row)) == TINY.top_k for row in chosen.tolist())
    if load == "even":
        counts = chosen.flatten().bincount(minlength=TINY.experts)
        assert set(counts.tolist()) == {TINY.rows // TINY.experts}


@pytest.mark.parametrize("load", ["even", "uneven"])
def test_the_layer_is_that_of_autograd(load: str) -> None:
    layer = ExpertLayer(_bench(), TINY, load)
    d_x = layer.bf16()
    x, w1, w2 = (one.double().requires_grad_() for one in (layer.x, layer.w1, layer.w2))
    total = torch.zeros_like(x)
    for number in range(TINY.top_k):
        expert = layer.chosen[:, number]
        gate, up = torch.einsum("th,tfh->tf", x, w1[expert]).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up * layer.weights[:, number : number + 1]
        total = total + torch.einsum("tf,thf->th", inner, w2[expert])
    found = torch.autograd.grad(total, (x, w1, w2), layer.d_y.double())
    bound = 1e-5 if layer.x.dtype == torch.float32 else 2e-2
    for ours, exact in zip((d_x, layer.d_w1, layer.d_w2), found, strict=True):
        assert relative_error(ours, exact) < bound


@pytest.mark.slow
def test_a_dry_run_measures_every_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--quick"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not [line for line in found["lines"] if "failed" in line]
    pieces = {line["piece"] for line in found["lines"]}
    assert {"ours bf16", "spread", "join", "ours layer", "attention", "optimizer"} <= pieces
    (total,) = found["projection"]
    assert total["step_ms"] == pytest.approx(sum(total["parts_ms"].values()))
    assert total["model_tflops"] > 0


def test_a_missing_piece_makes_no_projection() -> None:
    assert benchmark.projection(_bench(), TINY, "bf16") is None


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--shapes", "m9"], ["--loads", "x"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.main(["--quick", *arguments])
    assert refused.value.code == 2
