"""`megascale platform follow` beside a real cluster: evicted, given back, lost, lacking."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml
from tests.harness import platform_contract, program_start
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess
from tests.harness.waiting import until

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_client import Client, load_job
from megascale_driver.platform.follower import Follower
from megascale_driver.platform.interface import PlatformNode
from megascale_driver.platform.local.node import LocalNode, record_node
from megascale_driver.platform.local.platform import LocalPlatform
from megascale_driver.platform.slurm.platform import SlurmPlatform, read_nodes


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpProcess]:
    options = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
    with UpProcess(tmp_path / "run", *options, "--heartbeat-interval-s", "0.5") as running:
        yield running


def next_event(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The next event of this kind."""
    assert process.stdout is not None
    for line in process.stdout:
        values: dict[str, Any] = json.loads(line)
        if values["event"] == event:
            return values
    raise AssertionError(process.communicate()[1])


def until_event(process: subprocess.Popen[str], event: str) -> str:
    """The node of the next event of this kind."""
    return str(next_event(process, event)["node"])


def waiting_job(folder: Path) -> dict[str, Any]:
    """A job of three nodes and two spares."""
    corpus = write_corpus(folder / "corpus", random_documents(seed=7, count=60, longest=200))
    return {
        "name": "wide",
        "trainer": {
            "model": {
                "layers": 3, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                "sequence_length": 32,
            },
            "parallelism": {"pp": 3},
            "training": {"steps": 100_000, "global_batch_size": 3, "precision": "fp32"},
            "data": {"sources": [{"prefix": str(corpus)}]},
        },
        "checkpoint": {"uri": str(folder / "checkpoints")},
        "recovery": {"spare_nodes": 2},
    }  # fmt: skip


def test_the_platform_keeps_up_with_the_driver(up: UpProcess) -> None:
    options = ("--cluster", str(up.folder), "--interval-s", "0.5", "--json")
    process = up.beside("platform", "follow", *options, "--replace-after-s", "0")
    with Client.from_run_folder(up.folder) as client:
        # A node that ends is started again.
        up.kill_node("n1")
        assert until_event(process, "replaced") == "n1"

        def back() -> bool:
            (node,) = [each for each in client.nodes() if each.name == "n1"]
            return node.liveness == types_pb2.NODE_LIVENESS_ALIVE

        until(back, "n1 is alive again")
        # One that is evicted is drained, and another is started in its place.
        client.evict("n2", "it hums")
        assert until_event(process, "drained") == "n2"
        assert (up.folder / "nodes/n2/drained").read_text() == "megascale: it hums\n"
        assert until_event(process, "replaced") == "n2"
        assert {node.name for node in client.nodes()} == {"n1", "n2", "n3"}
        client.uncordon("n2", "repaired")
        assert until_event(process, "restored") == "n2"
        assert not (up.folder / "nodes/n2/drained").exists()
        # Evicted, and then repaired as the platform sees it: the driver takes it back.
        client.evict("n2", "it hums again")
        assert until_event(process, "drained") == "n2"
        (up.folder / "nodes/n2/drained").unlink()
        assert until_event(process, "returned") == "n2"
        (node,) = [each for each in client.nodes() if each.name == "n2"]
        assert node.disposition == types_pb2.NODE_DISPOSITION_SCHEDULABLE
    process.terminate()
    assert process.wait(20) == 0


async def test_this_machine_gives_more_nodes_and_none_twice(up: UpProcess) -> None:
    platform = LocalPlatform(up.folder)
    with program_start.forked():
        await _ask_for_nodes(platform, up)


async def _ask_for_nodes(platform: LocalPlatform, up: UpProcess) -> None:
    await platform_contract.check_provide(platform, 2, gives=True)
    # Of n1 to n3 one has ended, one is drained, and of n4 only the name was written: whoever asked
    # for it ended before it was started.
    up.kill_node("n2")
    await platform.drain("n3", "megascale: it hums")
    record_node(up.folder, LocalNode(name="n4", device="cpu", devices=(0,), switch="s0"))
    assert await platform.provide(3) == 3
    nodes = await platform.nodes()
    assert {node.name for node in nodes if node.ready and not node.drained} == {"n1", "n2", "n4"}
    assert len(nodes) == 4


def test_what_a_job_lacks_is_asked_for(up: UpProcess, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(waiting_job(tmp_path)))
    process = up.beside(
        *("platform", "follow", "--cluster", str(up.folder), "--interval-s", "0.5", "--json"),
        *("--provide-up-to", "3", "--provide-after-s", "0"),
    )
    with Client.from_run_folder(up.folder) as client:
        client.submit(load_job(job))
        values = next_event(process, "provided")
        # Three nodes and two spares are wanted: more than may be asked for.
        assert values == {"event": "provided", "count": 3, "there": 3, "bound": 3}
        until(lambda: client.get("wide").nodes, "the job has nodes")
        assert {node.name for node in client.nodes()} == {"n1", "n2", "n3"}
        info = client.cluster_info()
        assert (info.nodes_wanted, info.nodes_missing) == (5, 2)
    process.terminate()
    assert process.wait(20) == 0


class Desk(driver_pb2_grpc.DriverServiceServicer):
    """A driver with two nodes, of which n2 may be silent."""

    def __init__(self) -> None:
        self.silent = False
        self.reports: list[dict[str, str]] = []

    async def ListNodes(self, request: Any, context: Any) -> driver_pb2.ListNodesResponse:
        alive, suspect = types_pb2.NODE_LIVENESS_ALIVE, types_pb2.NODE_LIVENESS_SUSPECT
        first = driver_pb2.Node(name="n1", liveness=alive)
        second = driver_pb2.Node(name="n2", liveness=suspect if self.silent else alive)
        return driver_pb2.ListNodesResponse(nodes=[first, second])

    async def ReportUnreachableNodes(
        self, request: driver_pb2.ReportUnreachableNodesRequest, context: Any
    ) -> driver_pb2.ReportUnreachableNodesResponse:
        self.reports.append({node.name: node.condition for node in request.nodes})
        return driver_pb2.ReportUnreachableNodesResponse()


class LargeDesk(driver_pb2_grpc.DriverServiceServicer):
    """A driver with more nodes than a page has, of which the last is evicted."""

    def __init__(self, count: int) -> None:
        self._nodes = [
            driver_pb2.Node(name=f"n{number:05}", liveness=types_pb2.NODE_LIVENESS_ALIVE)
            for number in range(count)
        ]
        self._nodes[-1].disposition = types_pb2.NODE_DISPOSITION_QUARANTINED
        self.last = self._nodes[-1].name

    async def ListNodes(
        self, request: driver_pb2.ListNodesRequest, context: Any
    ) -> driver_pb2.ListNodesResponse:
        first = int(request.page_token or 0)
        after = first + min(request.page_size, 1000)
        token = str(after) if after < len(self._nodes) else ""
        return driver_pb2.ListNodesResponse(nodes=self._nodes[first:after], next_page_token=token)


class Controller(SlurmPlatform):
    """SLURM's controller that does not hear of n2."""

    asked = 0
    drained: tuple[str, ...] = ()

    async def drain(self, name: str, reason: str) -> None:
        self.drained += (name,)

    async def nodes(self) -> tuple[PlatformNode, ...]:
        self.asked += 1
        return read_nodes("NodeName=n1 State=MIXED\nNodeName=n2 State=MIXED*\n", {})


@contextlib.asynccontextmanager
async def served(
    desk: driver_pb2_grpc.DriverServiceServicer,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a driver of the test."""
    server = grpc.aio.server()
    driver_pb2_grpc.add_DriverServiceServicer_to_server(desk, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_slurm_is_asked_about_a_silent_node_and_its_answer_is_a_witness(
    tmp_path: Path,
) -> None:
    desk, slurm = Desk(), Controller()
    follower = Follower(slurm, tmp_path / "drained.json", None, lambda event, fields: None)
    async with served(desk) as channel:
        await follower.look(channel)
        assert (slurm.asked, desk.reports) == (0, []), "nothing would follow from it"
        desk.silent = True
        await follower.look(channel)
        assert desk.reports == [{"n2": "MIXED NOT_RESPONDING"}]


async def test_evicted_nodes_of_a_large_fleet_are_drained_on_whichever_page_they_are(
    tmp_path: Path,
) -> None:
    desk, slurm = LargeDesk(2001), Controller()
    follower = Follower(slurm, tmp_path / "drained.json", None, lambda event, fields: None)
    async with served(desk) as channel:
        await follower.look(channel)
    assert slurm.drained == (desk.last,)
