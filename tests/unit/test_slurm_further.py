"""More nodes from SLURM: what counts, what is queued for, when allocations end.

The commands of SLURM are imitated here; tests/slurm has the real ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness import platform_contract

from megascale_common.service.errors import OptionError, UnavailableError
from megascale_driver.platform.slurm import further_allocations as slurm_further
from megascale_driver.platform.slurm import platform as slurm
from megascale_driver.platform.slurm.further_allocations import AllocatedCluster
from megascale_driver.platform.slurm.platform import SlurmPlatform


class Controller:
    """SLURM with five nodes: batch job 7 has n1 to n3, and further jobs are queued."""

    def __init__(self, cluster: AllocatedCluster) -> None:
        self.cluster = cluster
        self.first = "RUNNING 3 n[1-3]"
        self.further: list[str] = []
        self.drained = ""
        self.scripts: list[str] = []

    async def output(self, *command: str, text: str = "") -> str:
        match command:
            case ("squeue", "-h", "--jobs=7", "--states=all", "-o", columns):
                if not self.first:
                    raise UnavailableError("squeue failed: Invalid job id specified")
                return self.first if columns != "%T" else self.first.split()[0]
            case ("squeue", "-h", name, "-o", _):
                assert name == f"--name={self.cluster.further_name}"
                return "\n".join(self.further)
            case ("sbatch", "--parsable"):
                self.scripts.append(text)
                (nodes,) = [
                    line for line in text.splitlines() if line.startswith("#SBATCH --nodes")
                ]
                self.further.append(f"PENDING {nodes.rpartition('=')[2]} ")
                return "8\n"
            case ("scontrol", "show", "hostnames", hosts):
                return {"n[1-3]": "n1\nn2\nn3\n"}.get(hosts, hosts)
            case ("scontrol", "show", "node", "--oneliner"):
                states = {name: "MIXED" for name in ("n1", "n2", "n3", "n4", "n5")}
                states |= {self.drained: "MIXED+DRAIN"} if self.drained else {}
                return "\n".join(f"NodeName={n} State={s}" for n, s in states.items())
            case ("scontrol", "show", "topology"):
                return ""
        raise AssertionError(command)


@pytest.fixture
def cluster(tmp_path: Path) -> AllocatedCluster:
    found = AllocatedCluster(
        number="7", run_folder=str(tmp_path), cluster="main", device="cuda",
        devices_per_node=8, sbatch=("--time=24:00:00", "--account=lab"),
    )  # fmt: skip
    found.record()
    return found


@pytest.fixture
def controller(cluster: AllocatedCluster, monkeypatch: pytest.MonkeyPatch) -> Controller:
    found = Controller(cluster)
    for module in (slurm, slurm_further):
        monkeypatch.setattr(module, "output", found.output)
    return found


async def test_it_keeps_the_contract(controller: Controller, tmp_path: Path) -> None:
    await platform_contract.check_provide(SlurmPlatform(tmp_path), 3, gives=True)
    (script,) = controller.scripts
    lines = script.splitlines()
    for option in (
        *("--job-name=main-further-7", "--nodes=1", "--gpus-per-node=8", "--time=24:00:00"),
        *("--account=lab", "--no-requeue", "--no-kill"),
    ):
        assert f"#SBATCH {option}" in lines
    assert lines[-1].endswith(f"slurm further {tmp_path} --nodes 1")


async def test_drained_nodes_and_ended_allocations_do_not_count(
    controller: Controller, tmp_path: Path
) -> None:
    platform = SlurmPlatform(tmp_path)
    controller.drained = "n2"
    controller.further = ["COMPLETED 1 n5", "RUNNING 1 n4", "CONFIGURING 2 "]
    assert await platform.provide(5) == 5 and not controller.scripts
    assert await platform.provide(7) == 7
    assert "#SBATCH --nodes=2" in controller.scripts[0].splitlines()


async def test_a_cluster_whose_allocation_waits_or_has_ended_is_given_none(
    controller: Controller, tmp_path: Path
) -> None:
    for controller.first in ("PENDING 3 ", "CANCELLED 3 n[1-3]", ""):
        with pytest.raises(UnavailableError, match=r"does not run|Invalid job id"):
            await SlurmPlatform(tmp_path).provide(4)
    assert not controller.scripts


def test_a_cluster_inside_an_allocation_is_no_cluster_outside(
    cluster: AllocatedCluster, tmp_path: Path
) -> None:
    outside = replace(cluster, number="")
    assert AllocatedCluster.find(tmp_path) == cluster
    with pytest.raises(OptionError, match="is SLURM's job 7"):
        outside.require_alone()
    outside.record()
    outside.require_alone()
    other = replace(outside, run_folder=f"{tmp_path}/other")
    assert outside.further_name != other.further_name != cluster.further_name


class Step:
    """An `srun` that runs until it is stopped."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.exit_status: int | None = None
        self.stopped = False
        Step.newest = self

    newest: Step

    async def stop(self, timeout_s: float) -> None:
        self.stopped = True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_further, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(slurm_further, "GONE_AFTER_S", 0.05)
    monkeypatch.setattr(slurm_further, "Child", Step)


@pytest.mark.usefixtures("quick")
async def test_a_further_allocation_ends_with_the_first_one(
    controller: Controller, tmp_path: Path
) -> None:
    run = asyncio.create_task(slurm_further.run_further(tmp_path, 1))
    for controller.first in ("RUNNING 3 n[1-3]", "PENDING 3 ", "REQUEUED 3 "):
        await asyncio.sleep(0.1)
        assert not run.done(), controller.first
    controller.first = ""  # SLURM has forgotten it
    assert await run == 0 and Step.newest.stopped


@pytest.mark.usefixtures("quick")
async def test_a_further_allocation_ends_after_a_driver_outside(
    controller: Controller, tmp_path: Path
) -> None:
    replace(controller.cluster, number="").record()
    (tmp_path / "driver.address").write_text("h:1")
    run = asyncio.create_task(slurm_further.run_further(tmp_path, 1))
    await asyncio.sleep(0.2)
    assert not run.done()
    (tmp_path / "driver.address").unlink()
    assert await run == 0 and Step.newest.stopped
    (tmp_path / "driver.address").write_text("h:1")
    run = asyncio.create_task(slurm_further.run_further(tmp_path, 1))
    await asyncio.sleep(0.05)
    Step.newest.exit_status = 3
    assert await run == 1
