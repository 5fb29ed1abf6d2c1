"""Diagnostics that measure devices. Each runs in a process of its own, which imports torch.

The processes run the tests in :mod:`megascale_trainer.node_tests`. One that hangs is killed at its
limit, which does not affect the others. The driver compares the values with those of the fleet;
here only wrong results and processes that fail are a FAIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from megascale_common.node.process import child_environment
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

MODULE = "megascale_trainer.node_tests"
MAX_OUTPUT_BYTES = 1 << 20


class NodeTest(Diagnostic):
    """One test of :mod:`megascale_trainer.node_tests`.

    Attributes:
        on_cpu: whether CPU slots can run it.
        at_least: number of devices that it needs.
        budget_s: time for measuring all devices together, not counting the import of torch.
    """

    before_attempts = False
    quick = False
    on_cpu: bool = True
    at_least: int = 1
    budget_s: float = 5.0
    command: Sequence[str] = (sys.executable, "-m", MODULE)

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device or pair of devices."""
        kind = node.devices[0].kind
        if kind == "cpu" and not self.on_cpu:
            return [Finding(self.name, "node", "SKIPPED", "CPU slots have no memory of their own")]
        if len(node.devices) < self.at_least:
            detail = f"{len(node.devices)} device; it needs {self.at_least}"
            return [Finding(self.name, "node", "SKIPPED", detail)]
        if importlib.util.find_spec("torch") is None:
            detail = "torch is not installed; install the extra `executor`"
            return [Finding(self.name, "node", "SKIPPED", detail)]
        begin = time.monotonic()
        status, output, errors = await self._run(node.devices)
        elapsed_s = time.monotonic() - begin
        if status not in (0, 1) or not output.strip():
            last = errors.strip().splitlines()[-1:] or ["no output"]
            detail = f"its process ended with status {status}: {last[0]}"
            return [Finding(self.name, "node", "FAIL", detail, elapsed_s)]
        return parse(self.name, output.strip().splitlines()[-1], elapsed_s)

    async def _run(self, devices: Sequence[DeviceFacts]) -> tuple[int, str, str]:
        arguments = ["--device", devices[0].kind]
        arguments += ["--devices", ",".join(str(each.index) for each in devices)]
        process = await asyncio.create_subprocess_exec(
            *self.command,
            self.name,
            *arguments,
            "--seconds",
            str(self.budget_s),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
        try:
            output, errors = await process.communicate()
        finally:
            # Also reached when the limit of this test, or an attempt that arrives, cancels it.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        text = output[-MAX_OUTPUT_BYTES:].decode(errors="replace")
        return process.returncode or 0, text, errors[-4096:].decode(errors="replace")


def parse(name: str, line: str, elapsed_s: float) -> list[Finding]:
    """Findings from the JSON that a test printed.

    Raises:
        ValueError: the line is not such an answer.
    """
    try:
        answer = json.loads(line)
        tools = {str(key): str(text) for key, text in answer["tools"].items()}
        return [_finding(name, each, tools, elapsed_s) for each in answer["measured"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the test {name} printed {line[:200]!r}, which is no answer") from error


def _finding(name: str, each: dict[str, Any], tools: dict[str, str], elapsed_s: float) -> Finding:
    value, wrong = each["value"], str(each["wrong"])
    return Finding(
        name,
        str(each["target"]),
        "FAIL" if wrong else "PASS",
        wrong or str(each["detail"]),
        elapsed_s,
        value=None if value is None else float(value),
        unit=str(each["unit"]),
        target_class=str(each["target_class"]),
        tools=tools,
    )


class Gemm(NodeTest):
    """TFLOP/s of three shapes of matrix products on every device."""

    name = "gemm"
    timeout_s = 30.0
    budget_s = 8.0


class MemoryBandwidth(NodeTest):
    """GB/s of a copy within every device's memory."""

    name = "memory_bandwidth"
    timeout_s = 20.0
    budget_s = 3.0


class Bitwise(NodeTest):
    """Gradients of two layers are the same bits three times, and on every device of the node."""

    name = "bitwise"
    timeout_s = 30.0


class HostCopy(NodeTest):
    """GB/s between pinned host memory and every GPU."""

    name = "host_copy"
    timeout_s = 20.0
    budget_s = 4.0
    on_cpu = False


class DeviceCopy(NodeTest):
    """GB/s from each GPU to every other."""

    name = "device_copy"
    timeout_s = 25.0
    budget_s = 5.0
    on_cpu = False
    at_least = 2
    stage = 2


class AllToAll(NodeTest):
    """All devices of the node exchange data at once, by NCCL on GPUs and gloo on CPUs."""

    name = "all_to_all"
    timeout_s = 40.0
    at_least = 2
    stage = 2
