"""Every fused kernel compiles for Hopper, on any machine: what the interpreter runs, the compiler may yet refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX of each kernel, from a process outside of the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.compile_kernels"],
        env=environment,
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("kernel", "loads", "stores"), [("statistics", 2, 0), ("gradient", 2, 2), ("adamw", 8, 7)])
def test_memory_is_touched_16_bytes_at_a_time(kernel: str, loads: int, stores: int, ptx: dict[str, str]) -> None:
    """A thread has 16 logits in bf16, or 8 parameters: two loads of each float32 operand, one store in bf16."""
    assert len(re.findall(r"ld\.global[\w.:]*\.v4", ptx[kernel])) == loads
    assert len(re.findall(r"st\.global[\w.:]*\.v4", ptx[kernel])) == stores


def test_nothing_is_added_atomically(ptx: dict[str, str]) -> None:
    assert not any(re.search(r"\b(atom|red)\.", text) for text in ptx.values())
