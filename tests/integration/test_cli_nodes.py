"""Operators' commands and calls on a real cluster: cordon, diagnose, events as they happen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale.v1 import types_pb2
from megascale_cli.exits import NOT_FOUND, OK
from megascale_client import Client, NotFound


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("nodes") / "runs"
    with UpProcess(folder, "--nodes", "2", "--devices-per-node", "1", "--device", "cpu"):
        yield folder


def test_a_node_is_cordoned_diagnosed_and_put_back(cluster: Path) -> None:
    here = ("--cluster", str(cluster), "--json")
    command = [sys.executable, "-m", "megascale_cli", "events", "nodes/n2", "--follow", *here]
    # As in the background of a script: the command starts with SIGINT ignored, and SIGINT still
    # ends it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    with following:

        def next_event() -> dict[str, Any]:
            assert following.stdout is not None
            event: dict[str, Any] = json.loads(following.stdout.readline())
            return event

        assert next_event()["subject"] == "nodes/n2"
        checked = megascale("cordon", "n2", "--reason", "a cable", "--check", *here)
        assert checked.returncode == OK, checked.stderr
        done = megascale("cordon", "n2", "--reason", "a cable", *here)
        assert json.loads(done.stdout)["node"]["disposition"] == "NODE_DISPOSITION_CORDONED"
        while (event := next_event())["reason"] != "NODE_CORDONED":
            assert event["subject"] == "nodes/n2"
        assert "a cable" in event["message"]
        following.send_signal(signal.SIGINT)
        assert following.wait(CALL_TIMEOUT_S) == 130

    found = [json.loads(line) for line in megascale("diagnose", "n2", *here).stdout.splitlines()]
    assert {check["verdict"] for check in found} <= {"CHECK_VERDICT_PASS", "CHECK_VERDICT_SKIPPED"}
    assert any(check["verdict"] == "CHECK_VERDICT_PASS" for check in found)
    one = megascale("diagnose", "n2", "--check", found[0]["name"], *here)
    assert {json.loads(line)["name"] for line in one.stdout.splitlines()} == {found[0]["name"]}
    assert megascale("cordon", "n9", "--reason", "x", *here).returncode == NOT_FOUND

    with Client.from_run_folder(cluster) as client:
        assert (
            client.uncordon("n2", reason="replaced").node.disposition
            == types_pb2.NODE_DISPOSITION_SCHEDULABLE
        )
        assert [event.reason for event in client.events("nodes/n2")][-1] == "NODE_UNCORDONED"
        with pytest.raises(NotFound, match="n9"):
            client.diagnose("n9")

        def put_away_and_back() -> None:
            client.cordon("n1", reason="another")
            client.uncordon("n1", reason="nothing")

        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(next, client.watch_events("nodes/n1"))
            # The stream starts some time after its first event is requested.
            until(lambda: put_away_and_back() or coming.done(), "an event as it happens")
            seen = coming.result()
        put_away_and_back()
        following_event = next(
            client.watch_events("nodes/n1", resume_token=seen.resume_token)
        ).event
        assert {seen.event.reason, following_event.reason} == {"NODE_CORDONED", "NODE_UNCORDONED"}
        assert following_event.seq == seen.event.seq + 1
