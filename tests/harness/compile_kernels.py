"""Compile the fused kernels for Hopper without a GPU: ``python -m tests.harness.compile_kernels``.

The interpreter runs a kernel as Python and accepts what the compiler refuses. So each module of
tests/unit/kernels that tests fused kernels has a table ``COMPILED``: calls as the trainer makes
them, by label, at the widths of real models but few rows. Calls that take long to compile stand in
``COMPILED_AT_LENGTH``, for ``--at-length``. Here a launch compiles the kernel and does no more:
types, alignments and block sizes are those of training. A program of its own, because a process
whose kernels run in the interpreter cannot compile them. It prints JSON: for each kernel its
module, its PTX, its registers and its spilled bytes.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TESTS = Path(__file__).resolve().parents[1] / "unit" / "kernels"


class _Hopper:
    """As much of Triton's driver as the compiler calls."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def all_calls(at_length: bool) -> dict[str, Callable[[], object]]:
    """The tables of all test modules, whose labels differ; ``at_length``: the long ones as well."""
    found: dict[str, Callable[[], object]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        # By its text: importing any other test module may choose the interpreter.
        if re.search(r"^COMPILED\b", path.read_text(), re.MULTILINE):
            module = importlib.import_module(f"tests.unit.kernels.{path.stem}")
            further = getattr(module, "COMPILED_AT_LENGTH", {}) if at_length else {}
            for calls in (module.COMPILED, further):
                assert not found.keys() & calls.keys(), f"{path.name}: a label of another module"
                found |= calls
    return found


def compiled_by(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
    """What the launches of each call compile, by "call: kernel".

    Further kernels of one name have an apostrophe more each.
    """
    run = JITFunction.run
    launched: list[Any] = []

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append((self.fn, run(self, *arguments, grid=grid, warmup=True, **options)))
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
                name = f"{label}: {kernel.__name__.strip('_')}"
                while name in found:
                    name += "'"
                found[name] = {"kernel": f"{kernel.__module__}.{kernel.__name__}"}
                found[name] |= _figures(compiled)
    JITFunction.run = run
    return found


def _figures(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(compiled.asm["cubin"])
        code.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", code.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert usage is not None, printed
    return {"ptx": compiled.asm["ptx"], "registers": int(usage[1]), "spilled_bytes": int(usage[2])}


if __name__ == "__main__":
    print(json.dumps(compiled_by(all_calls(sys.argv[1:] == ["--at-length"]))))
