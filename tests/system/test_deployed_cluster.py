"""A cluster run by the command lines of the units, scraped by a real Prometheus with our rules.

The test does what systemd would: it reads units and settings, and starts, signals and reaps the
processes. What the units ask of the kernel (sandbox, limits) is not part of it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.deployment import (
    INSTALLED,
    PROMETHEUS,
    PYTHON,
    REPOSITORY,
    RUN_FOLDER,
    SYSTEMD,
    command_line,
    filled,
    metric_names,
    panel_queries,
    read_environment,
    read_unit,
)
from tests.harness.etcd import make_server
from tests.harness.processes import living_processes_of_group
from tests.harness.waiting import CALL_TIMEOUT_S, log_bytes, until

from megascale_client import Client, MegascaleError, parse_job
from megascale_common.node.process import child_environment
from megascale_common.service.identity.peers import read_or_create_token

pytestmark = pytest.mark.system
CLUSTER, NODES = "main", ("n1", "n2")
# Of a small job on CPUs, which nothing befalls, without the store of spans.
WITHOUT_SAMPLES = {
    # There is no alert, incident, recovery, restore or replica, and no save at this moment.
    "ALERTS",
    "megascale_incidents_total",
    "megascale_recovery_duration_seconds_bucket",
    "megascale_checkpoint_restore_duration_seconds_count",
    "megascale_checkpoint_restore_duration_seconds_sum",
    "megascale_checkpoint_restored_bytes_total",
    "megascale_checkpoint_replica_failures_total",
    "megascale_checkpoint_replicate_duration_seconds_count",
    "megascale_checkpoint_replicate_duration_seconds_sum",
    "megascale_checkpoint_replicated_bytes_total",
    "megascale_checkpoint_rank_storage_silent_seconds",
    "megascale_checkpoint_rank_written_ratio",
    # Nobody has measured the nodes, and a CPU has no known peak, no plan, no Xid and no RDMA port.
    "megascale_diag_result",
    "megascale_diag_value",
    "megascale_mfu_ratio",
    "megascale_plan_step_seconds",
    "megascale_plan_term_seconds",
    "megascale_port_peak_bytes_per_second",
    "megascale_rdma_bytes_total",
    "megascale_xid_total",
    # From spans.
    "megascale_collective_step_seconds",
    "megascale_straggler_ratio",
}


def unit_command(name: str, folder: Path, settings: dict[str, str], instance: str) -> list[str]:
    """The unit's command as if this project and ``folder`` were where the unit expects them."""
    text = (SYSTEMD / name).read_text().replace(PYTHON, sys.executable)
    text = text.replace(INSTALLED, str(REPOSITORY)).replace(RUN_FOLDER, str(folder))
    return command_line(read_unit(text), settings, instance)


@contextmanager
def started(command: list[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; its children end with it (parent-death signals)."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, env=child_environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Deployed:
    """Driver, two nodes and Prometheus."""

    def __init__(self, folder: Path, etcd_endpoint: str, stack: ExitStack) -> None:
        self.folder = folder
        settings = read_environment((SYSTEMD / "megascale.env.example").read_text())
        settings |= read_environment((SYSTEMD / "node.env.example").read_text())
        self._settings = settings | {
            "MEGASCALE_ETCD": etcd_endpoint,
            "MEGASCALE_DRIVER_BIND": "127.0.0.1:0",
            "MEGASCALE_DEVICE": "cpu",
            "MEGASCALE_DEVICES": "0",
        }
        read_or_create_token(folder / "token")
        self._stack = stack
        self.driver = self._start("megascale-driver.service")
        self.nodes = {node: self._start("megascale-node@.service", node) for node in NODES}
        until(self._nodes_serve, "the nodes are alive", lambda: log_bytes(folder))
        self.write_targets()
        self.prometheus = self._start_prometheus()

    def client(self) -> Client:
        """A client of the cluster."""
        return Client.from_run_folder(self.folder)

    def write_targets(self) -> None:
        """What the timer does."""
        command = unit_command("megascale-targets.service", self.folder, self._settings, "")
        subprocess.run(command, check=True)

    def ask(self, path: str, **parameters: str) -> Any:
        """Data of an answer of Prometheus's HTTP API."""
        url = f"http://{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as reply:
            return json.loads(reply.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return result

    def _start(self, unit: str, instance: str = "") -> subprocess.Popen[bytes]:
        command = unit_command(unit, self.folder, self._settings, instance)
        log = self.folder / f"{instance or 'driver'}.log"
        return self._stack.enter_context(started(command, log))

    def _nodes_serve(self) -> bool:
        assert self.driver.poll() is None, (self.folder / "driver.log").read_text()
        try:
            with self.client() as client:
                return sum(bool(node.checkpoint_endpoint) for node in client.nodes()) == len(NODES)
        except MegascaleError:
            return False

    def _start_prometheus(self) -> str:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not on PATH")
        (folder := self.folder / "prometheus").mkdir()
        for path in PROMETHEUS.glob("*.yml"):
            text = path.read_text().replace(RUN_FOLDER, str(self.folder))
            (folder / path.name).write_text(text.replace("_interval: 15s", "_interval: 1s"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [program, f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
        log = self.folder / "prometheus.log"
        process = self._stack.enter_context(started(command, log))

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready", timeout=CALL_TIMEOUT_S):
                    return True
            except (urllib.error.URLError, ConnectionError):
                return False

        until(ready, "Prometheus is ready", lambda: log.stat().st_size)
        return address


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    etcd = make_server(tmp_path_factory.mktemp("etcd") / "data")
    with ExitStack() as stack:
        asyncio.run(etcd.start())
        stack.callback(etcd.kill)
        yield Deployed(folder, etcd.endpoint, stack)


@pytest.fixture(scope="module")
def job(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that trains on one node and writes checkpoints."""
    corpus = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(corpus, random_documents(1, count=50, longest=100))
    model = {"layers": 1, "hidden_size": 32, "heads": 2, "vocab_size": 257, "sequence_length": 32}
    training = {"steps": 1_000_000, "global_batch_size": 2, "precision": "fp32"}
    data = {"sources": [{"prefix": str(corpus)}]}
    checkpoint = {"uri": str(deployed.folder / "checkpoints"), "interval_steps": 50}
    spec = {
        "name": "small",
        "trainer": {"model": model, "training": training, "data": data},
        "checkpoint": checkpoint,
    }
    with deployed.client() as client:
        client.submit(parse_job(spec))
        until(
            lambda: client.get("small").committed_step > 0,
            "a checkpoint",
            lambda: (client.get("small").step, client.get("small").phase_reason),
        )
    return "small"


def until_same(expected: object, actual: Callable[[], object]) -> None:
    """Wait until scrapes and evaluations (one a second) give the expected value."""
    until(lambda: actual() == expected, f"{expected}", story=lambda: f"at last {actual()}")


def test_prometheus_scrapes_every_service(deployed: Deployed) -> None:
    def up() -> object:
        return {
            (s["metric"]["service"], s["metric"].get("node", "")): (
                s["metric"]["cluster"],
                s["value"][1],
            )
            for s in deployed.query("up")
        }

    targets = {("driver", "")} | {(s, n) for s in ("executor", "checkpoint") for n in NODES}
    until_same(dict.fromkeys(targets, (CLUSTER, "1")), up)


def test_rules_are_evaluated_and_keep_the_names_of_jobs(deployed: Deployed, job: str) -> None:
    def health() -> object:
        groups = deployed.ask("rules")["groups"]
        return {(rule["health"], rule.get("lastError", "")) for g in groups for rule in g["rules"]}

    until_same({("ok", "")}, health)
    recorded = 'cluster_job:megascale_step:max{cluster="main"}'
    until_same([job], lambda: [s["metric"]["job"] for s in deployed.query(recorded)])


def test_panels_have_data(deployed: Deployed, job: str) -> None:
    def empty() -> set[str]:
        found: set[str] = set()
        for query in panel_queries():
            if not deployed.query(filled(query, CLUSTER, interval="1m")):
                found |= metric_names(query)
        return found - {"megascale_leader"}  # which stands in every query of the driver's gauges

    until_same(WITHOUT_SAMPLES, empty)


def test_a_node_that_is_stopped_leaves_nothing_and_its_target_is_reported(
    deployed: Deployed, job: str
) -> None:
    with deployed.client() as client:
        (name,) = client.get(job).nodes
    agent = deployed.nodes[name]
    assert len(living_processes_of_group(agent.pid)) > 3  # agent, template, daemon, rank
    agent.send_signal(signal.SIGTERM)  # to it alone, as with KillMode=mixed
    assert agent.wait(CALL_TIMEOUT_S) == 0
    assert living_processes_of_group(agent.pid) == []
    down = 'up{service="checkpoint"} == 0'
    until_same([name], lambda: [s["metric"]["node"] for s in deployed.query(down)])


def test_the_driver_ends_on_sigterm(deployed: Deployed) -> None:
    deployed.driver.send_signal(signal.SIGTERM)
    assert deployed.driver.wait(CALL_TIMEOUT_S) == 0
    without = "cluster:megascale_leader:sum"
    until_same(["0"], lambda: [s["value"][1] for s in deployed.query(without)])
    alert = 'ALERTS{alertname="MegascaleDriverWithoutLeader"}'
    until_same(["pending"], lambda: [s["metric"]["alertstate"] for s in deployed.query(alert)])
