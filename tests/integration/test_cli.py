"""The command line on a real cluster: small jobs from submission to checkpoint, as users do it."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import pty
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.deployment import named_metrics, served_names
from tests.harness.local_cluster import UpProcess, megascale, settle
from tests.harness.paced import paced
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale.v1 import types_pb2
from megascale_client import Client, NotPossible, parse_job

OPTIONS = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
STEPS = 6
# Of a job that trains while commands ask for it: a profile is placed two seconds of steps ahead,
# and the twin repeats all steps up to it.
WATCHED_PACE_S = 0.1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of two nodes with one CPU rank each, and job.yaml beside its run folder."""
    folder = tmp_path_factory.mktemp("cli")
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    done = megascale("data", "tokenize", str(source), "--output", str(folder / "corpus"), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "job.yaml").write_text(yaml.safe_dump(job("small", STEPS)))
    with UpProcess(folder / "runs", *OPTIONS):
        yield folder


@pytest.fixture(autouse=True)
def nothing_left(cluster: Path) -> Iterator[None]:
    """A failed test leaves no job to the next one."""
    yield
    settle(cluster / "runs")


def job(name: str, steps: int) -> dict[str, Any]:
    """A job of one rank that takes a snapshot every two steps."""
    return {
        "name": name,
        "trainer": {
            "model": {
                "layers": 1,
                "hidden_size": 32,
                "heads": 2,
                "vocab_size": 257,
                "sequence_length": 32,
            },
            "training": {"steps": steps, "global_batch_size": 2, "precision": "fp32"},
            "data": {"sources": [{"prefix": "corpus"}]},
        },
        "checkpoint": {"uri": f"checkpoints/{name}", "interval_steps": 2},
    }


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def on_a_terminal(*arguments: str) -> str:
    """The output of a command on a terminal of its own."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    command = [sys.executable, "-m", "megascale_cli", *arguments]
    with subprocess.Popen(
        command, stdout=slave, stderr=slave, stdin=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(master)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_a_job_from_submission_to_its_checkpoints(cluster: Path) -> None:
    here = ("--cluster", str(cluster / "runs"))

    def ask(*arguments: str) -> list[dict[str, Any]]:
        done = megascale(*arguments, *here, "--json", cwd=cluster)
        assert done.returncode == 0, done.stderr
        return objects(done.stdout)

    assert megascale("submit", "job.yaml", "--check", *here, cwd=cluster).returncode == 0
    assert ask("jobs") == []

    watched = megascale("submit", "job.yaml", "--watch", *here, cwd=cluster)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    for step in range(1, STEPS + 1):
        assert f"step {step}/{STEPS}" in watched.stdout
    assert "tokens/s" in watched.stdout
    assert "MFU n/a" in watched.stdout
    assert "JOB_SUCCEEDED" in watched.stdout

    (listed,) = ask("jobs")
    (shown,) = ask("job", "small")
    assert listed["spec"]["name"] == shown["spec"]["name"] == "small"
    assert (shown["phase"], shown["step"], shown["attempt"]) == (
        "JOB_PHASE_SUCCEEDED",
        str(STEPS),
        "1",
    )

    records = [update["step"] for update in ask("watch", "small") if "step" in update]
    assert [int(record["step"]) for record in records] == list(range(1, STEPS + 1))
    newest, *older = [int(item["step"]) for item in ask("checkpoint", "list", "small")]
    assert newest == STEPS and older in (
        [4, 2],
        [4],
        [2],
        [],
    )  # a snapshot is skipped while every slot is busy
    reasons = [event["reason"] for event in ask("events", "small")]
    assert reasons[0] == "SUBMITTED"
    assert reasons[-1] == "JOB_SUCCEEDED"
    assert "small" in ask("explain", "small")[0]["explanation"]
    alive = dict.fromkeys(("n1", "n2"), "NODE_LIVENESS_ALIVE")

    def shown_alive() -> bool:  # a node that stands still for seconds is a suspect for a while
        found = {node["name"]: node["liveness"] for node in ask("nodes")}
        return found == alive and bool(ask("cluster")[0]["nodes_alive"] == 2)

    until(shown_alive, "both nodes as alive, and counted so")
    verified = megascale("checkpoint", "verify", "checkpoints/small", cwd=cluster)
    assert verified.returncode == 0, verified.stdout + verified.stderr

    for arguments in (
        ["jobs"],
        ["job", "small"],
        ["nodes"],
        ["cluster"],
        ["explain", "small"],
        ["logs", "small"],
    ):
        done = megascale(*arguments, *here, cwd=cluster)
        assert done.returncode == 0, done.stderr

    # On a terminal there is a bar with the same facts.
    text = on_a_terminal("watch", "small", *here)
    for word in (
        "━",
        f"{STEPS}/{STEPS}",
        "loss",
        "tokens/s",
        "MFU n/a",
        "attempt 1",
        "JOB_SUCCEEDED",
    ):
        assert word in text

    again = megascale("submit", "job.yaml", *here, cwd=cluster)
    assert (again.returncode, "exists" in again.stderr) == (5, True)


@pytest.mark.slow
def test_the_example_of_the_clients_page_trains_and_fetches(cluster: Path, tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    example = docs / "examples" / "train_and_fetch.py"
    assert f"```python\n{example.read_text()}```" in (docs / "client.md").read_text()
    assert len(example.read_text().splitlines()) <= 22
    (cluster / "example.yaml").write_text(yaml.safe_dump(job("example", STEPS)))
    environment = {**os.environ, "MEGASCALE_RUN_FOLDER": str(cluster / "runs")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(example), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run(str(cluster / "example.yaml"), str(tmp_path / "copy"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"step {STEPS}: loss " in done.stdout
    assert "JOB_SUCCEEDED: " in done.stdout
    assert f"step {STEPS} is in {tmp_path / 'copy'}" in done.stdout
    assert "checksums verified" in done.stdout
    assert {file.name for file in (tmp_path / "copy").iterdir()} == {
        "manifest.json",
        "rank-00000.safetensors",
    }
    again = run(str(cluster / "example.yaml"), str(tmp_path / "copy"))
    assert (again.returncode, "exists" in again.stderr, "Traceback" in again.stderr) == (
        1,
        True,
        False,
    )

    here = ("--cluster", str(cluster / "runs"))
    # A busy machine skips some of the snapshots before the last, while every slot is in use.
    known = objects(megascale("checkpoint", "list", "example", *here, "--json").stdout)
    steps = [int(item["step"]) for item in known]
    older = tmp_path / "older"
    fetched = megascale(
        "checkpoint", "fetch", "example", "--step", str(steps[-1]), "--to", str(older), *here
    )
    assert fetched.returncode == 0, fetched.stderr
    assert json.loads((older / "manifest.json").read_text())["step"] == steps[-1]
    absent = megascale(
        "checkpoint", "fetch", "example", "--step", "3", "--to", str(tmp_path / "x"), *here
    )
    assert (absent.returncode, f"those of steps {', '.join(map(str, steps))}" in absent.stderr) == (
        4,
        True,
    )


def titles() -> set[str]:
    """What `ps` shows of the workers on this machine, without the first word."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
            if line.startswith("megascale rank ") and (entry / "comm").read_text().startswith("r"):
                found.add(line.removeprefix("megascale "))
    return found


def losses_until(client: Client, name: str, step: int) -> list[float]:
    """Loss of each step of a running job, the first to ``step``."""
    records = (update.step for update in client.watch(name) if update.HasField("step"))
    return [
        record.loss for record in itertools.takewhile(lambda record: record.step <= step, records)
    ]


@pytest.mark.slow
def test_a_running_job_is_profiled_and_trains_as_if_it_were_not(cluster: Path) -> None:
    here = ("--cluster", str(cluster / "runs"))
    spec = job("profiled", 1_000_000)
    spec["trainer"] |= {
        "optimizer": paced(WATCHED_PACE_S),
        "data": {"sources": [{"prefix": str(cluster / "corpus")}]},
        "parallelism": {"pp": 2},
    }
    spec["trainer"]["model"]["layers"] = 2
    del spec["checkpoint"]
    with Client.from_run_folder(cluster / "runs") as client:
        client.submit(parse_job(spec))
        until(
            lambda: client.get("profiled").step > 5,
            "some steps",
            lambda: client.get("profiled").phase_reason,
        )
        assert {"rank 0 of job profiled attempt 1", "rank 1 of job profiled attempt 1"} <= titles()
        done = megascale(
            "profile", "profiled", "--ranks", "1,0", "--reason", "slow", "--json", *here
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = objects(done.stdout)
        first, last = int(found["first_step"]), int(found["last_step"])
        assert last == first + 1 and found["attempt"] == "1"
        assert [(trace["rank"], trace["node"]) for trace in found["traces"]] == [
            (0, "n1"),
            (1, "n2"),
        ]
        for trace in found["traces"]:
            path = Path(trace["path"])
            assert (
                path.parent
                == cluster / "runs/nodes" / trace["node"] / "jobs/profiled/attempt-000001"
            )
            assert (trace["state"], int(trace["size_bytes"])) == (
                "TRACE_STATE_WRITTEN",
                path.stat().st_size,
            )
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
            assert {name for name in names if name.startswith("step ")} == {
                f"step {first}",
                f"step {last}",
            }
            assert names >= {"forward 0.0", "backward 0.0", "optimizer"}
        written = [
            event for event in client.events("jobs/profiled") if event.reason.startswith("PROFILE_")
        ]
        assert [event.reason for event in written] == [
            "PROFILE_REQUESTED",
            "PROFILE_WRITTEN",
            "PROFILE_WRITTEN",
        ]
        assert f"steps {first} to {last} on ranks 0, 1: slow" in written[0].message
        assert {event.evidence[0].uri for event in written[1:]} == {
            trace["path"] for trace in found["traces"]
        }

        for options, status, said in (
            (["--first-step", "1"], 5, "step 1 has passed or is too near"),
            (["--ranks", "2"], 2, "2 is not one of the job's 2 ranks"),
        ):
            refused = megascale("profile", "profiled", *options, *here)
            assert (refused.returncode, said in refused.stderr) == (status, True), refused.stderr
        far = client.profile("profiled", steps=1, first_step=client.get("profiled").step + 3000)
        with pytest.raises(NotPossible, match="still in progress"):
            client.profile("profiled", steps=2)
        given_up = megascale("profile", "profiled", "--cancel", "--reason", "too far", *here)
        assert given_up.returncode == 0 and "cancelled by" in given_up.stdout, given_up.stderr
        assert client.profiled("profiled", far.id).traces[0].detail.startswith("cancelled by")
        log = Path(far.traces[0].path).with_name("rank-00000.log")
        until(
            lambda: "skipped cancelled before its first step" in log.read_text(),
            "the worker gives the profile up",
            lambda: client.get("profiled").step,
        )
        with pytest.raises(NotPossible, match="no profile of job profiled is in progress"):
            client.cancel_profile("profiled")
        far = client.profile("profiled", steps=1, first_step=client.get("profiled").step + 3000)
        losses = losses_until(client, "profiled", last + 3)
        client.cancel("profiled", reason="enough")
        assert client.profiled("profiled", far.id).traces[0].detail == "attempt 1 ended first"
        with pytest.raises(NotPossible, match="only a running job"):
            client.profile("profiled", steps=2)

        client.submit(parse_job({**spec, "name": "twin"}))
        assert losses_until(client, "twin", last + 3) == losses and len(losses) == last + 3
        client.cancel("twin", reason="enough")
        until(lambda: client.get("twin").phase == types_pb2.JOB_PHASE_CANCELLED, "the twin's end")


def scraped_names(run_folder: Path) -> set[str]:
    """Series of all services of the cluster, found as Prometheus finds them."""
    found: set[str] = set()
    for group in json.loads((run_folder / "prometheus.json").read_text()):
        for target in group["targets"]:
            url = f"http://{target}/metrics"
            with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as reply:
                found |= served_names(reply.read().decode())
    return found


def test_services_serve_every_metric_that_a_rule_or_a_panel_names(cluster: Path) -> None:
    spec = job("scraped", 1_000_000)
    spec["trainer"] |= {
        "optimizer": paced(WATCHED_PACE_S),
        "data": {"sources": [{"prefix": str(cluster / "corpus")}]},
    }
    spec["checkpoint"]["uri"] = str(cluster / "checkpoints" / "scraped")
    with Client.from_run_folder(cluster / "runs") as client:
        client.submit(parse_job(spec))

        def missing() -> dict[str, set[str]]:
            served = scraped_names(cluster / "runs")
            return {name: who for name, who in named_metrics().items() if name not in served}

        # A node serves where its ranks are only while they run.
        until(
            lambda: client.get("scraped").step > 2,
            "some steps",
            lambda: client.get("scraped").phase_reason,
        )
        assert missing() == {}
        client.cancel("scraped", reason="enough")


def test_a_job_that_runs_is_cancelled_and_a_node_evicted(cluster: Path) -> None:
    here = ("--cluster", str(cluster / "runs"), "--json")
    spec = job("long", 100_000)
    spec["trainer"]["optimizer"] = paced(WATCHED_PACE_S)
    (cluster / "long.yaml").write_text(yaml.safe_dump(spec))
    assert megascale("submit", "long.yaml", *here, cwd=cluster).returncode == 0
    cancelled = megascale("cancel", "long", "--reason", "enough", *here, cwd=cluster)
    assert cancelled.returncode == 0, cancelled.stderr
    ended = megascale("watch", "long", *here, cwd=cluster)
    assert ended.returncode == 1
    assert objects(megascale("job", "long", *here).stdout)[0]["phase"] == "JOB_PHASE_CANCELLED"
    assert megascale("cancel", "long", "--reason", "again", *here).returncode in (0, 5)

    checked = megascale("evict", "n2", "--reason", "a test", "--check", *here)
    assert checked.returncode == 0, checked.stderr
    dispositions = {
        node["name"]: node["disposition"] for node in objects(megascale("nodes", *here).stdout)
    }
    assert dispositions["n2"] == "NODE_DISPOSITION_SCHEDULABLE"
    assert megascale("evict", "n2", "--reason", "a test", *here).returncode == 0
    (node,) = [node for node in objects(megascale("nodes", *here).stdout) if node["name"] == "n2"]
    assert (node["disposition"], node["disposition_reason"]) == (
        "NODE_DISPOSITION_QUARANTINED",
        "a test",
    )
    assert "a test" in megascale("events", "nodes/n2", *here).stdout


def test_mistakes_end_with_their_status_and_no_traceback(cluster: Path) -> None:
    here = ("--cluster", str(cluster / "runs"))
    bad = job("bad", 2)
    bad["trainer"]["model"]["heads"] = 3
    (cluster / "bad.yaml").write_text(yaml.safe_dump(bad))
    for arguments, status, said in (
        (["submit", "bad.yaml"], 2, "heads"),
        (["submit", "absent.yaml"], 2, "absent.yaml"),
        (["job", "absent"], 4, "absent"),
        (["logs", "absent", "--rank", "5"], 4, "absent"),
        (["evict", "n9", "--reason", "x"], 4, "n9"),
    ):
        done = megascale(*arguments, *here, cwd=cluster)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (
            status,
            True,
            False,
        ), done.stderr
