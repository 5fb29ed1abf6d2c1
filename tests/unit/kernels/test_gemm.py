"""GEMMs on a CPU, how they are described to the library, and the file of choices."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch
from tests.harness.kernels import relative_error

from megascale_kernels import cublas_lt
from megascale_kernels.cublas_lt import CODE_BYTES, Algorithm, CublasLtError, problem_of
from megascale_kernels.gemm import Gemm
from megascale_kernels.gemm_choices import Choices
from megascale_kernels.quantize import E5M2, Factor, dequantize, quantize

ALGORITHM = Algorithm(bytes(range(CODE_BYTES)), 1024)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gemm_of_the_values_of_fp8_numbers(accumulate: bool, per: str) -> None:
    x = quantize(_random(32, 48), per=per).over_columns()  # type: ignore[arg-type]
    w = quantize(_random(16, 48), E5M2).over_columns()
    out = torch.ones(32, 16)
    Gemm().multiply(x, w, out, accumulate=accumulate)
    exact = dequantize(x).double() @ dequantize(w).double().t() + (1.0 if accumulate else 0.0)
    assert relative_error(out, exact) < 1e-6


def test_a_linear_layer_and_its_gradients() -> None:
    x, w, dy = _random(24, 32), _random(40, 32), _random(24, 40)
    gemm, found = Gemm(), (torch.empty(24, 40), torch.empty(24, 32), torch.ones(40, 32))
    operands = [quantize(one, per="row", power_of_two=True, transposed=True) for one in (x, dy)]
    weight = quantize(w, transposed=True)
    gemm.multiply(operands[0].over_columns(), weight.over_columns(), found[0])
    gemm.multiply(operands[1].over_columns(), weight.over_rows(), found[1])
    gemm.multiply(operands[1].over_rows(), operands[0].over_rows(), found[2], accumulate=True)
    wide = [one.double() for one in (x, w, dy)]
    exact = (wide[0] @ wide[1].t(), wide[2] @ wide[1], 1 + wide[2].t() @ wide[0])
    for ours, right in zip(found, exact, strict=True):
        assert relative_error(ours, right) < 0.06


def test_transposed_views_are_upright() -> None:
    left, right, out = (
        Factor(_random(48, 32).t()),
        Factor(_random(16, 48)),
        torch.empty(64, 20)[16:48, :16],
    )
    problem = problem_of(left, right, out, accumulate=True, fast=True)
    assert (problem.rows, problem.columns, problem.depth) == (32, 16, 48)
    assert (problem.left_upright, problem.left_stride) == (True, 32)
    assert (problem.right_upright, problem.right_stride, problem.out_stride) == (False, 48, 20)
    assert problem.scaling == "none"


def test_the_worst_alignment_counts() -> None:
    whole = torch.empty(64, 512, dtype=torch.float8_e4m3fn)
    start = -whole.data_ptr() % 256
    scale, out = torch.ones(1), torch.empty(64, 64)
    aligned = whole.flatten()[start : start + 32 * 512].view(32, 512)
    for first, bytes_found in ((0, 256), (64, 64), (48, 16)):
        left = Factor(aligned[:, first : first + 256], scale)
        rows = out.flatten()[(-out.data_ptr() % 256) // 4 :][: 32 * 32].view(32, 32)
        problem = problem_of(
            left, Factor(aligned[:, :256], scale), rows, accumulate=False, fast=True
        )
        assert problem.alignment == bytes_found


def test_what_does_not_fit_is_refused() -> None:
    x, w = Factor(_random(8, 16)), Factor(_random(4, 16))
    with pytest.raises(ValueError, match="is not"):
        problem_of(x, w, torch.empty(4, 8), accumulate=False, fast=True)
    with pytest.raises(ValueError, match="contiguous along one"):
        problem_of(
            Factor(_random(16, 32)[::2, ::2]), w, torch.empty(8, 4), accumulate=False, fast=True
        )
    with pytest.raises(ValueError, match="columns must be contiguous"):
        problem_of(x, w, torch.empty(4, 8).t(), accumulate=False, fast=True)
    with pytest.raises(ValueError, match="either both"):
        problem_of(Factor(x.data, torch.ones(1)), w, torch.empty(8, 4), accumulate=False, fast=True)


def test_everything_that_an_algorithm_depends_on_is_in_the_key() -> None:
    x, w = quantize(_random(8, 16)).over_columns(), quantize(_random(4, 16)).over_columns()
    first = problem_of(x, w, torch.empty(8, 4), accumulate=False, fast=True)
    others = {
        name: -1 if isinstance(value, int) else torch.int8
        for name, value in first._asdict().items()
    }
    keys = {first._replace(**{name: value}).key for name, value in others.items()}
    assert len(keys | {first.key}) == len(first) + 1


def test_choices_are_kept_beside_those_of_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "choices.json"
    first, second = Choices(file), Choices(file)
    first.put("gpu a", ALGORITHM, [1.0, 2.0])
    second.put("gpu b", ALGORITHM, [3.0])
    found = Choices(file)
    assert found.get("gpu a") == found.get("gpu b") == ALGORITHM
    assert found.get("gpu c") is None
    assert [path.name for path in file.parent.iterdir()] == ["choices.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"gpu a": 3}',
        '{"gpu a": {}}',
        json.dumps({"gpu a": {"code": "00", "workspace_bytes": 1}}),
        json.dumps({"gpu a": {"code": "zz" * CODE_BYTES, "workspace_bytes": 1}}),
    ],
)
def test_a_broken_file_counts_as_empty(content: str, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    assert Choices(file).get("gpu a") is None
    Choices(file).put("gpu a", ALGORITHM, [1.0])
    assert Choices(file).get("gpu a") == ALGORITHM


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    choices = Choices(tmp_path / "cache" / "choices.json")
    choices.put("gpu a", ALGORITHM, [1.0])
    assert choices.get("gpu a") == ALGORITHM


def test_structures_have_the_librarys_sizes() -> None:
    """Of cublasLtMatmulAlgo_t and cublasLtMatmulHeuristicResult_t in cublasLt.h."""
    assert ctypes.sizeof(cublas_lt._Algorithm) == 64
    assert ctypes.sizeof(cublas_lt._Result) == 96


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_torch_without_cuda_has_no_library() -> None:
    with pytest.raises(CublasLtError, match="no libcublasLt"):
        cublas_lt.loaded_library()
