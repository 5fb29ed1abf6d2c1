"""A trained model goes out to Hugging Face and comes back, and a job trains on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess, megascale

from megascale.v1 import types_pb2
from megascale_client import AsyncClient, load_job

OPTIONS = ("--nodes", "1", "--devices-per-node", "4", "--device", "cpu")
STEPS = 6
LOSS_TOLERANCE = 5e-6  # float32 sums in another order; see test_trainer_equality
STANDING_STILL = 1e-12  # a learning rate that changes no float32 that matters
MODEL = {
    "layers": 3,
    "hidden_size": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 45,  # padded, and so is the vocabulary
    "vocab_size": 257,
    "sequence_length": 16,
    "block": "serial",
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "window": 7,
}
EXPERTS = {**MODEL, "experts": {"count": 6}}


async def run(
    cluster: Path, folder: Path, name: str, steps: int, rate: float, **changes: Any
) -> tuple[Any, list[types_pb2.StepRecord]]:
    """Run a job to its end; it as it ended, and its step records."""
    held_out = {"sources": [{"prefix": str(folder / "corpus")}], "interval_steps": 1, "batches": 3}
    spec = {
        "name": name,
        "trainer": {
            "model": changes["model"],
            "parallelism": changes.get("parallelism", {}),
            "training": {"steps": steps, "global_batch_size": 8, "precision": "fp32"},
            "optimizer": {"learning_rate": rate},
            "schedule": {"decay": "constant"},
            "data": {"sources": [{"prefix": str(folder / "corpus")}]},
            "evaluation": held_out,
        },
        "checkpoint": {
            "uri": str(folder / "checkpoints" / name),
            "load_uri": changes.get("load_uri", ""),
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
@pytest.mark.parametrize(
    ("model", "layout", "architecture", "up"),
    [
        (MODEL, {"tp": 2}, "MistralForCausalLM", "mlp.up_proj"),
        (
            EXPERTS,
            {"tp": 2, "dp": 2, "ep": 2},
            "MixtralForCausalLM",
            "block_sparse_moe.experts.5.w3",
        ),
    ],
    ids=["dense", "experts"],
)
async def test_a_job_trains_on_from_a_model_that_was_exported_and_imported(
    model: dict[str, Any], layout: dict[str, int], architecture: str, up: str, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus", random_documents(1, 100, 40, vocab_size=20))
    cluster, exported = tmp_path / "cluster", tmp_path / "exported"
    with UpProcess(cluster, *OPTIONS):
        job, first = await run(
            cluster, tmp_path, "first", STEPS, 3e-3, model=model, parallelism=layout
        )
        assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, job.phase_reason

        uri = str(tmp_path / "checkpoints" / "first")
        to = ("--to", str(exported), "--format", "hf", "--dtype", "fp32", "--json")
        facts = json.loads(megascale("checkpoint", "export", uri, *to).stdout)
        assert (facts["architecture"], facts["step"]) == (architecture, STEPS)
        with safe_open(exported / "model.safetensors", framework="numpy") as file:
            assert file.get_tensor(f"model.layers.0.{up}.weight").shape == (45, 32)
        back = str(tmp_path / "imported")
        command = ("checkpoint", "import", str(exported), "--format", "hf", "--to", back)
        section = yaml.safe_load(megascale(*command).stdout)  # as a user pastes it
        assert section["checkpoint"] == {"load_uri": back}

        job, second = await run(
            cluster,
            tmp_path,
            "second",
            2,
            STANDING_STILL,
            parallelism={"pp": 3},
            load_uri=back,
            model=section["trainer"]["model"],
        )
        # The same shapes, and another model: 8 heads of 4 columns.
        heads = section["trainer"]["model"] | {"heads": 8, "kv_heads": 4}
        other, records = await run(
            cluster, tmp_path, "other", 2, STANDING_STILL, load_uri=back, model=heads
        )
    assert (other.phase, records) == (types_pb2.JOB_PHASE_FAILED, [])
    assert "trainer.model.heads: 8 here and 4 in the checkpoint" in other.phase_reason
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, job.phase_reason
    assert (job.restored_step, job.restore_source) == (0, types_pb2.RESTORE_SOURCE_STORAGE)
    assert [record.step for record in second] == [1, 2]
    assert second[0].evaluation_loss == pytest.approx(first[-1].evaluation_loss, abs=LOSS_TOLERANCE)
    assert first[0].evaluation_loss - first[-1].evaluation_loss > 0.1, (
        "the model did not learn: the comparison proves little"
    )
