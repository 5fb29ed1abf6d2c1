"""Exports compute in `transformers` what the trainer computes; imports the other way round."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.harness.exporting import (
    MODELS,
    STEP,
    job_of,
    tokens_of,
    trainer_logits,
    with_ep,
    write_model,
)

from megascale_checkpoint.export.architectures import choose
from megascale_checkpoint.export.foreign_config import config_values
from megascale_checkpoint.export.hugging_face import export_hugging_face, import_hugging_face
from megascale_checkpoint.export.stored import model_of, open_checkpoint
from megascale_job.config import ModelConfig

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.export

TOLERANCE = 1e-5  # fp32: the order of sums, and angles of rotary embedding in float32 there
LAYOUT = {"tp": 2, "dp": 2}


def quiet(done: int, total: int) -> None:
    """No progress."""


def foreign_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model that `transformers` loads from ``folder``, in float32."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        experts_implementation="eager",  # its grouped products need widths of whole 16 bytes
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_trainers_logits(name: str, tmp_path: Path) -> None:
    architecture, fields = MODELS[name]
    config = job_of(fields)
    uri = write_model(tmp_path / "written", job_of(fields, with_ep(fields, **LAYOUT)))
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


def foreign_model(name: str, folder: Path, *, merged: bool = False, **changes: Any) -> ModelConfig:
    """Save a model of `transformers` with random weights into ``folder``; the job's model.

    ``merged``: with the experts of a layer as one tensor per matrix.
    """
    _, fields = MODELS[name]
    model = job_of(fields).model
    values = config_values(choose(model), model, "fp32") | changes
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(11)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "norm" not in parameter_name and parameter_name != "lm_head.bias":
                parameter.normal_(std=0.12)
    made.save_pretrained(folder, max_shard_size="100KB", save_original_format=not merged)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_an_import_has_the_foreign_models_logits(name: str, tmp_path: Path) -> None:
    model = foreign_model(name, tmp_path / "foreign")
    done = import_hugging_face(tmp_path / "foreign", str(tmp_path / "imported"), quiet)
    if name == "phi-without-biases":  # Phi has them always
        model = replace(model, bias=True, norm_bias=True)
    assert done.foreign.model == model
    config = job_of(asdict(done.foreign.model))
    tokens = tokens_of(config)
    ours = trainer_logits(config, done.manifest_uri, 0, tokens, tmp_path / "ranks")
    theirs = foreign_logits(tmp_path / "foreign", tokens)
    assert ours.std() > 0.3
    difference = (ours - theirs).abs().max().item()
    print(f"{name}: largest difference {difference:.1e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_merged_experts_are_imported_as_separate_ones(name: str, tmp_path: Path) -> None:
    for merged in (False, True):
        folder, to = tmp_path / f"foreign {merged}", tmp_path / f"imported {merged}"
        foreign_model(name, folder, merged=merged)
        names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in names) == merged
        import_hugging_face(folder, str(to), quiet)
    one, other = (open_checkpoint(str(tmp_path / f"imported {each}")) for each in (False, True))
    for parameter in one.shapes:
        assert np.array_equal(one.read(parameter), other.read(parameter)), parameter


def test_a_tied_and_scaled_head_is_imported_as_a_head_of_its_own(tmp_path: Path) -> None:
    foreign_model("cohere", tmp_path / "foreign", tie_word_embeddings=True, logit_scale=0.0625)
    done = import_hugging_face(tmp_path / "foreign", str(tmp_path / "imported"), quiet)
    assert (done.foreign.copied, done.foreign.head_scale) == (True, 0.0625)
    config = job_of(asdict(done.foreign.model))
    tokens = tokens_of(config)
    ours = trainer_logits(config, done.manifest_uri, 0, tokens, tmp_path / "ranks")
    theirs = foreign_logits(tmp_path / "foreign", tokens)
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert theirs.std() > 0.02


def test_a_bf16_export_is_loaded_in_bf16_and_generates(tmp_path: Path) -> None:
    _, fields = MODELS["llama"]
    write_model(tmp_path / "written", job_of(fields, LAYOUT))
    stored = open_checkpoint(str(tmp_path / "written"))
    export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "bf16", quiet)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype is torch.bfloat16
    embedding = torch.from_numpy(stored.read("embedding.weight"))
    assert torch.equal(model.get_input_embeddings().weight, embedding.bfloat16())
    tokens = tokens_of(job_of(fields), batch=1)[:, :5]
    texts = [model.generate(tokens, max_new_tokens=12, do_sample=False) for _ in range(2)]
    assert texts[0].shape == (1, 17), "a token ended the text, and the job knows no such token"
    assert torch.equal(texts[0], texts[1])
