"""Jobs that would fail the same way at every attempt, on a whole cluster: they end at the first.

What the driver can see of the files, it refuses at submit; the rest is found by the node that runs
the attempt. And a job that diverges, which ends or goes on as it asks for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale, settle
from tests.harness.memory_limit import join, memory_limit
from tests.harness.paced import paced, release

from megascale.v1 import driver_pb2, types_pb2
from megascale_checkpoint.export.stored import open_checkpoint, tokenizer_of
from megascale_checkpoint.export.tokenizer_files import tokenizer_files
from megascale_client import Client, parse_job
from megascale_executor.agent.workers.evidence import memory_group

OPTIONS = ("--nodes", "1", "--devices-per-node", "1", "--device", "cpu")
STEPS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of one CPU rank; beside its run folder corpora and the checkpoints of `first`."""
    folder = tmp_path_factory.mktemp("cannot-run")
    documents = random_documents(1, 60, 40, vocab_size=20)
    write_corpus(folder / "corpus", documents)
    write_corpus(folder / "wide", [[300] * 40] * 20, vocab_size=400)
    write_corpus(folder / "cut", documents)
    cut = folder / "cut.bin"
    cut.write_bytes(cut.read_bytes()[:-2])
    (folder / "empty").mkdir()
    with UpProcess(folder / "runs", *OPTIONS):
        ended = run(folder, job(folder, "first"))
        assert ended.phase == types_pb2.JOB_PHASE_SUCCEEDED, ended.phase_reason
        yield folder


@pytest.fixture
def limited(cluster: Path) -> Iterator[None]:
    """The workers of the node are in a memory cgroup that is too small for `large`."""
    template = node_pids(cluster)["template"]
    with memory_limit(300 << 20) as group:
        before = memory_group(template)
        join(group, template)
        yield
        settle(cluster / "runs")
        assert before.counter is not None
        join(before.counter.parent, template)


@pytest.fixture(autouse=True)
def nothing_left(cluster: Path) -> Iterator[None]:
    """A failed test leaves no job to the next one."""
    yield
    settle(cluster / "runs")


def job(folder: Path, name: str, corpus: str = "corpus") -> dict[str, Any]:
    """A job of one rank with a checkpoint folder of its own."""
    return {
        "name": name,
        "trainer": {
            "model": {
                "layers": 1,
                "hidden_size": 32,
                "heads": 2,
                "vocab_size": 257,
                "sequence_length": 16,
            },
            "training": {"steps": STEPS, "global_batch_size": 2, "precision": "fp32"},
            "optimizer": {},
            "data": {"sources": [{"prefix": str(folder / corpus)}]},
        },
        "checkpoint": {"uri": str(folder / "checkpoints" / name), "interval_steps": 100},
    }


def diverging(folder: Path, name: str, **recovery: Any) -> dict[str, Any]:
    """A job whose learning rate makes its loss rise far above that of the first ten steps."""
    spec = job(folder, name)
    spec["trainer"]["training"]["steps"] = 60
    spec["trainer"]["optimizer"] = {"learning_rate": 10.0, "clip_norm": 0.0}
    # Small steps first, so that the start is that of a sound run.
    spec["trainer"]["schedule"] = {"warmup_steps": 12, "decay": "constant"}
    spec["checkpoint"]["interval_steps"] = 5
    spec["recovery"] = {"divergence_steps": 5, "loss_rise_factor": 1.01, **recovery}
    return spec


def node_pids(folder: Path) -> dict[str, int]:
    """Process ids of the node by role."""
    values: dict[str, int] = json.loads(
        (folder / "runs" / "nodes" / "n1" / "pids.json").read_text()
    )
    return values


def run(folder: Path, spec: dict[str, Any], *, held: bool = False) -> driver_pb2.Job:
    """The job as it ended; ``held``: its steps wait until it has a checkpoint."""
    with Client.from_run_folder(folder / "runs") as client:
        client.submit(parse_job(spec))
        for update in client.watch(spec["name"]):
            if held and update.job.committed_step:
                release(folder / "runs.site")
        return client.get(spec["name"])


def vocabulary(folder: Path) -> dict[str, Any]:
    return job(folder, "vocabulary", "wide")


def held_out_vocabulary(folder: Path) -> dict[str, Any]:
    """What only the first evaluation would read."""
    spec = job(folder, "held-out-vocabulary")
    held_out = [{"prefix": str(folder / "wide")}]
    spec["trainer"]["evaluation"] = {"sources": held_out, "interval_steps": STEPS}
    return spec


def damaged_corpus(folder: Path) -> dict[str, Any]:
    return job(folder, "damaged-corpus", "cut")


def nothing_to_load(folder: Path) -> dict[str, Any]:
    spec = job(folder, "nothing-to-load")
    spec["checkpoint"]["load_uri"] = str(folder / "empty")
    return spec


def foreign_folder(folder: Path) -> dict[str, Any]:
    """The folder of a job that this cluster has never had."""
    spec = job(folder, "foreign-folder")
    shutil.copytree(folder / "checkpoints" / "first", folder / "foreign")
    spec["checkpoint"]["uri"] = str(folder / "foreign")
    return spec


def other_model(folder: Path) -> dict[str, Any]:
    spec = job(folder, "other-model")
    spec["trainer"]["model"]["hidden_size"] = 64
    spec["trainer"]["training"]["steps"] = 9  # beyond the restored one
    spec["checkpoint"]["load_uri"] = str(folder / "checkpoints" / "first")
    return spec


def without_its_head(folder: Path) -> dict[str, Any]:
    """The trained head has no place in a tied model."""
    spec = job(folder, "without-its-head")
    spec["trainer"]["model"]["tie_embeddings"] = True
    spec["trainer"]["training"]["steps"] = 9  # beyond the restored one
    spec["checkpoint"]["load_uri"] = str(folder / "checkpoints" / "first")
    return spec


def other_seed(folder: Path) -> dict[str, Any]:
    spec = job(folder, "other-seed")
    spec["trainer"]["training"]["steps"] = 9
    spec["trainer"]["data"]["seed"] = 7
    spec["checkpoint"]["load_uri"] = str(folder / "checkpoints" / "first")
    return spec


def other_batch(folder: Path) -> dict[str, Any]:
    spec = job(folder, "other-batch")
    spec["trainer"]["training"] |= {"global_batch_size": 4, "steps": 9}
    spec["checkpoint"]["load_uri"] = str(folder / "checkpoints" / "first")
    return spec


def unknown_optimizer(folder: Path) -> dict[str, Any]:
    spec = job(folder, "unknown-optimizer")
    spec["trainer"]["optimizer"] = {"name": "adagrad"}
    return spec


@pytest.mark.parametrize(
    ("make", "field", "remedy"),
    [
        (vocabulary, "trainer.model.vocab_size: ", "use the size of the tokenizer"),
        (held_out_vocabulary, "trainer.model.vocab_size: ", "use the size of the tokenizer"),
        pytest.param(
            *(damaged_corpus, "trainer.data.sources[0].prefix: ", "tokenise again"),
            marks=pytest.mark.slow,
        ),
        (nothing_to_load, "checkpoint.load_uri: ", "give the folder of a job"),
        (foreign_folder, "checkpoint.uri: ", "give foreign-folder a checkpoint.uri of its own"),
        (other_model, "trainer.model: ", "resume with the model and optimizer that wrote it"),
        (without_its_head, "trainer.model.tie_embeddings: ", "resume with the model"),
        pytest.param(
            *(other_batch, "trainer.training.global_batch_size: ", "keep the batch size"),
            marks=pytest.mark.slow,
        ),
        (other_seed, "trainer.data.seed: ", "checkpoint.load: weights"),
        (unknown_optimizer, "trainer.optimizer.name: ", "or use one of these"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_ends_at_its_first_attempt_with_field_and_remedy(
    cluster: Path, make: Any, field: str, remedy: str
) -> None:
    ended = run(cluster, make(cluster))
    assert ended.phase == types_pb2.JOB_PHASE_FAILED, ended.phase_reason
    assert field in ended.phase_reason and remedy in ended.phase_reason, ended.phase_reason
    assert (ended.attempt, ended.restarts) == (1, 0)


def test_an_export_of_a_job_has_the_end_of_its_tokenizer(cluster: Path) -> None:
    stored = open_checkpoint(str(cluster / "checkpoints" / "first"))
    assert tokenizer_of(stored, None)["kind"] == "bytes"
    words = tokenizer_files(tokenizer_of(stored, None), 257)
    assert words.ids == {"eos": 256} and "tokenizer.json" in words.files


def submit(folder: Path, spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`megascale submit` of a job file with ``spec``."""
    file = folder / f"{spec['name']}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return megascale("submit", str(file), "--cluster", str(folder / "runs"))


def test_what_the_driver_can_see_is_refused_at_submit(cluster: Path) -> None:
    spec = job(cluster, "refused", "no-such-corpus")
    spec["trainer"]["parallelism"] = {"tp": 2}
    spec["checkpoint"] |= {
        "load_uri": str(cluster / "nowhere"),
        "uri": str(cluster / "checkpoints" / "first"),
    }
    done = submit(cluster, spec)
    assert done.returncode == 2, done.stdout
    for part in (
        "trainer.parallelism.tp", "no known node has more than 1 device",
        "trainer.data.sources[0].prefix", "no-such-corpus.idx", "megascale data tokenize",
        "checkpoint.load_uri", "checkpoint.uri", "is the folder of job first",
    ):  # fmt: skip
        assert part in done.stderr, done.stderr
    with Client.from_run_folder(cluster / "runs") as client:
        assert "refused" not in [each.spec.name for each in client.jobs()]


def test_a_corpus_of_another_tokenizer_is_refused_at_submit(cluster: Path) -> None:
    for name, text in (("ours", "one two "), ("theirs", "three four ")):
        (cluster / f"{name}.txt").write_text(text * 50)
        given = ("--tokenizer", "bpe", "--vocab-size", "260", "--overwrite")
        made = megascale("data", "tokenize", str(cluster / f"{name}.txt"), *given, "-o",
                         str(cluster / name))  # fmt: skip
        assert made.returncode == 0, made.stderr
    spec = job(cluster, "other-tokenizer", "ours")
    spec["trainer"]["model"]["vocab_size"] = 288
    spec["trainer"]["data"]["tokenizer"] = {
        "kind": "bpe", "path": str(cluster / "theirs.tokenizer.json")
    }  # fmt: skip
    done = submit(cluster, spec)
    assert done.returncode == 2, done.stdout
    assert "trainer.data.sources[0].prefix" in done.stderr and "was made by" in done.stderr
    spec["trainer"]["data"]["tokenizer"]["path"] = str(cluster / "ours.tokenizer.json")
    assert run(cluster, spec).phase == types_pb2.JOB_PHASE_SUCCEEDED


def test_a_storage_that_cannot_be_used_is_refused_at_submit(cluster: Path) -> None:
    """The driver asks a node's daemon, which has the storages' packages and credentials."""
    spec = job(cluster, "no-storage")
    spec["checkpoint"]["uri"] = "gs://bucket/x"
    done = submit(cluster, spec)
    assert done.returncode == 2, done.stdout
    for part in ("checkpoint.uri", "node n1: no storage here has the scheme gs://", "install the"):
        assert part in done.stderr, done.stderr
    spec = job(cluster, "absent-server")
    spec["checkpoint"]["uri"] = "s3://bucket/x"
    done = submit(cluster, spec)
    text = done.stderr
    assert (done.returncode, "AWS_ACCESS_KEY_ID" in text) == (2, True) or "warning: " in text, text
    assert "checkpoint.uri: node n1" in text, text


def test_what_more_nodes_would_solve_is_a_warning(cluster: Path) -> None:
    spec = job(cluster, "spares")
    spec["recovery"] = {"spare_nodes": 100}
    done = submit(cluster, spec)
    assert done.returncode == 0 and "of 1 node known so far 0 can be spared" in done.stderr
    spec = job(cluster, "waits")
    spec["trainer"]["parallelism"] = {"dp": 2}
    done = submit(cluster, spec)
    assert done.returncode == 0 and "warning: the job will wait: it needs 2 devices" in done.stderr
    with Client.from_run_folder(cluster / "runs") as client:
        waits = client.get("waits")
    assert waits.phase == types_pb2.JOB_PHASE_QUEUED
    assert waits.phase_reason.startswith("waiting for nodes (it needs 2 devices, and ")


@pytest.mark.parametrize("action", ["stop", pytest.param("continue", marks=pytest.mark.slow)])
def test_a_run_that_diverges_ends_or_goes_on_as_it_asks_for(cluster: Path, action: str) -> None:
    name = f"diverges-{action}"
    ended = run(cluster, diverging(cluster, name, on_loss_rise=action))
    with Client.from_run_folder(cluster / "runs") as client:
        lines = [line for line in client.events(f"jobs/{name}") if line.reason == "LOSS_DIVERGED"]
    print(ended.phase_reason)
    assert lines and lines[0].evidence[0].digest.startswith("step ")
    if action == "stop":
        assert ended.phase == types_pb2.JOB_PHASE_FAILED, ended.phase_reason
        assert "times its start" in ended.phase_reason and "checkpoint" in ended.phase_reason
        assert (ended.attempt, ended.restarts, len(lines)) == (1, 0, 1)
    else:
        assert ended.phase == types_pb2.JOB_PHASE_SUCCEEDED, ended.phase_reason
        assert {line.mode for line in lines} == {"OBSERVE"}


def test_a_run_that_diverges_is_taken_back_and_skips_the_data(cluster: Path) -> None:
    """It diverges again and again, so that it ends after the last time that it may go back."""
    name = "taken-back"
    spec = diverging(cluster, name, on_loss_rise="roll_back", max_roll_backs=2)
    # A snapshot is skipped while the checkpoint daemon does not answer, and the warm-up would be
    # over within a moment: it waits for a checkpoint to go back to.
    spec["trainer"]["optimizer"] |= paced(held_from_step=8)
    spec["trainer"]["schedule"]["warmup_steps"] = 22
    ended = run(cluster, spec, held=True)
    with Client.from_run_folder(cluster / "runs") as client:
        lines = [line for line in client.events(f"jobs/{name}") if line.reason == "LOSS_DIVERGED"]
    print(ended.phase_reason)
    assert ended.phase == types_pb2.JOB_PHASE_FAILED, ended.phase_reason
    assert "was taken back 2 times (recovery.max_roll_backs)" in ended.phase_reason
    # One more for each checkpoint that was committed while its attempt was being stopped.
    assert ended.attempt >= 3 and (ended.restarts, len(lines)) == (0, 3)
    assert {line.mode for line in lines} == {"ENFORCE"}
    skips = ended.spec.trainer.data.skips
    for line, skip in zip(sorted(lines, key=lambda line: line.attempt), skips, strict=False):
        first, last = skip.after_step + 1, skip.after_step + skip.steps
        assert f"leaves out the data of steps {first} to {last}" in line.outcome, line.outcome
    assert len(skips) in (1, 2) and 0 < ended.restored_step <= 20


@pytest.mark.slow
def test_a_run_that_is_never_finite_ends_by_default(cluster: Path) -> None:
    spec = job(cluster, "never-finite")
    spec["trainer"]["training"]["steps"] = 100_000
    spec["trainer"]["loss"] = {"z_loss": 1e38}
    ended = run(cluster, spec)
    assert ended.phase == types_pb2.JOB_PHASE_FAILED
    assert (
        "the loss or the gradient norm was not finite in 10 steps in a row, 1 to 10"
        in ended.phase_reason
    )
    assert "there is no checkpoint" in ended.phase_reason and ended.restarts == 0


def test_a_job_that_the_kernel_kills_for_want_of_memory_is_named_so(
    cluster: Path, limited: None
) -> None:
    spec = job(cluster, "large")
    spec["trainer"]["model"] |= {"layers": 4, "hidden_size": 1024}  # 50 M parameters, 0.8 GB
    spec["checkpoint"] = {}
    ended = run(cluster, spec)
    assert ended.phase == types_pb2.JOB_PHASE_FAILED
    assert "killed by the kernel's out-of-memory killer (cgroup limit 0.3 GiB" in ended.phase_reason
    assert "trainer.parallelism.recompute" in ended.phase_reason
    assert ended.attempt == 2, "the first might have been a moment's neighbour"
    with Client.from_run_folder(cluster / "runs") as client:
        reasons = [line.reason for line in client.events("jobs/large")]
    assert reasons.count("WORKER_OUT_OF_MEMORY") == 2 and "NODE_EVICTED" not in reasons
