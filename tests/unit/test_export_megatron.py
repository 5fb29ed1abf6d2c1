"""Exports to Megatron-core compute what the trainer computes, for each layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.harness.exporting import (
    LLAMA,
    MODELS,
    OVER_PROJECTION,
    SIZES,
    STEP,
    job_of,
    tokens_of,
    trainer_logits,
    write_model,
)
from tests.harness.megatron_model import MegatronFiles
from typer.testing import CliRunner

from megascale_checkpoint.commands.app import app
from megascale_checkpoint.export.hugging_face import export_hugging_face, import_hugging_face
from megascale_checkpoint.export.megatron import export_megatron
from megascale_checkpoint.export.megatron_layout import Cut
from megascale_checkpoint.export.stored import model_of, open_checkpoint
from megascale_common.service.errors import DamagedError, ExistsError, RequestError

TOLERANCE = 1e-5  # fp32: the order of sums
SERIAL_GELU: dict[str, Any] = {**SIZES, "block": "serial", "mlp": "gelu", "norm": "layernorm"}
WHOLE: dict[str, dict[str, Any]] = {
    "llama": MODELS["llama"][1],
    "llama-3.1": {**LLAMA, "rope_theta": 50.0, "rope_scaling": {"kind": "llama3", "factor": 8.0}},
    "tied": {**LLAMA, "tie_embeddings": True},
    "qwen-3": {**LLAMA, "attention_bias": True, "qk_norm": True, "head_dim": 20},
    "without-groups": {**LLAMA, "kv_heads": 4, "bias": True},
    "gpt": {**SERIAL_GELU, "bias": True},
    "norms-without-biases": {**SERIAL_GELU, "bias": True, "norm_bias": False},
}


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.mark.parametrize("cut", [Cut(), Cut(tp=2), Cut(pp=3), Cut(2, 3)], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_an_export_has_the_trainers_logits(name: str, cut: Cut, tmp_path: Path) -> None:
    config = job_of(WHOLE[name])
    uri = write_model(tmp_path / "written", job_of(WHOLE[name], {"tp": 2, "dp": 2}))
    stored = open_checkpoint(str(tmp_path / "written"))
    seen: list[tuple[int, int]] = []
    size = export_megatron(
        stored, config.model, tmp_path / "out", "fp32", cut, lambda *each: seen.append(each)
    )
    files = MegatronFiles(tmp_path / "out")
    assert size == sum(
        each.nbytes for ranks in files.stages for rank in ranks for each in rank.values()
    )
    (done, total), whole = seen[-1], stored.size_bytes(("master",))
    again = name == "tied" and cut.pp > 1  # the last stage has a copy
    assert done == total == whole + again * 4 * 101 * 64, "each parameter is read once"
    for file in (file for ranks in files.files for file in ranks):
        assert (file["iteration"], file["checkpoint_version"]) == (STEP, 3.0)
    tokens = tokens_of(config)
    found = files.logits(tokens)[..., : config.model.vocab_size]
    expected = trainer_logits(config, uri, STEP, tokens, tmp_path / "trainer")
    assert float(expected.abs().max()) > 0.5, "near zero everything is equal"
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_vocabulary_is_padded_as_megatron_does(tmp_path: Path) -> None:
    config = job_of(LLAMA)
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    export_megatron(stored, config.model, tmp_path / "out", "bf16", Cut(tp=2), quiet)
    files = MegatronFiles(tmp_path / "out")
    args, rows = files.args, stored.read("embedding.weight")
    assert (args.vocab_size, args.padded_vocab_size, args.bf16) == (101, 256, True)
    assert args.params_dtype is torch.bfloat16 and args.consumed_train_samples == 8 * STEP
    whole = torch.cat([rank["embedding.word_embeddings.weight"] for rank in files.stages[0]])
    assert whole.dtype is torch.bfloat16
    assert torch.equal(whole[:101], torch.from_numpy(rows).bfloat16())
    assert torch.equal(whole[101:], whole[100:101].expand(155, -1))


@pytest.mark.parametrize("pp", [1, 3])
def test_a_head_that_is_the_embedding_is_tied(pp: int, tmp_path: Path) -> None:
    """As of an imported model whose head was tied: it goes out to both formats as it came."""
    folder, config = tied_model(tmp_path), job_of({**LLAMA, "tie_embeddings": True})
    imported = import_hugging_face(folder, str(tmp_path / "imported"), quiet)
    assert imported.foreign.model == config.model
    stored = open_checkpoint(str(tmp_path / "imported"))
    assert "head.weight" not in stored.shapes
    export_megatron(stored, config.model, tmp_path / "out", "fp32", Cut(pp=pp), quiet)
    files = MegatronFiles(tmp_path / "out")
    assert (tmp_path / "out" / "release").is_dir(), "a model of no step"
    assert not files.args.untie_embeddings_and_output_weights
    # With one stage there is no second tensor; a last stage of several has a copy.
    assert ("output_layer.weight" in files.stages[-1][0]) == (pp > 1)
    tokens = tokens_of(config)
    found = files.logits(tokens)[..., :101]
    expected = trainer_logits(config, imported.manifest_uri, 0, tokens, tmp_path / "trainer")
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    export_hugging_face(stored, config.model, tmp_path / "again", "fp32", quiet)
    again = import_hugging_face(tmp_path / "again", str(tmp_path / "imported again"), quiet)
    assert again.foreign.model == config.model
    for name in stored.shapes:
        other = open_checkpoint(str(tmp_path / "imported again")).read(name)
        assert other.tobytes() == stored.read(name).tobytes(), name


def tied_model(tmp_path: Path) -> Path:
    """A Hugging Face folder whose config.json ties the head, without a tensor for it."""
    write_model(tmp_path / "untied", job_of(LLAMA))
    stored = open_checkpoint(str(tmp_path / "untied"))
    folder = tmp_path / "hf"
    export_hugging_face(stored, model_of(stored, None), folder, "fp32", quiet)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "cut", "words"),
    [
        ({"block": "parallel"}, Cut(), "trainer.model.block: parallel, .* needs serial; .*hf or"),
        ({"window": 5}, Cut(), "trainer.model.window: 5"),
        (
            {"experts": {"count": 4}},
            Cut(),
            "trainer.model.experts.count: 4, .* needs 0: dense models alone; export with .*hf or",
        ),
        ({"layer_windows": [5, 0, 5]}, Cut(), "trainer.model.layer_windows: 5"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}}, Cut(), "rope_scaling: linear"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}},
            Cut(),
            "rope_scaling: yarn, .* needs llama3 as published",
        ),
        (OVER_PROJECTION, Cut(), "trainer.model.qk_norm_over: projection, .* needs heads; .*hf or"),
        ({"mlp": "gelu"}, Cut(), "trainer.model.mlp: gelu without biases"),
        ({}, Cut(tp=4), "--tp: 4 does not divide 2 key/value heads.*give a divisor"),
        ({"kv_heads": 4}, Cut(tp=4), "--tp: 4 does not divide 90 ffn width"),
        ({}, Cut(pp=2), "--pp: 2 does not divide 3 layers"),
    ],
)
def test_what_megatron_cannot_hold_is_refused_by_field(
    change: dict[str, Any], cut: Cut, words: str, tmp_path: Path
) -> None:
    config = job_of({**LLAMA, **change})
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    with pytest.raises(RequestError, match=words) as caught:
        export_megatron(stored, config.model, tmp_path / "out", "bf16", cut, quiet)
    assert caught.value.fields
    assert not (tmp_path / "out").exists()


def test_the_command_writes_it_once_and_damage_leaves_no_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "written", job_of(LLAMA))
    arguments = ["export", str(tmp_path / "written"), "--to", str(tmp_path / "out")]
    arguments += ["--format", "megatron", "--tp", "2", "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert '"architecture": "Megatron-core GPT, tp 2, pp 1"' in shown.stdout
    assert MegatronFiles(tmp_path / "out").args.bf16
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ExistsError)
    (file,) = (tmp_path / "written").glob("attempts/*/*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 100] ^= 1  # behind the header: a parameter
    file.write_bytes(data)
    stored = open_checkpoint(str(tmp_path / "written"))
    with pytest.raises(DamagedError, match="fails its checksum"):
        export_megatron(stored, job_of(LLAMA).model, tmp_path / "x", "bf16", Cut(), quiet)
    assert not (tmp_path / "x").exists()
