"""FP8 on Hopper: casts bit for bit, GEMMs against float64, accumulation, choices, fallbacks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import cublas_lt, gemm
from megascale_kernels import quantize as plain
from megascale_kernels.gemm import Gemm, multiply_by_torch
from megascale_kernels.norm import layer_norm
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand, dequantize, norm_bound, scale_of

fused = pytest.importorskip("megascale_kernels.fused.quantize", exc_type=ImportError)
norm_operand = pytest.importorskip(
    "megascale_kernels.fused.norm_operand", exc_type=ImportError
).norm_operand

CUDA = torch.device("cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

BURST_S = 0.005  # for which an algorithm is timed
# Tensor cores align the summands before they add them: relative errors of sums over 1024, with and
# without ``fast``.
SUM_ERROR = {True: 2e-3, False: 5e-4}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device=CUDA)).bfloat16()


def _exact(left: Factor, right: Factor) -> torch.Tensor:
    return dequantize(left).double() @ dequantize(right).double().t()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(8192, 4096), (1000, 1016), (33, 70)])
def test_casts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _random(*shape)
    x[shape[0] // 2] *= 100
    found = fused.quantize(x, dtype, amax=fused.amax(x))
    wanted = plain.quantize(x, dtype, transposed=True)
    by_row = fused.quantize_rows(x, dtype, transposed=True)
    wanted_by_row = plain.quantize(x, dtype, per="row", power_of_two=True, transposed=True)
    for ours, right in ((found, wanted), (by_row, wanted_by_row)):
        assert torch.equal(ours.scale, right.scale)
        for one, other in (
            (ours.data, right.data),
            (ours.over_rows().data, right.over_rows().data),
        ):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("width", [4096, 12288])
def test_norm(width: int) -> None:
    x, residual, shift, bias = (
        _random(300, width),
        _random(300, width),
        _random(width),
        _random(width, scale=0.1),
    )
    weight = 1 + _random(width, scale=0.1)
    scale = scale_of(norm_bound(weight, bias), E4M3)
    out = torch.empty_like(x, dtype=E4M3)
    found = norm_operand(x, residual, shift, weight, bias, "layernorm", 1e-5, scale, out)
    exact = layer_norm(found.stream.double(), weight.double(), bias.double(), 1e-5)
    assert relative_error(dequantize(found.operand.over_columns()), exact) < 0.03


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("gradient", [E4M3, E5M2])
def test_gemms_of_a_linear_layer(
    gradient: torch.dtype, per: str, fast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x, w, dy = _random(768, 1024), _random(512, 1024, scale=0.02), _random(768, 512, scale=1e-4)
    quantize = fused.quantize_rows if per == "row" else _by_tensor
    operands = quantize(x, transposed=True), quantize(dy, gradient, transposed=True)
    weight = _by_tensor(w, transposed=True)
    sides = (
        (operands[0].over_columns(), weight.over_columns(), False),
        (operands[1].over_columns(), weight.over_rows(), False),
        (operands[1].over_rows(), operands[0].over_rows(), True),
    )
    gemms = Gemm(duration_s=BURST_S)
    with caplog.at_level(logging.WARNING):
        for left, right, accumulate in sides:
            shape = left.data.shape[0], right.data.shape[0]
            out = torch.full(shape, float("nan"), device=CUDA, dtype=torch.bfloat16)
            start = torch.randn(shape, device=CUDA) * 1e-3
            if accumulate:
                out = start.clone()
            gemms.multiply(left, right, out, accumulate=accumulate, fast=fast)
            exact = _exact(left, right)
            bound = SUM_ERROR[fast] + (0.0 if accumulate else 2e-3)
            assert (
                relative_error(out.double() - start.double() if accumulate else out, exact) < bound
            )
            again = start.clone() if accumulate else torch.empty_like(out)
            gemms.multiply(left, right, again, accumulate=accumulate, fast=fast)
            assert torch.equal(out, again), "does not repeat"
    assert not caplog.records, "the library was not used"


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_one_sign_need_the_bits_of_float32(accumulate: bool) -> None:
    """As of a weight gradient over many tokens, whose summands need not cancel.

    On an H200 fast sums were off by 0.055 and 0.064, the others by 0.0006.
    """
    left, right = (_by_tensor(_random(rows, 32768).abs()).over_columns() for rows in (256, 512))
    exact, errors = _exact(left, right), {}
    for fast in (True, False):
        out = torch.zeros(256, 512, device=CUDA)
        Gemm(duration_s=BURST_S).multiply(left, right, out, accumulate=accumulate, fast=fast)
        errors[fast] = relative_error(out, exact)
    assert errors[False] < 1e-3, errors
    assert errors[True] > 10 * errors[False], errors


def _by_tensor(x: torch.Tensor, dtype: torch.dtype = E4M3, *, transposed: bool = False) -> Operand:
    return fused.quantize(x, dtype, amax=fused.amax(x), transposed=transposed)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("upright", [(False, False), (False, True), (True, True), (True, False)])
def test_bf16_in_every_layout(upright: tuple[bool, bool], accumulate: bool) -> None:
    left, right = (
        _random(1024, rows).t() if flipped else _random(rows, 1024)
        for rows, flipped in zip((256, 384), upright, strict=True)
    )
    start = torch.randn(256, 384, device=CUDA)
    out = start.clone() if accumulate else torch.full_like(start, float("nan"))
    Gemm(duration_s=BURST_S).multiply(Factor(left), Factor(right), out, accumulate=accumulate)
    exact = left.double() @ right.double().t() + (start.double() if accumulate else 0.0)
    assert relative_error(out, exact) < 1e-5


def test_rows_of_larger_matrices() -> None:
    """As overlapped matmuls take them: rows of both sides, and a part of the summed dimension."""
    x, w = (_by_tensor(_random(rows, 2048)).over_columns() for rows in (512, 256))
    out = torch.zeros(512, 256, device=CUDA, dtype=torch.bfloat16)
    gemms = Gemm(duration_s=BURST_S)
    for first, last in ((0, 128), (128, 304), (304, 512)):
        gemms.multiply(Factor(x.data[first:last], x.scale), w, out[first:last])
    assert relative_error(out, _exact(x, w)) < 4e-3
    part = Factor(x.data[:, 48:1072], x.scale), Factor(w.data[:, 48:1072], w.scale)
    gemms.multiply(*part, out)
    assert relative_error(out, _exact(*part)) < 4e-3


def test_a_choice_is_kept_in_a_file_and_taken_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "choices.json", torch.empty(512, 512, device=CUDA, dtype=torch.bfloat16)
    x, w = (_by_tensor(_random(512, 512)).over_columns() for _ in range(2))
    Gemm(file, duration_s=BURST_S).multiply(x, w, out)
    [entry] = json.loads(file.read_text()).values()
    assert len(entry["times_ms"]) > 1

    def measure(*_: object, **__: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(gemm, "time_algorithm", measure)
    again = torch.empty_like(out)
    Gemm(file, duration_s=BURST_S).multiply(x, w, again)
    assert torch.equal(out, again)
    file.write_text(file.read_text().replace(entry["code"], "ff" * cublas_lt.CODE_BYTES))
    with pytest.raises(AssertionError, match="measured again"):
        Gemm(file, duration_s=BURST_S).multiply(x, w, again)


def test_nothing_waits_for_the_device() -> None:
    x, weight = _random(512, 256), _by_tensor(_random(256, 256), transposed=True)
    out, gemms = (
        torch.empty(512, 256, device=CUDA, dtype=torch.bfloat16),
        Gemm(duration_s=BURST_S),
    )
    main_grad = torch.zeros(256, 256, device=CUDA)

    def step() -> None:
        operand = _by_tensor(x, transposed=True)
        gemms.multiply(operand.over_columns(), weight.over_columns(), out)
        gemms.multiply(operand.over_rows(), operand.over_rows(), main_grad, accumulate=True)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_broken_tensor_breaks_its_gemms() -> None:
    x, w = _random(256, 256), _by_tensor(_random(256, 256)).over_columns()
    x[3, 4] = float("inf")
    operand = _by_tensor(x)
    assert not bool(operand.finite())
    out = torch.zeros(256, 256, device=CUDA)
    Gemm(duration_s=BURST_S).multiply(operand.over_columns(), w, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_torch_computes_it_where_the_library_is_not_there(
    per: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> cublas_lt.Library:
        raise cublas_lt.CublasLtError(f"no library, for {per} {accumulate}")

    monkeypatch.setattr(gemm, "loaded_library", absent)
    x = (fused.quantize_rows if per == "row" else _by_tensor)(_random(256, 512)).over_columns()
    w = _by_tensor(_random(128, 512)).over_columns()
    start = torch.randn(256, 128, device=CUDA)
    gemms, out = Gemm(duration_s=BURST_S), start.clone()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out.copy_(start)
            gemms.multiply(x, w, out, accumulate=accumulate)
    exact = _exact(x, w) + (start.double() if accumulate else 0.0)
    assert relative_error(out, exact) < 4e-3
    assert len(caplog.records) == 1, "logged once"


def test_streams_do_not_share_a_workspace() -> None:
    gemms, side = Gemm(timed=False), torch.cuda.Stream()
    x, w = (_by_tensor(_random(512, 512)).over_columns() for _ in range(2))
    outs = [torch.empty(512, 512, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    gemms.multiply(x, w, outs[0])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gemms.multiply(x, w, outs[1])
    torch.cuda.synchronize()
    assert len({one.data_ptr() for one in gemms._workspaces.values()}) == 2
    assert torch.equal(*outs)


def test_a_linear_layer_beside_bf16() -> None:
    """All of it in FP8 has the error of the formats against float64: 0.037, and bf16 0.002."""
    x, w, dy = _random(2048, 1024), _random(1536, 1024, scale=0.02), _random(2048, 1536, scale=1e-4)
    operands = [_by_tensor(one, transposed=True) for one in (x, w, dy)]
    found = torch.empty_like(dy), torch.empty_like(x), torch.zeros(w.shape, device=CUDA)
    gemms = Gemm(duration_s=BURST_S)
    gemms.multiply(operands[0].over_columns(), operands[1].over_columns(), found[0])
    gemms.multiply(operands[2].over_columns(), operands[1].over_rows(), found[1])
    gemms.multiply(operands[2].over_rows(), operands[0].over_rows(), found[2], accumulate=True)
    bf16 = torch.empty_like(dy)
    multiply_by_torch(Factor(x), Factor(w), bf16)
    wide = [one.double() for one in (x, w, dy)]
    exact = wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]
    for ours, right in zip(found, exact, strict=True):
        assert relative_error(ours, right) < 0.045
    assert relative_error(bf16, exact[0]) < 3e-3
