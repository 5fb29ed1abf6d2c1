"""Platforms: their contract, drains beside the driver's evictions, and what SLURM prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import platform_contract
from tests.harness.command_line import command
from tests.harness.installed_package import install
from tests.harness.waiting import until

from megascale_common.service.errors import DamagedError, OptionError, UnavailableError
from megascale_driver.platform.follower import Evictions
from megascale_driver.platform.interface import GROUP, Platform, open_platform
from megascale_driver.platform.local.node import running_nodes
from megascale_driver.platform.local.platform import LocalPlatform
from megascale_driver.platform.slurm.platform import read_leaves, read_nodes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-platform.md"


@pytest.fixture
def rack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform of the page, with three machines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (name,) = re.findall(r"^rack = \"acme_platform:(\w+)\"$", PAGE.read_text(), re.MULTILINE)
    install(tmp_path, "acme-platform", code, {"rack": name}, GROUP)
    machines = {f"m{number}": {"rack": "r1", "power": "on"} for number in (1, 2, 3)}
    (tmp_path / "racks.json").write_text(json.dumps(machines))
    monkeypatch.setenv("ACME_RACKS", str(tmp_path / "racks.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return open_platform("rack")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalPlatform]:
    """A run folder with two nodes, of which a process runs that looks like n1's agent."""
    for name in ("n1", "n2"):
        folder = tmp_path / "run" / "nodes" / name
        folder.mkdir(parents=True)
        node = {"name": name, "device": "cpu", "devices": [0], "switch": "s0"}
        (folder / "node.json").write_text(json.dumps(node))
    code = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, "megascale_executor.agent", "n1"])
    (tmp_path / "run/nodes/n1/agent.lock").write_text(str(process.pid))
    until(lambda: "n1" in running_nodes(tmp_path / "run"), "the process has its name")
    yield LocalPlatform(tmp_path / "run")
    process.kill()
    process.wait()


async def test_the_page_keeps_the_contract(rack: Platform, tmp_path: Path) -> None:
    file = tmp_path / "racks.json"

    async def undo() -> None:
        machines = json.loads(file.read_text())
        machines["m2"]["drained"] = ""
        file.write_text(json.dumps(machines))

    await platform_contract.check(rack, "m2", undo)
    await platform_contract.check_provide(rack, 3, gives=False)
    file.unlink()
    with pytest.raises(UnavailableError, match=r"racks\.json"):
        await rack.nodes()


async def test_this_machine_keeps_the_contract(local: LocalPlatform) -> None:
    async def undo() -> None:
        (local.run_folder / "nodes/n1/drained").unlink()

    await platform_contract.check(local, "n1", undo)
    ended = await platform_contract.node_of(local, "n2")
    assert (ended.ready, ended.reached, ended.conditions) == (False, False, ("ENDED",))
    await platform_contract.check_provide(local, 1, gives=False)  # the cluster is down
    with pytest.raises(UnavailableError, match="at most 256"):
        await local.provide(257)
    with pytest.raises(UnavailableError, match="no run folder"):
        await LocalPlatform(local.run_folder / "none").nodes()


class Scene:
    """Evictions on the rack, and a driver that takes nodes back when it is there."""

    def __init__(self, rack: Platform, folder: Path) -> None:
        self.rack, self.record = rack, folder / "drained.json"
        self.machines = folder / "racks.json"
        self.taken_back: list[str] = []
        self.driver_answers = True
        self.events: list[tuple[str, str]] = []
        self.start()

    def start(self) -> None:
        """A process of its own, as after a crash."""
        self.evictions = Evictions(self.rack, self.record, self._take_back, self._report)

    async def _take_back(self, name: str) -> bool:
        if self.driver_answers:
            self.taken_back.append(name)
        return self.driver_answers

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields["node"]))

    async def drained(self) -> dict[str, str]:
        return {node.name: node.reason for node in await self.rack.nodes() if node.drained}

    def repair(self, name: str) -> None:
        machines = json.loads(self.machines.read_text())
        machines[name]["drained"] = ""
        self.machines.write_text(json.dumps(machines))


@pytest.fixture
def scene(rack: Platform, tmp_path: Path) -> Scene:
    return Scene(rack, tmp_path)


async def test_what_the_driver_evicts_is_drained_once(scene: Scene) -> None:
    for _ in range(3):
        await scene.evictions.settle({"m2": "GPU 3: ECC"})
    assert await scene.drained() == {"m2": "megascale: GPU 3: ECC"}
    assert scene.events == [("drained", "m2")]


async def test_a_crash_between_drain_and_record_is_settled(scene: Scene) -> None:
    await scene.evictions.settle({"m2": "slow"})
    scene.record.unlink()  # as if the process had ended before it was written
    scene.start()
    await scene.evictions.settle({"m2": "slow"})
    assert await scene.drained() == {"m2": "megascale: slow"} and not scene.taken_back
    assert json.loads(scene.record.read_text()) == ["m2"]


async def test_a_repaired_node_goes_back_to_the_driver(scene: Scene) -> None:
    await scene.evictions.settle({"m2": "slow", "m3": "slow"})
    scene.start()
    scene.repair("m2")
    scene.driver_answers = False
    await scene.evictions.settle({"m2": "slow", "m3": "slow"})
    scene.driver_answers = True  # it is asked again
    await scene.evictions.settle({"m2": "slow", "m3": "slow"})
    await scene.evictions.settle({"m3": "slow"})
    assert scene.taken_back == ["m2"] and list(await scene.drained()) == ["m3"]


async def test_a_node_that_is_repaired_and_breaks_again_is_drained_again(scene: Scene) -> None:
    await scene.evictions.settle({"m2": "slow"})
    scene.repair("m2")
    await scene.evictions.settle({"m2": "slow"})
    await scene.evictions.settle({})
    await scene.evictions.settle({"m2": "slow again"})
    assert await scene.drained() == {"m2": "megascale: slow again"}


async def test_what_an_operator_gives_back_to_the_driver_is_restored(scene: Scene) -> None:
    await scene.evictions.settle({"m2": "slow"})
    scene.start()
    await scene.evictions.settle({})
    assert not await scene.drained() and scene.events[-1] == ("restored", "m2")


async def test_a_refusal_is_reported_once_and_asked_again(scene: Scene) -> None:
    text = scene.machines.read_text()
    scene.machines.unlink()
    for _ in range(3):
        await scene.evictions.settle({"m1": "slow"})
    assert scene.events == [("refused", "m1")] and not scene.record.exists()
    scene.machines.write_text(text)
    await scene.evictions.settle({"m1": "slow"})
    assert list(await scene.drained()) == ["m1"]


def test_a_damaged_record_names_its_file(scene: Scene) -> None:
    scene.record.write_text("")  # as a crash of the host may leave it
    scene.start()
    scene.record.write_text('{"m1": 1}')
    with pytest.raises(DamagedError, match=r"drained\.json"):
        scene.start()


def test_an_unknown_platform_names_the_known_ones(rack: Platform) -> None:
    with pytest.raises(
        OptionError, match="no platform 'moon'; known: kubernetes, local, rack, slurm"
    ):
        open_platform("moon")
    answer = command("platform", "nodes", "--platform", "rack", "--json")
    assert [row["name"] for row in json.loads(answer.stdout)] == ["m1", "m2", "m3"]
    assert json.loads(command("platform", "list", "--json").stdout)["slurm"] == "megascale"


def test_a_platform_is_asked_for_nodes_by_hand(rack: Platform) -> None:
    answer = command("platform", "provide", "3", "--platform", "rack", "--json")
    assert json.loads(answer.stdout) == {"event": "provided", "count": 3, "there": 3}
    answer = command("platform", "provide", "5", "--platform", "rack")
    assert answer.status == 3 and "carry 2 here" in answer.text
    assert command("platform", "provide", "0", "--platform", "rack").status == 2


# As SLURM 22.05.8 prints it, shortened in the middle.
NODES = """\
NodeName=n2 Arch=x86_64 CPUTot=1 NodeAddr=127.0.0.1 State=IDLE+NOT_RESPONDING CfgTRES=cpu=1
NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 State=ALLOCATED Partitions=all ExtSensorsTemp=n/s
NodeName=n3 State=IDLE+DRAIN CfgTRES=cpu=1 Reason=megascale: GPU 3, [2] [root@2026-11-24T02:20:45]
NodeName=n4 State=DOWN*+DRAIN Reason=Not responding [slurm@2026-11-24T02:20:45] Comment=old

"""
TOPOLOGY = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n1,n2
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s0,s1
"""


def test_the_nodes_of_slurm_are_read() -> None:
    first, second, third, fourth = read_nodes(NODES, {"n1": "s0"})
    assert (first.name, first.ready, first.drained, first.switch) == ("n1", True, False, "s0")
    assert not second.ready and second.conditions == ("IDLE", "NOT_RESPONDING")
    assert (first.reached, second.reached) == (True, False)
    assert third.ready and third.drained and third.reason == "megascale: GPU 3, [2]"
    assert not fourth.ready and fourth.drained and fourth.reason == "Not responding"
    assert read_leaves(TOPOLOGY) == {"s0": "n1,n2", "s1": "n[3-4]"}


def test_the_batch_script_can_be_read_before_it_is_submitted(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: x\n")
    answer = command(
        *("slurm", "submit", str(job), "--nodes", "16", "--spares", "2", "--time", "24:00:00"),
        *("--run-folder", str(tmp_path / "run"), "--sbatch=--account=lab", "--print"),
    )
    assert answer.status == 0, answer.text
    lines = answer.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    wanted = ("--nodes=18", "--gpus-per-node=8", "--time=24:00:00", "--signal=B:USR1@300")
    for option in (*wanted, "--requeue", "--no-kill", "--account=lab"):
        assert f"#SBATCH {option}" in lines
    # The shell becomes the command, or SLURM's signal would end at the shell.
    assert lines[-1].startswith("exec ") and " --nodes 18 " in lines[-1]
    assert not (tmp_path / "run").exists()


def test_the_example_is_what_the_command_prints(tmp_path: Path) -> None:
    job = tmp_path / "example.yaml"
    job.write_text("name: x\n")
    answer = command(
        *("slurm", "submit", str(job), "--nodes", "16", "--spares", "1", "--time", "24:00:00"),
        *("--cluster", "example", "--run-folder", "/shared/runs/example", "--print"),
    )
    text = answer.stdout.replace(sys.executable, "/opt/megascale/.venv/bin/python")
    example = PAGE.parents[2] / "deploy" / "slurm" / "example.sbatch"
    assert text.replace(str(job), "/shared/jobs/example.yaml") == example.read_text()


def test_bad_options_of_slurm_are_named(tmp_path: Path) -> None:
    answer = command("slurm", "submit", str(tmp_path / "none.yaml"), "--nodes", "2")
    assert answer.status == 2 and "JOB.yaml" in answer.text
    job = tmp_path / "job.yaml"
    job.write_text("name: x\n")
    answer = command("slurm", "submit", str(job), "--nodes", "2", "--cluster", "Not A Label")
    assert answer.status == 2 and "--cluster" in answer.text
    answer = command("slurm", "nodes", "2", "--run-folder", str(tmp_path))
    assert answer.status == 2 and "--cluster" in answer.text
    assert not list(tmp_path.glob("allocation.json"))


async def test_without_slurm_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="scontrol is not installed"):
        await open_platform("slurm").nodes()
