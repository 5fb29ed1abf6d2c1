"""Every fused kernel compiles for Hopper, on any machine: the interpreter accepts more."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

KERNELS = Path(__file__).resolve().parents[3] / "kernels" / "megascale_kernels"
ROOMS = ("fused", "masked")
NARROW = re.compile(r"(?:ld|st)\.global[\w.:]*\.b16")
# A copy to shared memory names its bytes.
WIDE = re.compile(r"(?:ld|st)\.global[\w.:]*\.v4|cp\.async\.c[ag][^;]*\], 0x10,")


@pytest.fixture(
    scope="module",
    params=["", "--at-length"],
    ids=["short", "at length"],
)
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """PTX and figures of each kernel, from a process outside of the interpreter.

    Triton's cache outlives the run: its keys hold the sources of a kernel, its types and options,
    and Triton's own build, so a kernel is compiled again whenever any of them has changed.
    """
    assert request.config.cache is not None
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.compile_kernels", *filter(None, [request.param])],
        env=environment,
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_kernel_is_left_out(compiled: dict[str, dict[str, Any]]) -> None:
    """A kernel has a call in the table COMPILED of its module's test."""
    kernels = {
        f"megascale_kernels.{room}.{path.stem}.{node.name}"
        for room in ROOMS
        for path in (KERNELS / room).glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(kernels) > 10
    assert {kernel["kernel"] for kernel in compiled.values()} == kernels


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]]) -> None:
    for name, kernel in compiled.items():
        if name.startswith("small"):  # at any width: nothing is promised
            continue
        if "quantize_scale" in name:  # rows begin anywhere, a number each
            continue
        if name.startswith("grouped gemm"):  # tiles travel through the bulk copy engine
            assert "cp.async.bulk.tensor" in kernel["ptx"], name
            assert not NARROW.search(kernel["ptx"]), name
            continue
        if name.startswith("router"):  # a token's choices are numbers by themselves
            continue
        # One number by itself: a row's logit of the target.
        singles = 1 if name == "cross entropy: entropy_kernel" else 0
        assert len(NARROW.findall(kernel["ptx"])) == singles, name
        assert WIDE.search(kernel["ptx"]), name


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("cross entropy: entropy_kernel", 2, 0),
        ("cross entropy: entropy_gradient_kernel", 2, 2),
        ("adamw: adamw_kernel", 8, 7),
        ("lamb: lamb_direction_kernel", 8, 6),
        ("lamb: lamb_apply_kernel", 4, 3),
    ],
)
def test_nothing_is_read_twice(
    kernel: str, loads: int, stores: int, compiled: dict[str, dict[str, Any]]
) -> None:
    """A thread has 16 logits in bf16, or 8 parameters: two loads of each float32 operand."""
    ptx = compiled[kernel]["ptx"]
    assert len(re.findall(r"ld\.global[\w.:]*\.v4", ptx)) == loads
    assert len(re.findall(r"st\.global[\w.:]*\.v4", ptx)) == stores


def test_registers_suffice(compiled: dict[str, dict[str, Any]]) -> None:
    """No kernel waits for spilled registers of its own.

    A norm's backward, which sums over rows, may spill two, a wide one a few; so may a wide norm, of
    which two programs must fit a multiprocessor. The tiles of masked attention fill the registers:
    it is for what nothing faster takes.
    """
    for name, kernel in compiled.items():
        if "masked attention" in name:
            continue
        allowed = 0
        if re.search(r"norm \d+(, amax)?: norm_backward_kernel", name):
            allowed = 104 if "12288" in name else 8
        elif re.search(r"(175b tp4|12288, amax): norm_kernel", name):
            allowed = 96
        elif name.startswith("experts of Mixtral: rows_activation_backward"):
            allowed = 64  # a row of 14336: three values of each column at once
        assert kernel["spilled_bytes"] <= allowed, name
        # A program of a grouped GEMM has a multiprocessor for itself.
        assert kernel["registers"] <= (255 if name.startswith("grouped gemm") else 192), name


@pytest.mark.parametrize("kind", ["layernorm 4096", "layernorm 4096, amax", "layernorm 7168"])
def test_a_norms_backward_loads_rows_while_it_computes_one(
    kind: str, compiled: dict[str, dict[str, Any]]
) -> None:
    """16 warps to a multiprocessor, which copy x and two gradients: two rows before, one within."""
    kernel = compiled[f"{kind}: norm_backward_kernel"]
    assert kernel["registers"] <= 128
    columns_of_a_thread, bytes_of_a_copy = 16, 16
    copies = 3 * 3 * columns_of_a_thread * 2 // bytes_of_a_copy
    assert len(re.findall(r"cp\.async\.c[ag]", kernel["ptx"])) == copies


def test_numbers_that_change_from_step_to_step_compile_nothing_anew(
    compiled: dict[str, dict[str, Any]],
) -> None:
    for optimizer, kernels in (
        ("adamw", ["adamw_kernel"]),
        ("lamb", ["lamb_direction_kernel", "lamb_apply_kernel"]),
    ):
        found = [name for name in compiled if name.startswith(f"{optimizer}:")]
        assert found == [f"{optimizer}: {kernel}" for kernel in kernels]


def test_nothing_is_added_atomically(compiled: dict[str, dict[str, Any]]) -> None:
    """A maximum does not depend on the order, a sum does.

    Except where each element gets one addend for each launch: Note [Adding into float32] in
    megascale_kernels/fused/grouped_gemm.py.
    """
    for name, kernel in compiled.items():
        atomics = re.findall(r"\b(?:atom|red)\.[\w.:]*", kernel["ptx"])
        if name.startswith("grouped gemm: grouped_gemm_weights_kernel"):
            assert all(".add" in one for one in atomics), name
            continue
        assert all(".max" in one for one in atomics), name
        assert not atomics or "amax" in name
