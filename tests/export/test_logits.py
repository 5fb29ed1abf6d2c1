"""Exports compute in `transformers` what the trainer computes; imports the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.harness.exporting import (
    MODELS,
    STEP,
    job_of,
    tokens_of,
    trainer_logits,
    write_model,
)

from megascale_checkpoint.export.hugging_face import export_hugging_face
from megascale_checkpoint.export.stored import model_of, open_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.export

TOLERANCE = 1e-5  # fp32: the order of sums, and angles of rotary embedding in float32 there
LAYOUT = {"tp": 2, "dp": 2}


def quiet(done: int, total: int) -> None:
    """No progress."""


def foreign_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model that `transformers` loads from ``folder``, in float32."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_trainers_logits(name: str, tmp_path: Path) -> None:
    architecture, fields = MODELS[name]
    config = job_of(fields)
    uri = write_model(tmp_path / "written", job_of(fields, LAYOUT))
    stored = open_checkpoint(str(tmp_path / "written"))
    to = tmp_path / "exported"
    exported = export_hugging_face(
        stored, model_of(stored, None), to, "fp32", quiet, shard_bytes=50_000
    )
    assert exported.architecture.name == architecture
    assert len(list(to.glob("*.safetensors"))) > 1, "the index was not tried"
    tokens = tokens_of(config)
    ours = trainer_logits(config, uri, STEP, tokens, tmp_path / "ranks")
    theirs = foreign_logits(to, tokens)
    assert ours.std() > 0.3, "the logits are nearly constant: the comparison proves little"
    difference = (ours - theirs).abs().max().item()
    print(f"{name}: largest difference {difference:.1e} at a deviation of {ours.std():.2f}")
    assert difference <= TOLERANCE
