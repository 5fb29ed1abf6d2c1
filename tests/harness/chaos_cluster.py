"""A local cluster for fault injection: small jobs, processes by role, and a check at the end.

Nodes have one CPU rank each, so the losses of a process, a node and a rank are different events.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.job_follower import JobFollower
from tests.harness.local_cluster import UpProcess, settle
from tests.harness.paced import PACE_S, paced
from tests.harness.processes import until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, Standstill

from megascale.v1 import driver_pb2, job_pb2
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.memory.staging import default_base
from megascale_checkpoint.storage import FileStorage
from megascale_client import AsyncClient, MegascaleError, parse_job


class ChaosCluster:
    """`megascale up` under its own name, with a corpus, and jobs of two stages on two nodes."""

    def __init__(self, folder: Path, name: str, runtime_folder: Path, *options: str) -> None:
        self.folder, self.name, self.runtime_folder = folder, name, runtime_folder
        self.options = ("--cluster", name, "--devices-per-node", "1", "--device", "cpu", *options)
        self._corpus = write_corpus(
            folder / "corpus", random_documents(seed=7, count=60, longest=200)
        )
        self.up = self._new_up()

    def start_again(self) -> UpProcess:
        """Another `megascale up` in the same run folder, after the last one has ended."""
        self.up = self._new_up()
        return self.up

    def client(self) -> AsyncClient:
        """A client with a long retry time, because drivers are killed here."""
        return AsyncClient.from_run_folder(self.up.folder, retry_for_s=CALL_TIMEOUT_S)

    def follow(self, client: AsyncClient, spec: job_pb2.JobSpec, **options: Any) -> JobFollower:
        """Submit a job and follow it."""
        return JobFollower(client, spec, self.up.folder, **options)

    def takes_jobs(self) -> bool:
        """End what runs; returns whether every node can then take the next job."""
        try:
            return self.up.process.poll() is None and settle(self.up.folder) == set(
                self.up.state["nodes"]
            )
        except (Standstill, MegascaleError):
            return False

    def job(
        self,
        name: str,
        *,
        steps: int,
        interval_steps: int,
        spares: int = 0,
        pace_s: float = PACE_S,
        dp: int = 0,
        optimizer: Mapping[str, Any] | None = None,
    ) -> job_pb2.JobSpec:
        """A job of two ranks on two nodes; a step takes about 20 ms, and for most of it sleeps.

        A job that trains at full speed, while a test waits for something else, would take a core
        of the machine from the tests beside it.

        Args:
            pace_s: how long each step sleeps.
            dp: so many data-parallel ranks, in place of two pipeline stages.
            optimizer: the section of the job, in place of one that sleeps.
        """
        stages = {"pp": 2, "overlap": {"pp": True}}
        return parse_job(
            {
                "name": name,
                "trainer": {
                    "model": {
                        "layers": 2,
                        "hidden_size": 32,
                        "heads": 2,
                        "vocab_size": 257,
                        "sequence_length": 16,
                    },
                    "parallelism": {"dp": dp} if dp else stages,
                    "training": {
                        "steps": steps,
                        "global_batch_size": dp or 1,
                        "precision": "fp32",
                    },
                    "optimizer": dict(optimizer or paced(pace_s)),
                    "data": {"sources": [{"prefix": str(self._corpus)}]},
                },
                "checkpoint": {
                    "uri": str(self.checkpoints(name)),
                    "interval_steps": interval_steps,
                },
                "recovery": {"spare_nodes": spares, "collective_timeout_s": 60},
            }
        )

    def checkpoints(self, job: str) -> Path:
        """Folder of a job's checkpoints."""
        return self.folder / "checkpoints" / job

    def commit_log(self, job: str) -> CommitLog:
        """The job's commit log as it stands."""
        log = CommitLog(FileStorage(self.checkpoints(job)))
        log.refresh()
        return log

    def worker_pids(self, job: driver_pb2.Job) -> dict[int, int]:
        """Process ids of the job's ranks, as the agents wrote them."""
        found = {}
        for node in job.nodes:
            for role, pid in self.up.node_pids(node).items():
                if role.startswith("rank-"):
                    found[int(role.removeprefix("rank-"))] = pid
        return found

    def status_page(self, job: driver_pb2.Job, rank: int) -> Path:
        """The status page of a rank of the job's current attempt (one rank on each node)."""
        folder = (
            self.up.folder
            / "nodes"
            / job.nodes[rank]
            / "jobs"
            / job.spec.name
            / f"attempt-{job.attempt:06d}"
        )
        return folder / f"status-{rank:05d}.page"

    def rank_log(self, job: driver_pb2.Job, rank: int) -> str:
        """The log of a rank of the job's current attempt."""
        page = self.status_page(job, rank)
        return page.with_name(f"rank-{rank:05d}.log").read_text()

    def signal_node(self, node: str, number: signal.Signals) -> float:
        """Send a signal to a node's process group; returns when, in seconds since 1970."""
        group = self.up.node_pids(node)["agent"]
        assert os.getpgid(group) == group
        os.killpg(group, number)
        return time.time()

    def shared_memory(self) -> set[str]:
        """Staging folders of this cluster, as NODE/INCARNATION."""
        base = default_base() / self.name
        return {f"{entry.parent.name}/{entry.name}" for entry in base.glob("*/*") if entry.is_dir()}

    def socket_folders(self) -> set[str]:
        """Folders of the sockets of agents and etcd."""
        return {entry.name for entry in self.runtime_folder.glob("megascale/*")}

    def _new_up(self) -> UpProcess:
        return UpProcess(self.folder / "run", *self.options)


@contextlib.contextmanager
def chaos_cluster(folder: Path, *options: str) -> Iterator[ChaosCluster]:
    """A cluster that is ready; at the end it must stop in order and leave no process.

    Shared memory of killed nodes is removed here: the next start of the same node would do so, but
    there is none.
    """
    name = f"chaos-{uuid.uuid4().hex[:8]}"
    runtime_folder = Path(
        tempfile.mkdtemp(prefix="ms-", dir="/tmp")
    )  # short: socket paths are bounded
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
        cluster = ChaosCluster(folder, name, runtime_folder, *options)
        try:
            with cluster.up:
                yield cluster
                running = cluster.up
                pids = running.processes()
                if running.process.poll() is None:
                    assert running.stop() == 0, "`megascale up` did not stop in order"
                until_gone(pids, "all processes gone")
        finally:
            shutil.rmtree(default_base() / name, ignore_errors=True)
            shutil.rmtree(runtime_folder, ignore_errors=True)


@contextlib.contextmanager
def shared_cluster(
    folder: Callable[[], Path], *options: str
) -> Iterator[Callable[[], ChaosCluster]]:
    """A cluster that tests share in turn: each calls the result for a complete, idle cluster.

    Jobs that a failed test has left are ended. A cluster that then lacks a node is replaced by a
    new one.

    Args:
        folder: creates a fresh folder for each cluster.
    """
    with contextlib.ExitStack() as stack:
        held: list[ChaosCluster] = []

        def ready() -> ChaosCluster:
            if held and not held[0].takes_jobs():
                held.clear()
                with contextlib.suppress(
                    AssertionError
                ):  # the test that broke it has failed already
                    stack.close()
            if not held:
                held.append(stack.enter_context(chaos_cluster(folder(), *options)))
            return held[0]

        yield ready


def measured(what: str, **values: Any) -> None:
    """Print the measurements of a test."""
    rounded = {
        key: round(value, 2) if isinstance(value, float) else value for key, value in values.items()
    }
    print(f"\n{what}: {json.dumps(rounded)}")
