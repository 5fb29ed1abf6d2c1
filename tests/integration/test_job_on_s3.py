"""A whole job on an S3 server: submitted, trained, its checkpoints kept, verified and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.s3
STEPS = 8


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server whose settings are in the environment of this process and its children."""
    pytest.importorskip("boto3")
    found = S3Server(tmp_path)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    yield found
    found.stop()


@pytest.mark.slow
def test_a_job_trains_with_its_checkpoints_on_s3(server: S3Server, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", random_documents(1, 60, 40, vocab_size=20))
    sizes = {"layers": 1, "hidden_size": 32, "heads": 2, "vocab_size": 257, "sequence_length": 16}
    spec = {
        "name": "remote",
        "trainer": {
            "model": sizes,
            "parallelism": {"dp": 2},
            "training": {"steps": STEPS, "global_batch_size": 2, "precision": "fp32"},
            "data": {"sources": [{"prefix": str(tmp_path / "corpus")}]},
        },
        "checkpoint": {
            "uri": f"s3://{BUCKET}/remote",
            "interval_steps": 2,
            "keep_latest": 2,
            "max_write_mib_per_s": 100,
        },
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    runs = tmp_path / "runs"

    def ask(*arguments: str) -> str:
        done = megascale(*arguments, "--cluster", str(runs))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    options = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu")
    with UpProcess(runs, *options):
        assert "JOB_SUCCEEDED" in ask("submit", str(file), "--watch")
        listed = [
            json.loads(line) for line in ask("checkpoint", "list", "remote", "--json").splitlines()
        ]
        assert int(listed[0]["step"]) == STEPS
        assert listed[0]["manifest_uri"].startswith(f"s3://{BUCKET}/remote/attempts/")
        assert "whole" in ask("checkpoint", "verify", "remote")
        pin = ("checkpoint", "pin", "remote", "--step", str(STEPS), "--reason", "the last")
        assert "is pinned" in ask(*pin)
        assert "the last" in ask("checkpoint", "list", "remote")
        ask("checkpoint", "gc", "remote", "--yes")
        assert f"step {STEPS} of job remote" in ask("checkpoint", "show", "remote")
    keys = server.client().list_objects_v2(Bucket=BUCKET, Prefix="remote/attempts/")["Contents"]
    steps = {key["Key"].split("/")[3] for key in keys}
    assert len(steps) <= 2 and f"step-{STEPS:09d}" in steps
