"""A worker that prints why it fails, in a real cluster: its line is the verdict."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import chaos_cluster
from tests.harness.installed_package import install

from megascale.v1 import types_pb2

# Of a device, but of none that the next attempt checks (core/fault_checks.py): a check of a node by
# matrix products takes more than its limit where twenty processes want a core, and evicts the node.
NVLINK = "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution"
CLOSED = "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>"
TIMEOUT = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 9 ms"
# Until the job was asked for the cause, which it no longer has once it has succeeded, each step of
# the next attempt takes so long.
HELD_S = 0.5
FAILS = f"""
import time
from pathlib import Path

import torch.distributed as dist
from megascale_trainer.optimizer.adamw import AdamW

ONCE, ASKED = Path(__file__).with_name("failed"), Path(__file__).with_name("asked")

class Failing(AdamW):
    def update(self, gradients, parameters, control, learning_rate, number):
        if number == 12 and dist.get_rank() == 0 and not ONCE.exists():
            print({CLOSED!r}, flush=True)
            print({TIMEOUT!r}, flush=True)
        if number >= 13 and dist.get_rank() == 1 and not ONCE.exists():
            ONCE.touch()
            raise {NVLINK.partition(":")[0]}({NVLINK.partition(": ")[2]!r})
        end_s = time.monotonic() + {HELD_S}
        while ONCE.exists() and not ASKED.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        super().update(gradients, parameters, control, learning_rate, number)
"""


@pytest.mark.slow
async def test_the_line_that_explains_a_failure_is_named_with_its_rank_and_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    factory = {"failing-adamw": "Failing"}
    install(packages, "acme-failing", FAILS, factory, group="megascale.optimizers")
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    kernel_log = tmp_path / "kmsg"
    kernel_log.write_text("usb 1-1: new high-speed USB device\n")
    monkeypatch.setenv("MEGASCALE_KERNEL_LOG", str(kernel_log))
    with chaos_cluster(tmp_path, "--nodes", "3") as cluster:
        async with cluster.client() as client:
            spec = cluster.job("roots", steps=40, interval_steps=10, spares=1)
            spec.trainer.optimizer.name = "failing-adamw"
            spec.trainer.optimizer.options.clear()
            async with cluster.follow(client, spec) as run:
                found = await run.until_event("LOG_ROOT_FOUND")
                node = found.subject.removeprefix("nodes/")
                root = (await client.explain("roots")).log_root
                (packages / "asked").touch()
                job = await run.until_ended()
                story = run.story()
            nodes = {one.name: one async for one in client.nodes()}
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, story
    assert (root.rank, root.node, root.category) == (1, node, "nvlink_error"), story
    assert root.line.endswith(NVLINK) and root.action == "evict_restart", story
    assert root.set_aside >= 2 and list(root.nodes) == [node], story
    assert (found.policy, found.mode, found.attempt) == ("log-root", "OBSERVE", 1), story
    assert list(job.evicted_nodes) == [], story
    schedulable = types_pb2.NODE_DISPOSITION_SCHEDULABLE
    assert {int(one.disposition) for one in nodes.values()} == {int(schedulable)}, story
    (check,) = [one for one in nodes[node].checks if one.name == "kernel_log"]
    assert int(check.verdict) == int(types_pb2.CHECK_VERDICT_PASS)
