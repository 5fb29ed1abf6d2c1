"""Compile Triton kernels for Hopper on a machine without a GPU: ``python -m tests.harness.compile_kernels``.

The interpreter runs a kernel as Python and lets pass what the compiler refuses. Types follow from parameters' names.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megascale_kernels.fused import activation, norm, rotary

HOPPER = GPUTarget("cuda", 90, 32)
FLOAT32 = {"mean", "scale", "d_weight", "d_bias", "partial", "cos", "sin"}
COUNTS = {"rows", "width", "each", "across", "sequence", "batch", "heads"}


def compile_for_hopper(kernel: Any, warps: int, **constants: Any) -> None:
    """Compile ``kernel`` down to machine code; ``constants`` are its constexpr parameters and those that are None."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in COUNTS or name.endswith("_stride"):
            return "i32"
        if name == "epsilon":
            return "fp32"
        return "*fp32" if name in FLOAT32 else "*bf16"

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm["cubin"]


def main() -> None:
    """Every kernel, with and without what it may be without."""
    block = triton.next_power_of_2(5120)
    for absent in ({}, {"residual": None, "stream": None, "mean": None, "bias": None}):
        compile_for_hopper(norm._forward_kernel, norm._warps(block), BLOCK=block, **absent)
    for absent in ({}, {"d_stream": None, "mean": None, "d_bias": None}):
        compile_for_hopper(norm._backward_kernel, norm._warps(block), BLOCK=block, **absent)
    tile = {"ROWS": activation._ROWS, "COLUMNS": activation._COLUMNS}
    for gated, bias in ((True, {}), (False, {"bias": None})):
        compile_for_hopper(activation._forward_kernel, 4, GATED=gated, **tile, **bias)
        steps = {"STEPS": activation._STEPS, "GATED": gated}
        compile_for_hopper(
            activation._backward_kernel, 4, **steps, **tile, **bias, **({"partial": None} if bias else {})
        )
    sizes = dict(zip(("SIZE", "HALF", "BLOCK", "POSITIONS", "GROUP"), rotary._sizes(12, 128), strict=True))
    for straight, bias in (({}, {"bias": None}), ({"cos": None, "sin": None}, {})):
        compile_for_hopper(rotary._read_kernel, 4, **sizes, **straight, **bias)
        compile_for_hopper(rotary._write_kernel, 4, **sizes, **straight, **({"partial": None} if bias else {}))


if __name__ == "__main__":
    main()
