"""Compile the fused kernels for Hopper on a machine without a GPU: ``python -m
tests.harness.compile_kernels``.

The interpreter runs a kernel as Python and lets pass what the compiler refuses. Here the operators
are called as the trainer calls them, at the widths of real models but few rows, and each launch
compiles the kernel and does no more: so types, alignments and block sizes are those of training. A
program of its own, because a process whose kernels run in the interpreter cannot compile them. It
prints JSON: for each kernel its PTX, registers and spilled bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from tests.harness.kernels import weight
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megascale_kernels.activation import Activation
from megascale_kernels.adamw import AdamWUpdate
from megascale_kernels.fused import (
    activation,
    activation_operand,
    adamw,
    cross_entropy,
    norm,
    norm_operand,
    quantize,
    residual,
    rotary,
)
from megascale_kernels.norm import Kind
from megascale_kernels.quantize import E5M2
from megascale_kernels.rotary import Heads, RotaryTable

SEQUENCE, BATCH = 256, 4  # enough rows for programs that loop over several
UPDATE = AdamWUpdate(3e-4, 0.9, 0.95, 1e-8, 0.1, 7)


class _Hopper:
    """As much of Triton's driver as the compiler asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compiled_by(calls: dict[str, Callable[[], None]]) -> dict[str, dict[str, Any]]:
    """What the launches of each call compile, by "call: kernel"; further kernels of one name are
    numbered.
    """
    run = JITFunction.run
    launched: list[Any] = []

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append(
            (self.fn.__name__, run(self, *arguments, grid=grid, warmup=True, **options))
        )
        return launched[-1][1]

    triton.runtime.driver.set_active(_Hopper())
    JITFunction.run = compile_only
    found: dict[str, dict[str, Any]] = {}
    for label, call in calls.items():
        launched.clear()
        call()
        seen: list[Any] = []
        for kernel, compiled in launched:
            if not any(compiled is one for one in seen):
                seen.append(compiled)
                name = f"{label}: {kernel.strip('_')}"
                while name in found:
                    name += "'"
                found[name] = _figures(compiled)
    JITFunction.run = run
    return found


def _figures(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(compiled.asm["cubin"])
        code.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", code.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert usage is not None, told
    return {"ptx": compiled.asm["ptx"], "registers": int(usage[1]), "spilled_bytes": int(usage[2])}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _norm(width: int, kind: Kind, *, added: bool) -> None:
    x, other = (_random(SEQUENCE, BATCH, width).requires_grad_() for _ in range(2))
    bias = weight(_random(width)) if kind == "layernorm" else None
    biases = [weight(_random(width))] if added else []
    outputs = norm.norm(
        x.clone(), other if added else None, weight(_random(width)), bias, kind, 1e-5, biases
    )
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def _add() -> None:
    stream, x = (_random(SEQUENCE, BATCH, 4096).requires_grad_() for _ in range(2))
    total = residual.add(stream, x, [weight(_random(4096)), weight(_random(4096))])
    total.backward(torch.zeros_like(total))


def _core(heads: Heads, ffn: int, kind: Activation, *, bias: bool, table: bool = True) -> None:
    """The pieces of the core without the attention itself."""
    wide = heads.width + ffn * (2 if kind == "swiglu" else 1)
    inputs, joined = (
        _random(SEQUENCE, BATCH, width) for width in (wide, heads.query * heads.size + ffn)
    )
    angles = torch.zeros(SEQUENCE, BATCH, 1, heads.size // 2)
    turned = RotaryTable(angles, angles) if table else None
    shift, sums = (_random(wide), torch.zeros(wide)) if bias else (None, None)
    for by_position in (True, False):
        found = rotary.read_heads(inputs, shift, heads, turned, by_position=by_position)
        rotary.read_plain(joined, heads.query, heads.size, by_position=by_position)
    rotary.write_plain(joined, found[0].transpose(1, 2).contiguous().transpose(1, 2))
    rotary.write_head_gradients(inputs, sums, found, heads, turned)
    x, y = inputs[..., heads.width :], joined[..., heads.query * heads.size :]
    own = (
        (shift[heads.width :], sums[heads.width :])
        if shift is not None and sums is not None
        else (None, None)
    )
    activation.write_activation(y, x, own[0], kind)
    activation.write_gradients(x, own[1], y, x, own[0], kind)


def _loss() -> None:
    logits, target = (
        _random(SEQUENCE * BATCH, 25600),
        torch.zeros(SEQUENCE * BATCH, dtype=torch.int64),
    )
    maximum, sums = cross_entropy._statistics(logits, target, 25599)
    cross_entropy._gradient(logits, target, 25599, maximum, sums[0], maximum, maximum)


def _updates() -> None:
    """Two steps, whose numbers differ: one kernel."""
    shard, scalar = torch.zeros(4, 1 << 16), torch.ones(())
    for number in (1, 16):
        update = replace(UPDATE, number=number, learning_rate=float(number - 1), weight_decay=1.0)
        adamw.adamw(shard[:3], shard[3], _random(1 << 16), scalar, scalar, update)


def _casts(width: int) -> None:
    x, one = _random(32 * SEQUENCE, width), torch.ones(1)
    quantize.amax(x)
    quantize.transpose(quantize.quantize(x, amax=one))
    quantize.quantize(x, E5M2, amax=one, power_of_two=True, straight=False)
    quantize.quantize_rows(x, transposed=True)


def _operands(width: int, ffn: int, kind: Activation) -> None:
    rows = SEQUENCE * BATCH
    x, vector = _random(rows, width), _random(width)
    given = norm_operand.NormCast("given", scale=torch.ones(1))
    for cast in (norm_operand.NormCast("rows"), given, norm_operand.NormCast("amax")):
        norm_operand.norm_operand(x, x, vector, vector, vector, "layernorm", 1e-5, cast)
    wide = ffn * (2 if kind == "swiglu" else 1)
    inputs, bias = _random(rows, width + wide)[:, width:], _random(wide)
    activation_operand.activation_operand(inputs, bias, kind, _random(rows, ffn // 4))
    activation_operand.activation_with_amax(inputs, bias, kind)


def _small(dtype: torch.dtype) -> None:
    """A layer's kernels at widths that are no powers of two, or few."""
    x, other, vector = (_random(*shape, dtype=dtype) for shape in ((8, 2, 72), (8, 2, 72), (72,)))
    outputs = norm.norm(
        x.clone().requires_grad_(),
        other,
        weight(vector),
        weight(vector),
        "layernorm",
        1e-5,
        [weight(vector)],
    )
    total = residual.add(*outputs, [weight(vector)])
    total.backward(torch.zeros_like(total))
    heads, wide = Heads(4, 1, 18), 6 * 18 + 200
    inputs, joined, shift = (
        _random(*shape, dtype=dtype) for shape in ((8, 2, wide), (8, 2, 172), (wide,))
    )
    angles, sums = torch.zeros(8, 2, 1, 9), torch.zeros(wide)
    found = rotary.read_heads(inputs, shift, heads, RotaryTable(angles, angles), by_position=False)
    rotary.write_head_gradients(inputs, sums, found, heads, RotaryTable(angles, angles))
    columns = (
        inputs[..., heads.width :],
        joined[..., 72:],
        shift[heads.width :],
        sums[heads.width :],
    )
    activation.write_activation(columns[1], columns[0], columns[2], "swiglu")
    activation.write_gradients(columns[0], columns[3], columns[1], columns[0], columns[2], "swiglu")
    target, logits = torch.zeros(16, dtype=torch.int64), _random(16, 300, dtype=dtype)
    maximum, found_sums = cross_entropy._statistics(logits, target, 300)
    cross_entropy._gradient(logits, target, 300, maximum, found_sums[0], maximum, maximum)
    shard, scalar = torch.zeros(4, 100), torch.ones(())
    adamw.adamw(shard[:3], shard[3], _random(100, dtype=dtype), scalar, scalar, UPDATE)


CALLS: dict[str, Callable[[], None]] = {
    "layernorm 4096": lambda: _norm(4096, "layernorm", added=True),
    "rmsnorm 5120": lambda: _norm(5120, "rmsnorm", added=False),
    "layernorm 7168": lambda: _norm(7168, "layernorm", added=True),
    "layernorm 12288": lambda: _norm(12288, "layernorm", added=False),
    "residual": _add,
    "7b tp2": lambda: _core(Heads(16, 16, 128), 8192, "gelu", bias=True),
    "30b tp8": lambda: _core(Heads(7, 7, 128), 3584, "gelu", bias=False),
    "grouped swiglu": lambda: _core(Heads(32, 1, 128), 10928, "swiglu", bias=False),
    "swiglu bias learned positions": lambda: _core(
        Heads(8, 2, 64), 4096, "swiglu", bias=True, table=False
    ),
    "casts 4096": lambda: _casts(4096),
    "casts 12288": lambda: _casts(12288),
    "operands 175b tp4": lambda: _operands(12288, 12288, "gelu"),
    "operands 7b": lambda: _operands(4096, 16384, "gelu"),
    "operands grouped swiglu": lambda: _operands(5120, 13824, "swiglu"),
    "cross entropy": _loss,
    "adamw": _updates,
    "small float32": lambda: _small(torch.float32),
}

if __name__ == "__main__":
    print(json.dumps(compiled_by(CALLS)))
