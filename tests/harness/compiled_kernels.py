"""Compiles Triton kernels to Hopper's machine code, for which no device is needed; prints their PTX as JSON.

Run as a program of its own: a process whose kernels run in Triton's interpreter cannot compile them.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megascale_kernels.fused import adamw, cross_entropy

HOPPER = GPUTarget("cuda", 90, 32)
ROWS = {name: "*fp32" for name in ("maximum", "total", "target", "d_loss", "d_log_z")}
LOGITS = {"logits": "*bf16", "local": "*i64", "stride": "i32", "width": "i32", **ROWS}
SHARD = {"states": "*fp32", "gradient": "*fp32", "parameters": "*bf16", "scale": "*fp32", "apply": "*fp32"}


def ptx_of(kernel: Any, known: dict[str, str], rest: str, block: int, warps: int) -> str:
    """PTX of ``kernel``: arguments of the types ``known``, all multiples of 16, the others ``rest``."""
    names = [name for name in kernel.arg_names if name != "BLOCK"]
    source = ASTSource(
        fn=kernel,
        signature={**{name: known.get(name, rest) for name in names}, "BLOCK": "constexpr"},
        constexprs={(kernel.arg_names.index("BLOCK"),): block},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name in known},
    )
    text: str = triton.compile(source, target=HOPPER, options={"num_warps": warps}).asm["ptx"]
    return text


def main() -> None:
    """Compile them all."""
    found = {
        "statistics": ptx_of(
            cross_entropy._statistics_kernel, LOGITS, "i32", cross_entropy._BLOCK, cross_entropy._WARPS
        ),
        "gradient": ptx_of(cross_entropy._gradient_kernel, LOGITS, "i32", cross_entropy._BLOCK, cross_entropy._WARPS),
        "adamw": ptx_of(adamw._kernel, {**SHARD, "stride": "i64", "size": "i32"}, "fp32", adamw._BLOCK, adamw._WARPS),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
