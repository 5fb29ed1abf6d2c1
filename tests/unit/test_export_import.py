"""Imports without `transformers`: the checkpoint of step 0 and what is refused, by field."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tests.harness.checkpoint_files import stored_plan
from tests.harness.command_line import command
from tests.harness.exporting import MODELS, job_of, random_values, with_ep, write_model

from megascale_checkpoint.checksums import checksum
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.restore_decision import SealedStep, decide
from megascale_checkpoint.commit.verify import verify_commit
from megascale_checkpoint.export.architectures import ARCHITECTURES, choose, parameter_shapes
from megascale_checkpoint.export.foreign_config import config_values, read_config
from megascale_checkpoint.export.hugging_face import export_hugging_face, import_hugging_face
from megascale_checkpoint.export.stored import model_of, open_checkpoint
from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.storage import FileStorage, open_storage
from megascale_cli.exits import FAILED
from megascale_client import load_job
from megascale_common.service.errors import (
    DamagedError,
    ExistsError,
    NotFoundError,
    ServiceError,
)
from megascale_job.config import ExpertsConfig
from megascale_job.loading import from_accepted
from megascale_job.presets import MODELS as STARTING_MODELS
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.parameter_table import parameter_table, shard_layout
from megascale_job.wire.spec import from_proto


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a Hugging Face model."""
    return exported(tmp_path, "llama")


@pytest.fixture
def qwen3_moe(tmp_path: Path) -> Path:
    """A folder with a Hugging Face model of which all layers but the first have experts."""
    return exported(tmp_path, "qwen3-moe")


def exported(folder: Path, name: str) -> Path:
    fields = MODELS[name][1]
    write_model(folder / "written", job_of(fields, with_ep(fields, tp=2, pp=3)))
    stored = open_checkpoint(str(folder / "written"))
    export_hugging_face(stored, model_of(stored, None), folder / name, "fp32", quiet)
    return folder / name


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama3",
        "llama-yarn",
        "qwen3-yarn",
        "qwen2",
        "qwen3",
        "ministral",
        "mixtral",
        "qwen3-moe",
        "olmoe",
        "cohere",
        "phi",
        "starcoder2",
    ],
)
def test_an_import_of_an_export_is_what_was_exported(name: str, tmp_path: Path) -> None:
    fields = MODELS[name][1]
    config = job_of(fields, with_ep(fields, tp=2, pp=3))
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "fp32", quiet, 30_000)
    done = import_hugging_face(tmp_path / "out", str(tmp_path / "imported"), quiet, 100_000, 60_000)
    assert done.foreign.model == config.model
    again = open_checkpoint(str(tmp_path / "imported"))
    assert again.model == config.model
    assert len(again.manifest.files) > 1
    for parameter, values in random_values(config).items():
        expected = np.zeros_like(values) if parameter.endswith(".router.load") else values
        assert np.array_equal(again.read(parameter), expected), parameter
        assert not again.read(parameter, "exp_avg").any()


def test_the_checkpoint_of_step_0_is_complete_and_loads_into_another_layout(
    llama: Path, tmp_path: Path
) -> None:
    uri = str(tmp_path / "imported")
    done = import_hugging_face(llama, uri, quiet)
    log = CommitLog(open_storage(uri))
    log.refresh()
    (record,) = log.commits()
    assert record.step == 0
    assert verify_commit(record, done.manifest_uri) == []
    config = job_of(MODELS["llama"][1], {"tp": 2, "dp": 2})
    values = random_values(config)
    for rank in range(4):
        layout = shard_layout(parameter_table(config, rank))
        image = bytearray(layout.slot_bytes)
        filled = restore.fill(stored_plan(done.manifest_uri, 0), rank, layout, memoryview(image))
        assert filled.small_state["consumed_samples"] == 0
        assert "cpu_rng" not in filled.small_state
        some = layout.pieces[0]
        box = values[some.name][
            tuple(slice(a, b) for a, b in zip(some.start, some.stop, strict=True))
        ]
        got = np.frombuffer(image, np.float32, count=some.size_bytes // 4)
        assert np.array_equal(got, box.reshape(-1)[some.flat_start : some.flat_stop])


def test_a_job_starts_from_it(llama: Path, tmp_path: Path) -> None:
    done = import_hugging_face(llama, str(tmp_path / "imported"), quiet)
    own = CommitLog(FileStorage(tmp_path / "own"))
    decision = decide(
        own, str(tmp_path / "own"), SealedStep(0, 0), frozenset(), str(tmp_path / "imported")
    )
    xxh3 = checksum(Path(done.manifest_uri).read_bytes())
    assert decision.plan == RestorePlan(RestoreSource.STORAGE, 0, 0, done.manifest_uri, xxh3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "config.json",
            r"Hugging Face model: `megascale checkpoint import .* --format hf --to NEW`",
        ),
        (
            ".metadata",
            r"torch.distributed.checkpoint: .*`megascale checkpoint import` reads Hugging",
        ),
    ],
)
def test_a_folder_of_other_software_as_load_uri_is_named_with_what_to_do(
    name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("{}")
    own = CommitLog(FileStorage(tmp_path / "own"))
    with pytest.raises(NotFoundError, match=words):
        uri = str(tmp_path / "model")
        decide(own, str(tmp_path / "own"), SealedStep(0, 0), frozenset(), uri)


def test_the_end_token_and_the_tokenizer_go_along(llama: Path, tmp_path: Path) -> None:
    """To the job file, and to an export of the import."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    to = ("--format", "hf", "--to", str(tmp_path / "imported"))
    section = yaml.safe_load(command("checkpoint", "import", llama, *to).stdout)
    assert "data" not in section["trainer"], "there is no tokenizer"
    out = tmp_path / "out"
    shown = command("checkpoint", "export", tmp_path / "imported", "--to", out, "--format", "hf")
    assert "it has no tokenizer" in shown.stderr and "give --tokenizer FILE" in shown.stderr
    exported = json.loads((out / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (1, [2, 5])
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 5]

    words = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (llama / "tokenizer.json").write_text(json.dumps(words))
    to = ("--format", "hf", "--to", str(tmp_path / "again"))
    section = yaml.safe_load(command("checkpoint", "import", llama, *to).stdout)
    named = section["trainer"]["data"]["tokenizer"]
    sha256 = hashlib.sha256((llama / "tokenizer.json").read_bytes()).hexdigest()
    path = str(llama / "tokenizer.json")
    assert named == {"kind": "bpe", "path": path, "sha256": sha256}
    command("checkpoint", "export", tmp_path / "again", "--to", tmp_path / "o2", "--format", "hf")
    assert (tmp_path / "o2/tokenizer.json").read_text() == json.dumps(words)


def test_an_interrupted_import_is_no_checkpoint_and_can_be_repeated(
    llama: Path, tmp_path: Path
) -> None:
    uri = str(tmp_path / "imported")
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_hugging_face(llama, uri, interrupt)
    log = CommitLog(open_storage(uri))
    log.refresh()
    assert (len(log.records), log.commits()) == (1, [])
    import_hugging_face(llama, uri, quiet)
    assert open_checkpoint(uri).manifest.attempt == 2
    with pytest.raises(ExistsError, match=r"--to: .* holds a checkpoint"):
        import_hugging_face(llama, uri, quiet)


def test_a_jobs_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ExistsError, match="belongs to job job: give a folder of its own"):
        import_hugging_face(llama, str(tmp_path / "written"), quiet)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"model_type": "bert"}, "config.json: model_type: 'bert' cannot be imported; .*llama"),
    "activation": ({"hidden_act": "relu"}, "hidden_act: 'relu' where a job needs silu or swish"),
    "head": (
        {"head_dim": 32},
        r"q_proj.weight is of shape \[64, 64\], and config.json makes it \[128",
    ),
    "rope": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type: 'dynamic' .* or yarn"),
    "yarn without a first length": (
        {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": None},
        "original_max_position_embeddings: missing",
    ),
    "yarn without a factor": (
        {"rope_scaling": {**YARN, "factor": None}},
        "factor: null is not a number",
    ),
    "yarn of less": ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor: 0.5 where .* 1 or more"),
    "yarn of parts of pairs": (
        {"rope_scaling": {**YARN, "truncate": False}},
        "truncate: False where a job needs True",
    ),
    "yarn of another reader": (
        {"rope_scaling": {**YARN, "attn_factor": 2.0}},
        "attn_factor: 2.0 where a job needs 1.0",
    ),
    "yarn of zeros": (
        {"rope_scaling": {**YARN, "attention_factor": 0.0}},
        "attention_factor: 0.0 where a job needs a number above 0, or none",
    ),
    "yarn of a negative scale": (
        {"rope_scaling": {**YARN, "mscale": -20.0, "mscale_all_dim": 1.0}},
        "mscale: -20.0 where a job needs 0 or more",
    ),
    "yarn backwards": (
        {"rope_scaling": {**YARN, "beta_slow": 40}},
        "config.json: beta_fast: 32 is not above beta_slow = 40",
    ),
    "yarn of a short text": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 5}},
        "config.json: original_max_position_embeddings: no pair turns .* in 5 tokens",
    ),
    "yarn without turns": (
        {"rope_scaling": {**YARN, "beta_slow": -1}},
        "config.json: beta_slow: -1 is out of range; give a number of turns",
    ),
    "yarn of a very large factor": (
        {"rope_scaling": {**YARN, "attention_factor": 1e6}},
        "config.json: attention_factor: 1e.06 is out of range",
    ),
    "less than all": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "config.json: factor: 0.5 is out of range; give 1 or more",
    ),
    "bias": ({"mlp_bias": True}, "attention_bias, mlp_bias: .* a job has all biases or none"),
    "window": ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window: 'x' where"),
    "kinds": ({"model_type": "ministral", "layer_types": ["a"]}, "layer_types: .* 3 entries"),
    "no heads": (
        {"model_type": "mistral", "num_key_value_heads": 0},
        "num_key_value_heads: 0 is not a whole number above 0",
    ),
    "null": ({"rms_norm_eps": None}, "rms_norm_eps: null is not a number; set it to a number"),
    "null scale": (
        {"model_type": "cohere", "logit_scale": None, "layer_norm_eps": 1e-5},
        "logit_scale: null is not a number",
    ),
    "null range": ({"initializer_range": None}, "initializer_range: null is not a number"),
    "range of text": ({"initializer_range": "x"}, "initializer_range: 'x' is not a number"),
    "no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a number"),
    "a number of 400 digits": ({"rms_norm_eps": 10**400}, "rms_norm_eps: 1000.* is not a number"),
    "text of truth": ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not true"),
    "layers of another": (
        {"num_hidden_layers": 10**7},
        "num_hidden_layers: 10,000,000 layers, and the files hold 30 tensors in all",
    ),
    "rope of text": ({"rope_parameters": "abc"}, "rope_parameters: 'abc' where .*one object"),
    "rope by layers": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_parameters: .*one object for all layers",
    ),
    "two angles": (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_theta: 500000.0 and 10000.0 in the root and rope_parameters",
    ),
    "an angle that is not taken": (
        {
            "model_type": "mistral",
            "sliding_window": None,
            "rope_theta": None,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        "rope_theta: null is not a number",
    ),
    "partial": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_theta": 1e4},
        "partial_rotary_factor: 0.5 where a job needs 1.0",
    ),
    "text": ({"num_hidden_layers": "3"}, "num_hidden_layers: '3' is not a whole number above 0"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config: .*unquantized"),
    "shape": ({"intermediate_size": 91}, r"gate_proj.weight is of shape \[90, 64\]"),
    "heads": ({"num_attention_heads": 3}, "heads must be a multiple of trainer.model.kv_heads"),
    "more layers": ({"num_hidden_layers": 4}, "model.layers.3.* is missing"),
    "fewer layers": ({"num_hidden_layers": 2}, "model.layers.2.* no parameter of a job"),
}


OF_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "two numbers": (
        {"num_local_experts": 4},
        r"num_experts, num_local_experts: \[8, 4\] where a job needs one number of experts",
    ),
    "no number": ({"num_experts": None}, "num_experts: null is not a whole number above 0"),
    "dense": ({"num_experts": 0}, "num_experts: 0 is not a whole number above 0"),
    "of another": (
        {"num_experts": 1000},
        "num_experts: 2,000 experts in all layers, and the files hold 80 tensors in all",
    ),
    "more": (
        {"num_experts": 9},
        r"mlp.gate.weight is of shape \[8, 64\], and config.json makes it \[9",
    ),
    "fewer": (
        {"num_experts": 7},
        r"mlp.gate.weight is of shape \[8, 64\], and config.json makes it \[7",
    ),
    "chosen": ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 where .*at most num_experts, 8"),
    "width": ({"moe_intermediate_size": 41}, r"gate_proj.weight is of shape \[40, 64\]"),
    "every other": ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2 where a job needs 1"),
    "a later dense layer": (
        {"mlp_only_layers": [1]},
        r"mlp_only_layers: \[1\] where a job needs the first layers, such as \[0, 1\], or none",
    ),
    "dense layers of text": ({"mlp_only_layers": "0"}, "mlp_only_layers: '0' where a job needs"),
    "dense layers alone": (
        {"mlp_only_layers": [2, 1, 0]},
        r"mlp_only_layers: \[2, 1, 0\] where a job needs fewer than 3 layers",
    ),
    "weights of text": ({"norm_topk_prob": "yes"}, "norm_topk_prob: 'yes' is not true or false"),
    "negative balance": ({"router_aux_loss_coef": -1}, "router_aux_loss_coef: -1.0 where .*0 or"),
    "window": ({"use_sliding_window": True}, "use_sliding_window: True where a job needs False"),
    "noise": (
        {"model_type": "mixtral", "router_jitter_noise": 0.1, "num_local_experts": 8},
        "router_jitter_noise: 0.1 where a job needs 0.0",
    ),
    "clipped q, k and v": (
        {"model_type": "olmoe", "clip_qkv": 8.0},
        "clip_qkv: 8.0 where a job needs null",
    ),
    "biases of q, k and v": (
        {"model_type": "olmoe", "attention_bias": True},
        "attention_bias: True where a job needs False",
    ),
    "heads of another width": (
        {"model_type": "olmoe"},
        "head_dim: 24 where a job needs hidden_size / heads, 64/4",
    ),
    "a norm after each part": (
        {"model_type": "olmo2"},
        "model_type: 'olmo2' cannot be imported; give a model of one of these: .*, olmoe, ",
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_that_no_job_computes_are_refused_by_field(
    name: str, qwen3_moe: Path, tmp_path: Path
) -> None:
    changed, words = OF_EXPERTS[name]
    config = json.loads((qwen3_moe / "config.json").read_text()) | changed
    (qwen3_moe / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServiceError, match=words):
        import_hugging_face(qwen3_moe, str(tmp_path / "imported"), quiet)
    assert not (tmp_path / "imported").exists()


def test_merged_experts_are_read_as_separate_ones_are(qwen3_moe: Path, tmp_path: Path) -> None:
    """Version 5 of transformers can save them merged, in the order of a job."""
    import_hugging_face(qwen3_moe, str(tmp_path / "separate"), quiet)
    for tensors in rewritten(qwen3_moe):
        for layer in (1, 2):
            prefix = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                [tensors.pop(f"{prefix}{expert}.{each}_proj.weight") for expert in range(8)]
                for each in ("gate", "up", "down")
            )
            merged = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
            tensors[f"{prefix}gate_up_proj"] = np.stack(merged)
            tensors[f"{prefix}down_proj"] = np.stack(down)
    import_hugging_face(qwen3_moe, str(tmp_path / "merged"), quiet, part_bytes=60_000)
    one, other = (open_checkpoint(str(tmp_path / each)) for each in ("separate", "merged"))
    assert one.model == other.model
    for parameter in one.shapes:
        assert np.array_equal(one.read(parameter), other.read(parameter)), parameter
    for tensors in rewritten(qwen3_moe):
        del tensors["model.layers.2.mlp.experts.down_proj"]
    with pytest.raises(DamagedError, match=r"layers.2.mlp.experts.down_proj is missing"):
        import_hugging_face(qwen3_moe, str(tmp_path / "damaged"), quiet)


def test_a_model_with_experts_starts_a_job_with_their_balance(
    qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((qwen3_moe / "config.json").read_text())
    assert config["router_aux_loss_coef"] == 0.001, "that of transformers: a job's is not known"
    (qwen3_moe / "config.json").write_text(json.dumps({**config, "router_aux_loss_coef": 0.02}))
    to = ("--format", "hf", "--to", str(tmp_path / "imported"))
    trainer = yaml.safe_load(command("checkpoint", "import", qwen3_moe, *to).stdout)["trainer"]
    assert trainer["loss"] == {"global_balance": 0.02}
    assert trainer["model"]["experts"] == {
        "count": 8,
        "top_k": 3,
        "ffn_size": 40,
        "dense_layers": 1,
    }
    monkeypatch.chdir(tmp_path)
    written = command("init", "--from-hf", qwen3_moe, "--output", "mine.yaml")
    assert written.status == 0, written.text
    found = from_proto(load_job(tmp_path / "mine.yaml"))
    assert found.model == job_of(MODELS["qwen3-moe"][1]).model
    assert found.loss.global_balance == 0.02
    (qwen3_moe / "config.json").write_text(json.dumps({**config, "router_aux_loss_coef": 0.0}))
    to = ("--format", "hf", "--to", str(tmp_path / "without"))
    trainer = yaml.safe_load(command("checkpoint", "import", qwen3_moe, *to).stdout)["trainer"]
    assert "loss" not in trainer


# Published config.json, without ids of tokens.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_with_experts_is_the_published_model(name: str) -> None:
    preset = STARTING_MODELS[name]
    read = read_config(PUBLISHED[name], head_stored=True)
    expected = from_accepted({"name": "model", "trainer": preset.sections}).model
    assert replace(read.model, sequence_length=expected.sequence_length) == expected
    assert read.global_balance == preset.loss["global_balance"]


# As published with OLMoE-1B-7B-0924; it has no preset.
OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}


def test_the_published_olmoe_is_read_with_its_size() -> None:
    read = read_config(OLMOE, head_stored=True)
    model = read.model
    assert (model.qk_norm, model.qk_norm_over) == (True, "projection")
    assert model.experts == ExpertsConfig(count=64, top_k=8, normalise=False)
    assert (model.expert_width, read.global_balance) == (1024, 0.01)
    shapes = parameter_shapes(model)
    assert shapes["layers.15.k_norm.weight"] == (2048,)
    stored = [shape for name, shape in shapes.items() if not name.endswith(".router.load")]
    assert sum(map(math.prod, stored)) == 6_919_161_856


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_no_job_computes_is_refused_by_field(
    name: str, llama: Path, tmp_path: Path
) -> None:
    changed, words = CHANGES[name]
    config = json.loads((llama / "config.json").read_text()) | changed
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServiceError, match=words):
        import_hugging_face(llama, str(tmp_path / "imported"), quiet)
    assert not (tmp_path / "imported").exists()


def rewritten(folder: Path) -> Iterator[dict[str, Any]]:
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


def test_pickled_damaged_and_foreign_files_are_refused(llama: Path, tmp_path: Path) -> None:
    uri, file = str(tmp_path / "imported"), llama / "model.safetensors"
    whole = file.read_bytes()
    for damaged, words in (
        (whole[:-1], "does not lie in the file"),
        (whole[:5], "is not a safetensors file"),
        (b"\xff" * 8 + whole[8:], "is not a safetensors file"),
        (whole[:8] + b"}" + whole[9:], "is not JSON"),
        ((400_000).to_bytes(8, "little") + b"[" * 400_000, "is JSON nested deeper"),
        ((2).to_bytes(8, "little") + b"[]", "is not a JSON object"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "its safetensors header cannot be read"),
        ((17 << 20).to_bytes(8, "little") + bytes(17 << 20), "has a header of 17825792 bytes"),
        (whole.replace(b'"F32"', b'"I32"'), "of type .I32"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ServiceError, match=words):
            import_hugging_face(llama, uri, quiet)
    file.rename(llama / "pytorch_model.bin")
    with pytest.raises(ServiceError, match="pickled weights, which are never loaded"):
        import_hugging_face(llama, uri, quiet)
    index = {"weight_map": {"a": "../written/x"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ServiceError, match="not in the folder"):
        import_hugging_face(llama, uri, quiet)
    assert not (tmp_path / "imported").exists()


def test_the_help_of_import_names_what_it_reads() -> None:
    text = command("checkpoint", "import", "--help").stdout
    for each in ARCHITECTURES:
        series = each.name.removesuffix("ForCausalLM").lower()
        assert series in re.sub(r"qwen 2 and 3", "qwen2 qwen3", text.lower()), each.name


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_without_end_is_refused_by_file(name: str, llama: Path, tmp_path: Path) -> None:
    (llama / name).write_bytes(b"[" * 200_000 + b"]" * 200_000)
    answer = command("checkpoint", "import", llama, "--format", "hf", "--to", tmp_path / "imported")
    assert answer.status == FAILED and f"{llama / name}: is JSON nested" in answer.stderr
    with (llama / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ServiceError, match=f"{name}: has 1099511627776 bytes, and at most"):
        import_hugging_face(llama, str(tmp_path / "imported"), quiet)


@pytest.mark.parametrize(
    ("given", "factor", "theta"),
    [
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            4.0,
            1e4,
        ),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 7e4}, "rope_theta": 7e4}, 1, 7e4),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7e4}, "rope_theta": 7e4}, 1, 7e4),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e4}, 2.0, 7e4),
    ],
)
def test_two_spellings_of_rotary_embedding_are_resolved_as_transformers_does(
    given: dict[str, Any], factor: float, theta: float, llama: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        config.pop(name, None)
    found = read_config({**config, **given}, head_stored=True).model
    assert (found.rope_scaling.factor, found.rope_theta) == (factor, theta)
    assert found.rope_scaling.kind == ("linear" if factor > 1 else "none")


@pytest.mark.parametrize(
    ("given", "betas", "factor", "scale"),
    [
        # As Qwen publishes it, and with the fields that stand for the same.
        ({}, (32.0, 1.0), 0.0, 1.1386294361),
        ({"beta_fast": None, "beta_slow": 0, "mscale": 1.0}, (32.0, 1.0), 0.0, 1.1386294361),
        ({"truncate": True, "attn_factor": 1, "finetuned": True}, (32.0, 1.0), 0.0, 1.1386294361),
        ({"beta_fast": 24, "attention_factor": 1.5, "mscale": 2}, (24.0, 1.0), 1.5, 1.5),
        # As DeepSeek's.
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, (32.0, 1.0), 1.0, 1.0),
        ({"mscale": 2, "mscale_all_dim": 1}, (32.0, 1.0), 1.1217505876, 1.1217505876),
        ({"mscale": 2, "mscale_all_dim": 0}, (32.0, 1.0), 0.0, 1.1386294361),
    ],
)
def test_yarn_is_read_as_transformers_does(
    given: dict[str, Any],
    betas: tuple[float, float],
    factor: float,
    scale: float,
    llama: Path,
) -> None:
    config = json.loads((llama / "config.json").read_text())
    found = read_config({**config, "rope_scaling": {**YARN, **given}}, head_stored=True).model
    scaling = found.rope_scaling
    assert (scaling.kind, scaling.factor) == ("yarn", 4.0)
    assert scaling.original_sequence_length == 32768
    assert (scaling.beta_fast, scaling.beta_slow) == betas
    assert (scaling.attention_factor, scaling.rotated_scale) == pytest.approx((factor, scale))


def test_yarn_is_written_as_published_and_its_own_factor_only_if_it_has_one() -> None:
    model = job_of(MODELS["qwen3-yarn"][1]).model
    values = config_values(choose(model), model, "fp32")
    expected = {
        "rope_type": "yarn",
        "rope_theta": 200.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
    }
    assert values["rope_scaling"] == values["rope_parameters"] == expected
    own = replace(model, rope_scaling=replace(model.rope_scaling, attention_factor=1.25))
    assert config_values(choose(own), own, "fp32")["rope_scaling"]["attention_factor"] == 1.25


def test_an_import_shows_fields_of_yarn_only_for_yarn(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    for name, change in (("plain", {}), ("yarn", {"rope_scaling": {**YARN, "factor": 2.0}})):
        (llama / "config.json").write_text(json.dumps({**config, **change}))
        to = tmp_path / name
        answer = command("checkpoint", "import", llama, "--format", "hf", "--to", to, "--json")
        shown = json.loads(answer.stdout)["model"]["rope_scaling"]
        assert shown["kind"] == ("yarn" if change else "none")
        assert {"beta_fast", "beta_slow", "attention_factor"} <= shown.keys() or not change
        assert open_checkpoint(str(to)).manifest.small_state["model"]["rope_scaling"] == shown
        assert len(shown) == (8 if change else 5)


def test_a_head_of_its_own_in_a_tied_model_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    uri = str(tmp_path / "imported")
    with pytest.raises(ServiceError, match=r"tie_word_embeddings: .*lm_head.weight of its own"):
        import_hugging_face(llama, uri, quiet)
    for tensors in rewritten(llama):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert import_hugging_face(llama, uri, quiet).foreign.model.tie_embeddings


def test_values_without_a_place_in_a_job_are_refused(tmp_path: Path) -> None:
    config = job_of(MODELS["phi"][1])
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    folder = tmp_path / "phi"
    export_hugging_face(stored, model_of(stored, None), folder, "fp32", quiet)
    for tensors in rewritten(folder):
        assert not tensors["lm_head.bias"].any()
        tensors["lm_head.bias"][3] = 1.0
    with pytest.raises(ServiceError, match=r"lm_head.bias: holds values; a job has no such"):
        import_hugging_face(folder, str(tmp_path / "imported"), quiet)


def test_types_of_two_bytes_are_widened_exactly(llama: Path, tmp_path: Path) -> None:
    for tensors in rewritten(llama):
        for name, values in tensors.items():
            tensors[name] = values.astype(np.float16)
    import_hugging_face(llama, str(tmp_path / "imported"), quiet)
    got = open_checkpoint(str(tmp_path / "imported")).read("head.weight")
    values = random_values(job_of(MODELS["llama"][1]))["head.weight"]
    assert np.array_equal(got, values.astype(np.float16).astype(np.float32))


NOT_NORMALISED = ExpertsConfig(count=6, top_k=3, normalise=False)


@pytest.mark.parametrize(
    ("model_type", "left_out", "found"),
    [
        ("llama", ["num_key_value_heads"], {"kv_heads": 4}),
        ("llama", ["rope_theta", "rope_parameters"], {"rope_theta": 10_000.0}),
        ("llama", ["attention_bias", "mlp_bias", "hidden_act", "head_dim"], {"bias": False}),
        ("mistral", ["sliding_window"], {"window": 4096}),
        ("ministral", ["sliding_window", "layer_types"], {"window": 4096}),
        ("starcoder2", ["use_bias", "sliding_window"], {"bias": True, "window": 0}),
        (
            "mixtral",
            ["rope_theta", "rope_parameters", "router_jitter_noise", "sliding_window", "head_dim"],
            {"rope_theta": 1e6, "window": 0},
        ),
        ("qwen3-moe-not-normalised", ["norm_topk_prob", "mlp_only_layers", "head_dim"], {}),
        (
            "olmoe",
            [
                *("norm_topk_prob", "clip_qkv", "attention_bias", "head_dim"),
                *("rope_theta", "rope_parameters", "num_key_value_heads"),
            ],
            {"kv_heads": 4, "rope_theta": 10_000.0, "experts": NOT_NORMALISED},
        ),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    model_type: str, left_out: list[str], found: dict[str, Any]
) -> None:
    model = job_of(MODELS[model_type][1]).model
    values = config_values(choose(model), model, "fp32")
    for name in left_out:
        values.pop(name, None)
    read = read_config(values, head_stored=True).model
    assert {name: getattr(read, name) for name in found} == found


def test_the_model_of_a_job_is_in_its_values() -> None:
    model = job_of(MODELS["ministral"][1]).model
    assert json.loads(json.dumps(asdict(model)))["layer_windows"] == [5, 0, 5]


def test_init_writes_the_job_of_a_model_and_imports_its_weights(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = command("init", "--from-hf", llama, "--output", "mine.yaml")
    assert written.status == 0, written.text
    spec = load_job(tmp_path / "mine.yaml")
    stored = open_checkpoint(spec.checkpoint.load_uri)
    assert (stored.manifest.step, stored.model) == (0, job_of(MODELS["llama"][1]).model)
    assert from_proto(spec).model == stored.model
    assert spec.trainer.data.tokenizer.path == str(llama / "tokenizer.json")
    again = command("init", "--from-hf", llama, "--output", "mine.yaml")
    assert again.status == 2 and "mine.yaml exists already; add --overwrite" in again.text
    again = command("init", "--from-hf", llama, "--output", "mine.yaml", "--overwrite")
    assert again.status == 2 and "holds a checkpoint" in again.text
    for folder, words in ((tmp_path / "none", "is not a folder"), (tmp_path, "no safetensors")):
        refused = command("init", "--from-hf", folder, "--output", "other.yaml")
        assert refused.status == 2 and words in refused.text
        assert not (tmp_path / "other.yaml").exists()
    assert "give --output FILE" in command("init", "--from-hf", llama, "--output", "-").text
