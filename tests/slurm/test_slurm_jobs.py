"""Jobs through a real SLURM: a lost node, more nodes, the end of an allocation, the next one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file
from tests.harness import platform_contract
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.paced import paced, python_path
from tests.harness.slurm import SlurmCluster, missing
from tests.harness.waiting import until

from megascale_client import Client, NotFound, Unavailable
from megascale_common.service.errors import UnavailableError
from megascale_driver.platform.slurm.further_allocations import queue
from megascale_driver.platform.slurm.platform import SlurmPlatform

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a SLURM"),
    pytest.mark.timeout(1200),  # SLURM counts time limits in minutes, on a busy machine too
]
STEPS, INTERVAL = 240, 20


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 4) as cluster:
        cluster.environment["PYTHONPATH"] = python_path(cluster.folder / "site")
        yield cluster


def job_file(folder: Path, steps: int, pace_s: float) -> Path:
    """Two ranks, one on each node."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(folder / "corpus", random_documents(1, 400, 60))
    job = {
        "name": "inside",
        "trainer": {
            "model": {
                "layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                "sequence_length": 32,
            },
            "parallelism": {"tp": 1, "dp": 1, "pp": 2},
            "training": {
                "steps": steps, "global_batch_size": 4, "micro_batch_size": 1,
                "precision": "fp32", "deterministic": True,
            },
            "optimizer": paced(pace_s),
            "data": {"sources": [{"prefix": str(corpus)}]},
        },
        "checkpoint": {"uri": str(folder / "checkpoints"), "interval_steps": INTERVAL},
        "recovery": {"spare_nodes": 1},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def own_address() -> str:
    """An address of this machine beyond loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("198.51.100.1", 9))  # nothing is sent
        return str(asked.getsockname()[0])


class Submitted:
    """A job that was handed to SLURM."""

    def __init__(self, slurm: SlurmCluster, job: Path, *options: str) -> None:
        self.slurm, self.folder = slurm, job.parent / "run"
        command = ["slurm", "submit", str(job), "--nodes", "2", "--spares", "1", "--device", "cpu"]
        command += ["--devices-per-node", "1", "--run-folder", str(self.folder), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "megascale_cli", *command, *options],
            env=slurm.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.number = json.loads(done.stdout)["slurm_job"]

    def events(self) -> list[dict[str, Any]]:
        """What the batch step has reported, in all allocations."""
        log = self.folder / f"slurm-{self.number}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == kind]

    def until_event(self, kind: str, count: int = 1) -> dict[str, Any]:
        def seen() -> list[dict[str, Any]]:
            return self.events_of(kind)[count - 1 :]

        return until(seen, f"the batch step reports {kind}", self._moves, story=self.story)[0]

    def until_step(self, step: int) -> Any:
        until((self.folder / "driver.address").exists, "a driver", self._moves, story=self.story)
        with Client.from_run_folder(self.folder) as client:

            def there() -> Any:
                try:
                    job = client.get("inside")
                except (NotFound, Unavailable):  # the driver has just started
                    return None
                return job if job.step >= step else None

            return until(there, f"step {step}", self._moves, story=self.story)

    def _moves(self) -> object:
        """Anything that changes while SLURM or the job get on."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("nodes/*/jobs/*/*/*.log")]
        queue = self.slurm.command("squeue", "-h", "-j", self.number, "-o", "%T %M %r")
        return queue, [log.stat().st_size for log in logs]

    def story(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("nodes/*/agent.log")]
        ends = "\n".join(f"{log}: {log.read_text()[-1500:]}" for log in logs)
        return f"{ends}\n{self.slurm.trouble()}"


def final_values(folder: Path, steps: int) -> dict[str, bytes]:
    """The bytes of every tensor of the last checkpoint, of each rank."""
    (step,) = folder.glob(f"checkpoints/attempts/*/step-{steps:09d}")
    found = {}
    for path in sorted(step.glob("rank-*.safetensors")):
        found |= {f"{path.name}:{key}": value.tobytes() for key, value in load_file(path).items()}
    return found


def twin_values(folder: Path, steps: int) -> dict[str, bytes]:
    """The same of a job that nothing befell, in a cluster of this machine."""
    job = job_file(folder, steps, 0.0)
    with UpProcess(folder / "up", "--nodes", "2", "--devices-per-node", "1", "--device", "cpu"):
        done = megascale("submit", str(job), "--watch", "--cluster", str(folder / "up"))
        assert done.returncode == 0, done.stdout + done.stderr
    return final_values(folder, steps)


async def test_slurm_keeps_the_contract_of_platforms(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    platform = SlurmPlatform()

    async def undo() -> None:
        slurm.command("scontrol", "update", "NodeName=n2", "State=RESUME")

    await platform_contract.check(platform, "n2", undo)
    with pytest.raises(UnavailableError, match="no cluster with nodes of SLURM"):
        await SlurmPlatform(tmp_path).provide(1)
    switches = {node.name: node.switch for node in await platform.nodes()}
    assert switches == {"n1": "s0", "n2": "s0", "n3": "s1", "n4": "s1"}
    with pytest.raises(UnavailableError, match="Invalid"):
        await queue("#!/bin/bash\n#SBATCH --partition=moon\ntrue\n")


def test_a_lost_node_is_replaced_by_the_spare_of_the_allocation(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    # Beyond loopback, as on several hosts: with certificates.
    job = Submitted(slurm, job_file(tmp_path / "a", STEPS, 0.1), "--host", own_address())
    assert job.until_event("driver_ready")["address"].startswith(own_address())
    first = list(job.until_step(3 * INTERVAL).nodes)
    slurm.kill_node(first[1])
    assert job.until_event("ended")["phase"] == "SUCCEEDED", job.story()
    values = final_values(tmp_path / "a", STEPS)
    assert len(values) > 20 and values == twin_values(tmp_path / "twin", STEPS)
    slurm.start_node(first[1])


async def test_nodes_that_a_job_lacks_come_in_further_allocations_and_go_with_it(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    job = Submitted(
        *(slurm, job_file(tmp_path / "a", 100_000, 0.1), "--host", own_address()),
        *("--provide-up-to", "3", "--provide-after-s", "0"),
    )
    running = job.until_step(1)
    here = {*running.nodes, *running.spare_nodes}
    assert len(here) == 3
    (fourth,) = set(slurm.names) - here
    platform = SlurmPlatform(job.folder)
    assert await platform.provide(3) == 3  # none is added
    # The spare is lost, and none stands by any more.
    slurm.kill_node(running.spare_nodes[0])
    with Client.from_run_folder(job.folder) as client:

        def stands_by() -> bool:
            return list(client.get("inside").spare_nodes) == [fourth]

        until(stands_by, f"{fourth} stands by", job._moves, story=job.story)
        assert job.events_of("provided")[-1]["count"] == 3
        # No node is left for one more: its allocation waits in the queue, and is not asked twice.
        await platform_contract.check_provide(platform, 3, gives=True)
        further = slurm.command("squeue", "-h", "-o", "%T %j %D").split("\n")
        name = f"slurm-further-{job.number}"
        assert f"RUNNING {name} 1" in further and further.count(f"PENDING {name} 1") == 1
        client.cancel("inside", "enough")
    assert job.until_event("ended")["phase"] == "CANCELLED", job.story()
    until(
        lambda: not slurm.command("squeue", "-h", "-o", "%j").strip(),
        "all allocations have ended", job._moves, story=job.story,
    )  # fmt: skip
    with pytest.raises(UnavailableError, match="does not run"):
        await platform.provide(4)
    slurm.start_node(running.spare_nodes[0])


def test_a_driver_outside_of_allocations_is_given_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    def nodes(count: int, *options: str) -> dict[str, Any]:
        command = ("slurm", "nodes", str(count), "--run-folder", str(up.folder), "--json")
        done = subprocess.run(
            [sys.executable, "-m", "megascale_cli", *command, *options, "--device", "cpu",
             "--devices-per-node", "1"],
            env=slurm.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def queued() -> list[str]:
        return slurm.command("squeue", "-h", "-o", "%D %j").split("\n")[:-1]

    job = job_file(tmp_path / "a", 20, 0.0)
    with UpProcess(tmp_path / "up", "--nodes", "0", "--device", "cpu") as up:
        name = nodes(1)["slurm_name"]
        for _ in range(2):  # a number in all
            assert nodes(3) == {"count": 3, "there": 3, "slurm_name": name}
        assert sorted(queued()) == [f"1 {name}", f"2 {name}"]
        done = megascale("submit", str(job), "--watch", "--cluster", str(up.folder))
        assert done.returncode == 0, done.stdout + done.stderr
        with Client.from_run_folder(up.folder) as client:
            trained = client.get("inside").nodes
        assert len(trained) == 2 and set(trained) < set(slurm.names)
    slurm.command("scancel", f"--name={name}")
    until(lambda: not queued(), "the allocations have ended", story=slurm.trouble)
    values = final_values(tmp_path / "a", 20)
    assert len(values) > 20 and values == twin_values(tmp_path / "twin", 20)


def test_an_evicted_node_is_drained_and_the_job_goes_on_in_the_next_allocation(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    # SLURM counts its limit in minutes and signals up to one early.
    job = Submitted(
        slurm, job_file(tmp_path / "a", STEPS, 0.6), "--time", "2", "--save-before-s", "45"
    )
    evicted = job.until_step(INTERVAL).nodes[0]
    with Client.from_run_folder(job.folder) as client:
        client.evict(evicted, "its fan is loud")
    assert job.until_event("drained")["node"] == evicted
    assert slurm.reason(evicted) == "megascale: its fan is loud"
    saved = job.until_event("requeued")
    assert saved["phase"] == "SUSPENDED", job.story()
    # Two minutes are little more than a start on a busy machine: the next allocation has more.
    slurm.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=20")
    job.until_event("resumed")
    # Repaired, as SLURM's operator says it: the driver takes the node back.
    slurm.command("scontrol", "update", f"NodeName={evicted}", "State=RESUME")
    assert job.until_event("returned")["node"] == evicted
    assert job.until_event("ended")["phase"] == "SUCCEEDED", job.story()
    values = final_values(tmp_path / "a", STEPS)
    assert len(values) > 20 and values == twin_values(tmp_path / "twin", STEPS)
