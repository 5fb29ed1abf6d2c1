"""A job goes on from another one's checkpoint in another layout, through the whole cluster; with
held-out data.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale

from megascale.v1 import types_pb2
from megascale_client import AsyncClient, load_job

OPTIONS = ("--nodes", "1", "--devices-per-node", "4", "--device", "cpu")
LOADED_STEP, LAST_STEP = 4, 7
TENSORBOARD = find_spec("tensorboard") is not None
LOSS_TOLERANCE = 5e-6  # float32 sums in another order; see test_trainer_equality


async def run(
    cluster: Path,
    folder: Path,
    name: str,
    steps: int,
    parallelism: dict[str, Any],
    *,
    load_uri: str = "",
    global_batch_size: int = 8,
) -> tuple[Any, list[types_pb2.StepRecord]]:
    """Run a job to its end; it as it ended, and its step records."""
    spec = {
        "name": name,
        "trainer": {
            "model": {
                "layers": 4,
                "hidden_size": 32,
                "heads": 4,
                "vocab_size": 257,
                "sequence_length": 16,
            },
            "parallelism": parallelism,
            "training": {
                "steps": steps,
                "global_batch_size": global_batch_size,
                "precision": "fp32",
            },
            "optimizer": {"learning_rate": 3e-3},
            # The learning rate of a step does not depend on the length of the run.
            "schedule": {"decay": "constant"},
            "data": {"sources": [{"prefix": str(folder / "corpus")}]},
            "evaluation": {
                "sources": [{"prefix": str(folder / "held-out")}],
                "interval_steps": 2,
                "batches": 2,
            },
            "telemetry": {"tensorboard": TENSORBOARD},
        },
        "checkpoint": {
            "uri": str(folder / "checkpoints" / name),
            "interval_steps": 100,
            "load_uri": load_uri,
        },
        "recovery": {"max_restarts": 0},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    records = []
    async with AsyncClient.from_run_folder(cluster) as client:
        await client.submit(load_job(folder / f"{name}.yaml"))
        async for update in client.watch(name):
            if update.WhichOneof("update") == "step":
                records.append(update.step)
        return await client.get(name), records


@pytest.mark.slow
async def test_another_layout_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", random_documents(1, 100, 40, vocab_size=20))
    write_corpus(tmp_path / "held-out", random_documents(2, 100, 40, vocab_size=20))
    cluster = tmp_path / "cluster"
    with UpProcess(cluster, *OPTIONS):
        job, first = await run(cluster, tmp_path, "first", LOADED_STEP, {"tp": 2, "dp": 2})
        assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, job.phase_reason
        assert job.committed_step == LOADED_STEP

        layout = {"pp": 2, "virtual_stages": 2, "dp": 2, "recompute": "selective"}
        load_uri = str(tmp_path / "checkpoints" / "first")
        job, second = await run(cluster, tmp_path, "second", LAST_STEP, layout, load_uri=load_uri)
        assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, job.phase_reason
        assert (job.restored_step, job.restore_source) == (
            LOADED_STEP,
            types_pb2.RESTORE_SOURCE_STORAGE,
        )
        assert (job.attempt, job.committed_step) == (1, LAST_STEP)

        other_batch = await run(
            cluster, tmp_path, "other-batch", LAST_STEP, {}, load_uri=load_uri, global_batch_size=4
        )
        (tmp_path / "empty").mkdir()
        nowhere = await run(
            cluster, tmp_path, "nowhere", LAST_STEP, {}, load_uri=str(tmp_path / "empty")
        )
        for (job, records), reason in (
            (other_batch, "keep the batch size"),
            (nowhere, "holds no complete checkpoint"),
        ):
            assert (job.phase, records) == (types_pb2.JOB_PHASE_FAILED, [])
            assert reason in job.phase_reason

        _, whole = await run(cluster, tmp_path, "whole", LAST_STEP, {})
        shown = megascale("watch", "whole", "--cluster", str(cluster))

    assert [record.step for record in first + second] == [record.step for record in whole]
    for ours, theirs in zip(first + second, whole, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=LOSS_TOLERANCE), ours.step
        assert ours.consumed_tokens == theirs.consumed_tokens
        assert (
            ours.HasField("evaluation_loss")
            == theirs.HasField("evaluation_loss")
            == (ours.step in (2, 4, 6, 7))
        )
        assert ours.evaluation_loss == pytest.approx(theirs.evaluation_loss, abs=LOSS_TOLERANCE)
    assert whole[0].loss - whole[-1].loss > 0.1, (
        "the model did not learn: the comparison proves little"
    )
    assert whole[1].evaluation_loss - whole[-1].evaluation_loss > 0.1
    assert shown.stdout.count("held-out loss") == 4
    jobs = [path.parents[1] for path in cluster.glob("nodes/n1/jobs/*/tensorboard/events*")]
    if TENSORBOARD:
        assert {path.name for path in jobs} >= {"first", "second", "whole"}
