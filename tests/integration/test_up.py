"""`megascale up` with real processes: what it starts, restarts, leaves alone, and leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.processes import ended, until_gone
from tests.harness.waiting import until

from megascale.v1 import types_pb2
from megascale_client import AsyncClient
from megascale_driver.platform.local.node import choose_device

OPTIONS = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu", "--nodes-per-switch", "1")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpProcess]:
    with UpProcess(tmp_path / "cluster", *OPTIONS, executed=True) as running:
        yield running


@pytest.fixture
def forked_up(tmp_path: Path) -> Iterator[UpProcess]:
    with UpProcess(tmp_path / "cluster", *OPTIONS) as running:
        yield running


async def alive_nodes(folder: Path) -> dict[str, str]:
    """Names and switches of the nodes that are alive for the driver."""
    async with AsyncClient.from_run_folder(folder) as client:
        alive = types_pb2.NODE_LIVENESS_ALIVE
        return {
            node.name: node.topology["switch"]
            async for node in client.nodes()
            if node.liveness == alive
        }


async def test_life_of_a_cluster(up: UpProcess) -> None:
    state = up.state
    assert await alive_nodes(up.folder) == {"n1": "s0", "n2": "s1"}
    assert state["pid"] == up.process.pid
    assert (up.folder.parent / "current").resolve() == up.folder.resolve()
    assert (up.folder / "token").stat().st_mode & 0o777 == 0o600
    # Each node is a process group of its own, with all its processes in it.
    groups = {
        name: {os.getpgid(pid) for pid in up.node_pids(name).values()} for name in ("n1", "n2")
    }
    assert groups == {"n1": {state["nodes"]["n1"]["pid"]}, "n2": {state["nodes"]["n2"]["pid"]}}

    # The run folder is in use.
    second = megascale("up", "--run-folder", str(up.folder), *OPTIONS)
    assert second.returncode == 2
    assert "in use by another" in second.stderr
    assert "stop" not in second.stdout, "nothing of the first was stopped"

    # A driver that ends is restarted, and the nodes link to it.
    os.kill(state["driver"]["pid"], signal.SIGKILL)
    until(
        lambda: up.seen("driver_exited") and len(up.seen("driver_ready")) == 2, "driver restarted"
    )
    assert up.state["driver"]["pid"] != state["driver"]["pid"]
    async with AsyncClient.from_run_folder(up.folder) as client:
        assert (await client.cluster_info()).cluster == "local"

    # So is etcd, with its data; the driver leads again and accepts requests.
    os.kill(state["etcd"]["pid"], signal.SIGKILL)
    until(lambda: len(up.seen("etcd_ready")) == 2, "etcd restarted")
    async with AsyncClient.from_run_folder(up.folder) as client:
        assert (await client.evict("n2", reason="a test")).node.disposition_reason == "a test"

    # A node that ends is reported and not restarted.
    up.kill_node("n2")
    (report,) = until(lambda: up.seen("node_exited"), "end of the node reported")
    assert (report["node"], report["exit_status"]) == ("n2", -signal.SIGKILL)
    assert ended(state["nodes"]["n2"]["pid"])

    # SIGTERM ends all of it in order.
    everything = up.processes()
    assert up.stop() == 0
    assert len(everything) >= 4
    until(lambda: not up.processes(), "all processes gone", up.processes)
    assert not (up.folder / "up.json").exists()


@pytest.mark.parametrize(
    ("wanted", "visible", "needed", "found"),
    [
        ("auto", None, 3, "cuda"),
        ("auto", None, 4, "cpu"),
        ("auto", "0,2", 3, "cpu"),
        ("cpu", None, 1, "cpu"),
    ],
)
def test_gpus_are_counted_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: Literal["auto", "cpu"],
    visible: str | None,
    needed: int,
    found: str,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\nfor i in 0 1 2; do echo "GPU $i: Some Model (UUID: GPU-$i)"; done\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device(wanted, needed) == found
    with pytest.raises(ValueError, match="4 GPUs are needed"):
        choose_device("cuda", 4)


@pytest.mark.slow
def test_killing_up_leaves_no_process(forked_up: UpProcess) -> None:
    """Each process ends with the one that started it by an order to the kernel of its own."""
    everything = forked_up.processes()
    assert len(everything) >= 6  # up, etcd, driver, two agents and their children
    forked_up.process.kill()
    forked_up.process.wait()
    until(lambda: not forked_up.processes(), "all processes gone", forked_up.processes)


SLOW_DAEMON = """
import sys, time
if "megascale_checkpoint" in sys.orig_argv:
    time.sleep(7)
"""


@pytest.mark.slow
async def test_ready_means_that_the_daemons_of_all_nodes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent waits 5 s for its daemon and then links without it: the node is alive, not ready."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DAEMON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow"), prepend=os.pathsep)
    one = (*OPTIONS[2:], "--nodes", "1")
    with UpProcess(tmp_path / "cluster", *one, executed=True) as up:
        async with AsyncClient.from_run_folder(up.folder) as client:
            assert all([bool(node.checkpoint_endpoint) async for node in client.nodes()])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_in_the_background_of_a_script_ends_on_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A shell without job control starts background commands with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        running = UpProcess(tmp_path / "cluster", *OPTIONS[2:], "--nodes", "1", executed=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with running as up:
        everything = up.processes()
        assert up.stop(number) == 0
        until_gone(everything, "all processes gone")


def test_a_cluster_that_cannot_start_reports_why_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--run-folder", str(tmp_path / "x"), "--etcd-endpoints", "127.0.0.1:1")
    wrong_name = megascale("up", "--cluster", "Not A Name", *OPTIONS)
    assert wrong_name.returncode == 2
    assert "a-z, 0-9" in wrong_name.stderr
    too_many = megascale("up", "--device", "cuda", "--nodes", "200", *options)
    assert too_many.returncode == 2
    assert "GPUs are needed" in too_many.stderr
    assert not (tmp_path / "x").exists()
