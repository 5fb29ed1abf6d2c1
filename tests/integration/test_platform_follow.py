"""`megascale platform follow` beside a real cluster: evicted, given back, lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.local_cluster import UpProcess
from tests.harness.waiting import until

from megascale.v1 import types_pb2
from megascale_client import Client


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpProcess]:
    options = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
    with UpProcess(tmp_path / "run", *options, "--heartbeat-interval-s", "0.5") as running:
        yield running


def until_event(process: subprocess.Popen[str], event: str) -> str:
    """The node of the next event of this kind."""
    assert process.stdout is not None
    for line in process.stdout:
        if (values := json.loads(line))["event"] == event:
            return str(values["node"])
    raise AssertionError(process.communicate()[1])


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
