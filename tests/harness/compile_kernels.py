"""Compile Triton kernels for Hopper on a machine without a GPU: ``python -m tests.harness.compile_kernels``.

The interpreter runs a kernel as Python and lets pass what the compiler refuses. A program of its own, because a process
whose kernels run in the interpreter cannot compile them. It prints the PTX of each kernel as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megascale_kernels.fused import activation, adamw, cross_entropy, norm, rotary

HOPPER = GPUTarget("cuda", 90, 32)
COUNTS = {"rows", "width", "each", "across", "sequence", "batch", "heads"}
NORM = {"mean": "*fp32", "scale": "*fp32", "d_weight": "*fp32", "d_bias": "*fp32", "epsilon": "fp32"}
COLUMNS = {"partial": "*fp32", "cos": "*fp32", "sin": "*fp32"}
ROWS = {name: "*fp32" for name in ("maximum", "total", "target", "d_loss", "d_log_z")}
LOGITS = {"logits": "*bf16", "local": "*i64", "stride": "i32", "width": "i32", **ROWS}
SHARD = {"states": "*fp32", "gradient": "*fp32", "parameters": "*bf16", "scale": "*fp32", "apply": "*fp32"}


def ptx_of(kernel: Any, known: Mapping[str, str], warps: int, rest: str = "*bf16", **constants: Any) -> str:
    """PTX of ``kernel``, compiled down to machine code.

    Args:
        known: types of arguments by name. Pointers and strides among them are multiples of 16.
        rest: type of the other arguments, but counts and strides.
        constants: constexpr parameters, and arguments that are None.
    """

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return known.get(name) or ("i32" if name in COUNTS or name.endswith("_stride") else rest)

    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in kernel.arg_names},
        constexprs=constants,
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(kernel.arg_names)
            if name in known and name not in constants and known[name] != "fp32"
        },
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm
    assert compiled["cubin"]
    text: str = compiled["ptx"]
    return text


def _norms() -> dict[str, str]:
    block = triton.next_power_of_2(5120)
    warps, found = norm._warps(block), {}
    for name, absent in (
        ("layer norm", {}),
        ("rms norm", {"residual": None, "stream": None, "mean": None, "bias": None}),
    ):
        found[name] = ptx_of(norm._forward_kernel, NORM, warps, BLOCK=block, **absent)
    for name, absent in (("layer norm", {}), ("rms norm", {"d_stream": None, "mean": None, "d_bias": None})):
        found[f"{name} backward"] = ptx_of(norm._backward_kernel, NORM, warps, BLOCK=block, **absent)
    return found


def _activations() -> dict[str, str]:
    tile, found = {"ROWS": activation._ROWS, "COLUMNS": activation._COLUMNS}, {}
    for name, gated, bias in (("swiglu", True, {}), ("gelu", False, {"bias": None})):
        found[name] = ptx_of(activation._forward_kernel, COLUMNS, 4, GATED=gated, **tile, **bias)
        constants = {"STEPS": activation._STEPS, "GATED": gated, **tile, **bias, **({"partial": None} if bias else {})}
        found[f"{name} backward"] = ptx_of(activation._backward_kernel, COLUMNS, 4, **constants)
    return found


def _heads() -> dict[str, str]:
    sizes = dict(zip(("SIZE", "HALF", "BLOCK", "POSITIONS", "GROUP"), rotary._sizes(12, 128), strict=True))
    found = {}
    for name, straight, bias in (("rotary", {}, {"bias": None}), ("heads", {"cos": None, "sin": None}, {})):
        found[name] = ptx_of(rotary._read_kernel, COLUMNS, 4, **sizes, **straight, **bias)
        partial = {"partial": None} if bias else {}
        found[f"{name} backward"] = ptx_of(rotary._write_kernel, COLUMNS, 4, **sizes, **straight, **partial)
    return found


def _loss_and_update() -> dict[str, str]:
    block, warps = cross_entropy._BLOCK, cross_entropy._WARPS
    known = {**SHARD, "stride": "i64", "size": "i32"}
    return {
        "statistics": ptx_of(cross_entropy._statistics_kernel, LOGITS, warps, "i32", BLOCK=block),
        "gradient": ptx_of(cross_entropy._gradient_kernel, LOGITS, warps, "i32", BLOCK=block),
        "adamw": ptx_of(adamw._kernel, known, adamw._WARPS, "fp32", BLOCK=adamw._BLOCK),
    }


if __name__ == "__main__":
    print(json.dumps({**_norms(), **_activations(), **_heads(), **_loss_and_update()}))
