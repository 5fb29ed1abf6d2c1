"""What the full diagnostics measure, on this host's CPUs, and how they are run one by one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness import program_start
from tests.harness.local_cluster import MARK_VARIABLE, processes_marked
from tests.harness.waiting import eventually
from tests.unit.test_counters import H200

from megascale.v1 import types_pb2
from megascale_driver.core.values.cluster import Cluster, Disposition, Identity, Liveness, Node
from megascale_driver.shell.sweep import Sweep, next_node
from megascale_executor.diagnostics import device_checks, disk, host_checks, links
from megascale_executor.diagnostics.devices import cpu_slots
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.node_tests import AllToAll, DeviceCopy, Gemm, NodeTest, parse
from megascale_executor.diagnostics.registry import load_registry, run_diagnostics
from megascale_trainer.node_tests.compute import compare_hashes

DEVICES = cpu_slots([0, 1], "test", 1 << 30, "host")


def node(folder: Path, devices: Sequence[Any] = DEVICES) -> NodeView:
    unused: Any = None
    return NodeView(
        devices=devices, folder=folder, daemon_endpoint=unused, holds_slots=unused,
        probe_ranks=unused,
    )  # fmt: skip


class Short(Gemm):
    budget_s = 0.1


async def test_a_test_measures_in_a_process_of_its_own(tmp_path: Path) -> None:
    with program_start.forked():
        gemm, exchange = await asyncio.gather(
            Short().run(node(tmp_path)), AllToAll().run(node(tmp_path))
        )
    assert [(each.target, each.verdict, each.unit) for each in exchange] == [
        ("cpu:0", "PASS", "GB/s"), ("cpu:1", "PASS", "GB/s")
    ]  # fmt: skip
    assert len(gemm) == 6 and len({each.target_class for each in gemm}) == 3
    for each in (*gemm, *exchange):
        assert each.value is not None and each.value > 0 and "torch" in each.tools
    wire = gemm[0].to_proto()
    assert (wire.value, wire.unit) == (gemm[0].value, "TFLOP/s") and wire.tools["torch"]
    # The agent itself has not loaded it.
    code = "import sys, megascale_executor.agent.node_agent; print('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1)
    assert (await process.communicate())[0] == b"False\n"


async def test_what_cannot_run_here_is_skipped_with_a_reason(tmp_path: Path) -> None:
    (found,) = await DeviceCopy().run(node(tmp_path))
    assert (found.verdict, found.detail) == ("SKIPPED", "CPU slots have no memory of their own")
    (found,) = await AllToAll().run(node(tmp_path, DEVICES[:1]))
    assert (found.verdict, found.detail) == ("SKIPPED", "1 device; it needs 2")
    (found,) = await device_checks.GpuHealth().run(node(tmp_path))
    assert found.verdict == "SKIPPED"


class Crashes(NodeTest):
    name = "gemm"
    command = (sys.executable, "-c", "import sys; sys.exit('the device is gone')")


class Hangs(NodeTest):
    name = "gemm"
    timeout_s = 1.0
    command = ("sh", "-c", "exec sleep 600")


async def test_a_process_that_fails_or_hangs_is_a_failure_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK_VARIABLE, mark)
    # Status 1 with no answer is no result of a test.
    crashed, hung = await run_diagnostics([Crashes(), Hangs()], node(tmp_path))
    assert crashed.verdict == "FAIL" and "status 1: the device is gone" in crashed.detail
    assert (hung.verdict, hung.detail) == ("FAIL", "no result within 1 s")
    await eventually(lambda: not processes_marked(mark), "the processes are gone")


def test_an_answer_with_a_wrong_result_fails_and_one_of_another_form_is_refused() -> None:
    measured = {"target": "cpu:0", "value": 1.5, "unit": "GB/s", "target_class": "",
                "detail": "", "wrong": "the copy differs"}  # fmt: skip
    (found,) = parse("gemm", json.dumps({"tools": {}, "measured": [measured]}), 1.0)
    assert (found.verdict, found.detail, found.value) == ("FAIL", "the copy differs", 1.5)
    for line in ("{}", "[]", '{"tools": {}, "measured": [{}]}'):
        with pytest.raises(ValueError, match="not an answer"):
            parse("gemm", line, 1.0)


def test_hashes_that_vary_or_differ_from_the_node_are_wrong() -> None:
    good = ["a"] * 3
    assert not any(each.wrong for each in compare_hashes("cuda", {0: good, 1: good, 2: good}))
    found = compare_hashes("cuda", {0: good, 1: ["a", "b", "a"], 2: ["c"] * 3, 3: good})
    assert [bool(each.wrong) for each in found] == [False, True, True, False]
    assert "2 different results" in found[1].wrong and "differs from a" in found[2].wrong
    # Of two nobody knows which is right.
    assert not any(each.wrong for each in compare_hashes("cuda", {0: good, 1: ["c"] * 3}))


class Check(Diagnostic):
    def __init__(self, name: str, stage: int, verdict: Any = "PASS", takes_s: float = 0) -> None:
        self.name, self.stage = name, stage
        self._verdict, self._takes_s = verdict, takes_s

    async def run(self, node: NodeView) -> Sequence[Finding]:
        await asyncio.sleep(self._takes_s)
        return [Finding(self.name, "node", self._verdict, "")]


async def test_a_failure_leaves_out_later_stages_and_not_its_own(tmp_path: Path) -> None:
    checks = [Check("last", 2), Check("bad", 0, "FAIL"), Check("first", 0), Check("mid", 1)]
    found = await run_diagnostics(checks, node(tmp_path))
    assert [(each.name, each.verdict) for each in found] == [
        ("bad", "FAIL"), ("first", "PASS"), ("mid", "SKIPPED"), ("last", "SKIPPED")
    ]  # fmt: skip
    assert found[2].detail == "not run: bad failed first"
    slow = [Check("slow", 0, "DEGRADED"), Check("next", 1)]
    assert [each.verdict for each in await run_diagnostics(slow, node(tmp_path))][1] == "PASS"


async def test_all_checks_end_within_their_common_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    checks = [Check("long", 1, takes_s=60), Check("never", 1)]
    found = await run_diagnostics(checks, node(tmp_path), limit_s=2.2)
    assert [each.verdict for each in found] == ["SKIPPED", "SKIPPED"]
    assert "cut short" in found[0].detail and "are over" in found[1].detail
    assert time.monotonic() - begin < 20


def test_the_quick_set_is_part_of_the_full_one() -> None:
    registry = load_registry()
    quick = [each.name for each in registry.on_demand(())]
    full = [each.name for each in registry.on_demand((), full=True)]
    assert set(quick) < set(full) and "gemm" in set(full) - set(quick)
    assert [each.name for each in registry.on_demand(["gemm"])] == ["gemm"]
    assert not {"gemm", "disk_speed"} & {each.name for each in registry.before_attempts()}


def test_the_disk_is_measured_and_a_folder_that_is_gone_fails(tmp_path: Path) -> None:
    found = disk.measure(tmp_path, file_bytes=8 << 20)
    assert [(each.target_class, each.unit) for each in found] == [
        ("write", "MB/s"), ("read", "MB/s"), ("sync", "ms")
    ]  # fmt: skip
    assert all(each.value and each.value > 0 for each in found)
    assert not list(tmp_path.iterdir())
    (gone,) = disk.measure(tmp_path / "gone")
    assert gone.verdict == "FAIL"


def test_the_clock_is_read_and_evaluated() -> None:
    assert host_checks.evaluate_clock(*host_checks.read_clock()).verdict in (
        "PASS",
        "DEGRADED",
        "SKIPPED",
    )
    assert host_checks.evaluate_clock(0x2001, 1500).verdict == "PASS"
    assert host_checks.evaluate_clock(0x2001, 1500).value == 0.0015
    assert host_checks.evaluate_clock(0x2001, 900_000).verdict == "DEGRADED"
    assert "start chrony" in host_checks.evaluate_clock(0x40, 16_000_000).detail
    assert host_checks.evaluate_clock(-1, 0).verdict == "SKIPPED"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Feb 13 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.161.08  Release Build",
    ],
)
def test_versions_are_read_without_an_import(tmp_path: Path, line: str) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(line)
    found = host_checks.read_versions(tmp_path)
    assert found["nvidia-driver"] == "535.161.08" and found["kernel"] == os.uname().release


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"throttle": 0}, "PASS", "NVIDIA H200"),
        ({"throttle": 0x4}, "PASS", ""),
        ({}, "DEGRADED", "hw_thermal"),
        ({"recovery_action": 1}, "FAIL", "the driver asks: reset the GPU"),
        ({"recovery_action": 99}, "FAIL", "recovery action 99"),
        ({"ecc_uncorrected": 2}, "FAIL", "2 uncorrectable"),
        ({"rows_failed": 1}, "FAIL", "replace the GPU"),
        ({"throttle": 0, "rows_pending": 1}, "DEGRADED", "at the next reset"),
        ({"throttle": 0, "ecc_uncorrected_ever": 5}, "DEGRADED", "in its life"),
        ({"throttle": 0, "pcie_width": 8}, "DEGRADED", "8 of 16 lanes"),
        ({"throttle": None, "ecc_uncorrected": None, "recovery_action": None}, "PASS", ""),
    ],
)
def test_a_gpu_is_evaluated_by_what_it_reports(
    facts: dict[str, Any], verdict: str, words: str
) -> None:
    found, detail = device_checks.evaluate_health({**H200, **facts})
    assert found == verdict and words in detail


def test_a_gpu_that_is_gone_fails() -> None:
    answer = {"driver": "535.1", "devices": [{**H200, "throttle": 0}, {"index": 1, "lost": True}]}
    found = device_checks.compare_health(answer, [(0, "GPU-1"), (1, "GPU-2")])
    assert [each.verdict for each in found] == ["PASS", "FAIL"]
    assert "GPU-2: the GPU is lost" in found[1].detail


def test_interfaces_reach_each_other_and_a_bad_address_fails() -> None:
    found = links.measure_pairs({"a": "127.0.0.1", "b": "127.0.0.2"}, size=1 << 20)
    assert [(each.target, each.verdict) for each in found] == [("a>b", "PASS"), ("b>a", "PASS")]
    assert all(each.value for each in found)
    bad = links.measure_pairs({"a": "127.0.0.1", "b": "192.0.2.1"}, size=1 << 20)
    assert {each.verdict for each in bad} == {"FAIL"}
    assert links.measure_pairs({})[0].verdict == "SKIPPED"


def test_the_rate_of_perftest_is_the_average() -> None:
    printed = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    5884             0.00               394.41             0.005877
"""
    assert links.parse_rate(printed) == 394.41
    assert links.parse_rate("Couldn't connect to 127.0.0.1:18515") is None


def idle(name: str, **facts: Any) -> Node:
    alive = Node(name=name, identity=Identity(), liveness=Liveness.ALIVE, connected=True)
    return replace(alive, **facts)


async def test_the_sweep_takes_idle_nodes_in_turn(tmp_path: Path) -> None:
    nodes = [
        idle("n1"), idle("n2"), idle("gone", liveness=Liveness.DEAD),
        idle("held", disposition=Disposition.CORDONED), idle("cut", connected=False),
    ]  # fmt: skip
    state = Cluster(nodes={each.name: each for each in nodes})
    asked: list[tuple[str, int]] = []

    async def diagnose(node: Node, checks: object, which: int) -> list[types_pb2.CheckResult]:
        asked.append((node.name, which))
        return []

    now_s = iter(range(1, 100))
    calls: Any = SimpleNamespace(diagnose=diagnose)
    sweep = Sweep(calls, lambda: state, lambda: float(next(now_s)), 1.0)
    for _ in range(3):
        await sweep.once()
    full = types_pb2.DIAGNOSTIC_SET_FULL
    assert asked == [("n1", full), ("n2", full), ("n1", full)]
    assert next_node(Cluster(), {}) is None
