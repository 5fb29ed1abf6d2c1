"""Exports without `transformers`: what fits which architecture, values, files, memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.harness.checkpoint_files import STATES
from tests.harness.exporting import (
    MODELS,
    OVER_PROJECTION,
    SIZES,
    STEP,
    job_of,
    random_values,
    with_ep,
    write_model,
)
from tests.harness.training import tiny_job
from tests.harness.waiting import until
from typer.testing import CliRunner, Result

from megascale_checkpoint.checksums import dump_record
from megascale_checkpoint.commands.app import app
from megascale_checkpoint.export.architectures import (
    ARCHITECTURES,
    choose,
    misfits,
    parameter_shapes,
    transfers,
)
from megascale_checkpoint.export.foreign_config import config_values, read_config
from megascale_checkpoint.export.hugging_face import export_hugging_face, import_hugging_face
from megascale_checkpoint.export.output import new_folder
from megascale_checkpoint.export.stored import model_of, open_checkpoint
from megascale_checkpoint.export.tokenizer_files import tokenizer_files
from megascale_checkpoint.export.values import narrow, to_foreign, to_logical, widen
from megascale_common.service.errors import (
    DamagedError,
    ExistsError,
    NotFoundError,
    RequestError,
    ServiceError,
)
from megascale_job.corpus_record import CorpusRecord, record_path
from megascale_job.sizes import read_plan

MOE = {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm"}


def quiet(done: int, total: int) -> None:
    """No progress."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_exported_as_its_architecture_and_read_back(name: str) -> None:
    architecture, fields = MODELS[name]
    model = job_of(fields).model
    chosen = choose(model)
    assert chosen.name == architecture
    values = json.loads(json.dumps(config_values(chosen, model, "bf16")))
    found = read_config(values, head_stored=True)
    if name == "phi-without-biases":  # Phi has them always: as zeros
        model = replace(model, bias=True, norm_bias=True)
    assert (found.model, found.head_scale, found.copied) == (model, 1.0, False)
    # Every parameter is exactly one tensor, and each tensor of the same size.
    listed = [each for each in transfers(chosen, model) if each.logical]
    shapes = {
        each: shape
        for each, shape in parameter_shapes(model).items()
        if not each.endswith(".router.load")  # counts of choices
    }
    assert {each.logical for each in listed} == set(shapes)
    assert len({each.foreign for each in listed}) == len(listed)
    assert sum(each.elements for each in listed) == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"positions": "learned"}, "trainer.model.positions: learned, .* needs rope"),
        (
            {"block": "parallel", "mlp": "swiglu", "norm": "rmsnorm"},
            "trainer.model.norm: rmsnorm, .*StableLm.* needs layernorm",
        ),
        (
            {"block": "parallel", "mlp": "swiglu", "bias": True, "norm_bias": False},
            "trainer.model.bias: true, .*StableLm.* needs false",
        ),
        ({"block": "parallel", "window": 4}, "trainer.model.window: 4, .*Phi.* needs 0"),
        (
            {"block": "serial", "mlp": "gelu", "layer_windows": [4, 0, 4]},
            "trainer.model.layer_windows: .* one window for all layers",
        ),
        (
            {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm", "layer_windows": [4, 2, 4]},
            "trainer.model.layer_windows: .* one window, or 0, for each layer",
        ),
        (
            {**MOE, "experts": {"count": 4, "bias_rate": 0.001}},
            "trainer.model.experts.bias_rate: 0.001, .*Mixtral.* needs 0.0",
        ),
        (
            {**MOE, "experts": {"count": 4, "shared_ffn_size": 32}},
            "trainer.model.experts.shared_ffn_size: 32, .*Mixtral.* needs 0",
        ),
        (
            {**MOE, "window": 4, "experts": {"count": 4, "normalise": False}},
            "trainer.model.experts.normalise: false, .*Mixtral.* needs true",
        ),
        (
            {**MOE, "qk_norm": True, "experts": {"count": 4, "score": "sigmoid", "scale": 2.5}},
            "trainer.model.experts.score: sigmoid, .*Qwen3Moe.* needs softmax; .*scale: 2.5",
        ),
        (
            {**MOE, **OVER_PROJECTION},
            "trainer.model.qk_norm_over: projection, .*Qwen3For.* needs heads",
        ),
        (
            {**MOE, **OVER_PROJECTION, "experts": {"count": 4, "dense_layers": 1}},
            "trainer.model.experts.dense_layers: 1, .*Olmoe.* needs 0",
        ),
        (
            {**MOE, "experts": {"count": 4, "groups": 2}},
            "trainer.model.experts.groups: 2, .*Mixtral.* needs 1",
        ),
    ],
)
def test_a_model_that_no_architecture_holds_is_refused_by_field(
    fields: dict[str, Any], words: str
) -> None:
    model = job_of({**SIZES, **fields}).model
    with pytest.raises(RequestError, match=f"{words}.*--format dcp") as caught:
        choose(model)
    assert caught.value.fields[0][0] == words.partition(":")[0]
    assert all(misfits(each, model) for each in ARCHITECTURES)


@given(st.lists(st.floats(width=32), min_size=1))
def test_bf16_is_rounded_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = torch.from_numpy(values).bfloat16()
    got = torch.frombuffer(bytearray(narrow(values, "BF16")), dtype=torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    back = widen(narrow(values, "BF16"), "BF16")
    assert np.array_equal(back, expected.float().numpy(), equal_nan=True)


def test_pairs_and_transposition_are_undone() -> None:
    values = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    for change in ("none", "transposed", "pairs"):
        there = to_foreign(values, change, 8)
        assert np.array_equal(to_logical(there, change, 8), values)
    # The first head: row 1 is the partner of row 0, which is row 4 of a job.
    assert to_foreign(values, "pairs", 8)[:, 0].tolist()[:4] == [0, 12, 3, 15]


def test_padding_is_dropped_and_every_value_is_there(tmp_path: Path) -> None:
    config = job_of(MODELS["cohere"][1], {"tp": 2, "pp": 3, "dp": 2})
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    assert stored.states == STATES
    seen: list[tuple[int, int]] = []
    done = export_hugging_face(
        stored, model_of(stored, None), tmp_path / "out", "fp32", lambda *now: seen.append(now)
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    values = random_values(config)
    assert np.array_equal(tensors["lm_head.weight"], values["head.weight"])
    assert tensors["lm_head.weight"].shape == (101, 64)
    assert np.array_equal(
        tensors["model.layers.2.mlp.down_proj.weight"], values["layers.2.ffn_out.weight"].T
    )
    assert done.tensors == len(tensors) == len(values)
    total = sum(each.nbytes for each in values.values())
    assert seen[-1] == (total, total)
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


@pytest.mark.parametrize(
    ("name", "router", "matrices"),
    [
        ("mixtral", "block_sparse_moe.gate", ("block_sparse_moe.experts.{}.w{}", "1", "3", "2")),
        ("qwen3-moe", "mlp.gate", ("mlp.experts.{}.{}_proj", "gate", "up", "down")),
        ("olmoe", "mlp.gate", ("mlp.experts.{}.{}_proj", "gate", "up", "down")),
    ],
)
def test_every_expert_has_tensors_of_its_own(
    name: str, router: str, matrices: tuple[str, str, str, str], tmp_path: Path
) -> None:
    fields = MODELS[name][1]
    config = job_of(fields, with_ep(fields, tp=2, dp=2, pp=3))
    write_model(tmp_path / "written", config)
    stored = open_checkpoint(str(tmp_path / "written"))
    done = export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "fp32", quiet)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    values, width = random_values(config), config.model.expert_width
    assert done.tensors == len(tensors)
    assert not any("load" in each for each in tensors)
    pattern, gate, up, down = matrices
    for layer in filter(config.model.has_experts, range(config.model.layers)):
        there, here = f"model.layers.{layer}.", f"layers.{layer}."
        assert np.array_equal(tensors[f"{there}{router}.weight"], values[f"{here}router.weight"])
        for expert in range(config.model.experts.count):
            into = values[f"{here}experts_in.weight"][expert]
            out = values[f"{here}experts_out.weight"][expert]
            for matrix, expected in ((gate, into[:width]), (up, into[width:]), (down, out)):
                found = tensors[f"{there}{pattern.format(expert, matrix)}.weight"]
                assert np.array_equal(found, expected), (layer, expert, matrix)


def test_memory_holds_a_parameter_and_not_the_model(tmp_path: Path) -> None:
    fields = {**MODELS["llama"][1], "hidden_size": 256, "ffn_size": 768, "layers": 12}
    config = job_of(fields)
    write_model(tmp_path / "written", config)
    shapes = parameter_shapes(config.model).values()
    largest = 4 * max(int(np.prod(shape)) for shape in shapes)
    whole = 4 * sum(int(np.prod(shape)) for shape in shapes)
    stored = open_checkpoint(str(tmp_path / "written"))
    tracemalloc.start()
    try:
        export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "bf16", quiet)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert whole > 30 * largest
    assert peak < 6 * largest, f"{peak} bytes of {largest} in the largest parameter"


def test_memory_holds_a_few_experts_and_not_a_layer(tmp_path: Path) -> None:
    fields = {
        **MODELS["qwen3-moe"][1],
        "layers": 2,
        "hidden_size": 256,
        "experts": {"count": 32, "ffn_size": 256},
    }
    # Each rank has 4 of the 32 experts.
    write_model(tmp_path / "written", job_of(fields, {"tp": 2, "dp": 4, "ep": 8}))
    stored = open_checkpoint(str(tmp_path / "written"))
    of_layer = 4 * math.prod(stored.shapes["layers.1.experts_in.weight"])
    tracemalloc.start()
    try:
        export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "bf16", quiet)
        out = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        folder, to = tmp_path / "out", str(tmp_path / "imported")
        import_hugging_face(folder, to, quiet, part_bytes=of_layer // 16)
        back = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out < of_layer / 2, f"{out} bytes of {of_layer} in the experts of a layer"
    assert back < of_layer / 2, f"{back} bytes of {of_layer} in the experts of a layer"
    again = open_checkpoint(to)
    for name in stored.shapes:
        written = widen(narrow(stored.read(name), "BF16"), "BF16")
        if not name.endswith(".router.load"):
            assert np.array_equal(again.read(name).reshape(-1), written), name


def test_a_range_of_a_parameter_is_read_across_pieces_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "LEAST_CHUNK_BYTES", 4096)
    # Shards end within a matrix: two ranks share each half of the experts.
    write_model(tmp_path, job_of(MODELS["qwen3-moe"][1], {"tp": 2, "dp": 4, "ep": 2}))
    stored, name = open_checkpoint(str(tmp_path)), "layers.1.experts_in.weight"
    whole = stored.read(name).reshape(-1)
    random = np.random.default_rng(2)
    ends = np.sort(random.integers(0, whole.size + 1, (200, 2)))
    for first, last in [(0, whole.size), (5, 5), *ends.tolist()]:
        found = stored.read_range(name, first, last)
        assert np.array_equal(found, whole[first:last]), (first, last)


def test_a_flipped_bit_in_a_chunk_of_an_expert_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "LEAST_CHUNK_BYTES", 4096)
    write_model(tmp_path / "written", job_of(MODELS["mixtral"][1]))
    stored = open_checkpoint(str(tmp_path / "written"))
    whole, expected = "layers.2.experts_out.weight", stored.read("layers.2.experts_out.weight")
    (file,) = (tmp_path / "written").glob("attempts/*/*/rank-00000.safetensors")
    data, last = bytearray(file.read_bytes()), expected[-1].tobytes()
    data[data.index(last) + len(last) - 1] ^= 1
    file.write_bytes(data)
    size = expected[0].size
    found = stored.read_range(whole, 0, size)
    assert np.array_equal(found, expected[0].reshape(-1)), "another chunk is damaged"
    with pytest.raises(DamagedError, match=r"experts_out.weight \(master\) fails its checksum"):
        stored.read_range(whole, 5 * size, 6 * size)
    with pytest.raises(DamagedError, match=r"rank-00000\.safetensors: .* fails its checksum"):
        export_hugging_face(stored, model_of(stored, None), tmp_path / "out", "bf16", quiet)
    assert not (tmp_path / "out").exists()


def test_a_taken_folder_is_refused_and_an_empty_one_filled(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with new_folder(taken) as folder:
        (folder / "file").write_text("x")
        assert list(taken.iterdir()) == []
    assert (taken / "file").read_text() == "x"
    with pytest.raises(ExistsError, match="taken is taken: give a folder"):
        with new_folder(taken):
            pass
    with pytest.raises(OSError, match="not empty"):  # it was filled meanwhile
        with new_folder(tmp_path / "late") as folder:
            (tmp_path / "late").mkdir()
            (tmp_path / "late" / "theirs").write_text("y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "taken"]


_SLOW = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs in the background
from megascale_checkpoint.export import hugging_face, stored
opened = stored.open_checkpoint(sys.argv[1])
seen = []
def progress(done, total):
    print(done, flush=True)
    seen.append(done)
    time.sleep(0 if len(seen) < 5 else 60)  # until it is ended
hugging_face.export_hugging_face(
    opened, stored.model_of(opened, None), Path(sys.argv[2]), "bf16", progress
)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_export_that_is_ended_leaves_no_folder_of_the_name(
    how: signal.Signals, tmp_path: Path
) -> None:
    write_model(tmp_path / "written", job_of(MODELS["llama"][1]))
    command = [sys.executable, "-c", _SLOW, str(tmp_path / "written"), str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline()
    assert list(tmp_path.glob(".out.partial-*"))
    os.kill(process.pid, how)
    until(lambda: process.poll() is not None, "the end of the export", process.poll)
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    assert bool(list(tmp_path.glob(".out.partial-*"))) == (how is signal.SIGKILL)


@pytest.mark.parametrize("part", ["header", "values"])
def test_a_flipped_bit_is_named_and_nothing_is_exported(part: str, tmp_path: Path) -> None:
    write_model(tmp_path / "written", job_of(MODELS["llama"][1], {"dp": 2}))
    (file,) = (tmp_path / "written").glob("attempts/*/*/rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little")  # behind it stand the parameters
    data[8 + (header // 2 if part == "header" else header + 100)] ^= 1
    file.write_bytes(data)
    shown = invoke(
        "export", str(tmp_path / "written"), "--to", str(tmp_path / "out"), "--format", "hf"
    )
    assert isinstance(shown.exception, DamagedError)
    assert "rank-00001.safetensors" in str(shown.exception)
    assert not (tmp_path / "out").exists()


def test_a_fetched_folder_and_a_chosen_step_are_exported(tmp_path: Path) -> None:
    config = job_of(MODELS["llama"][1])
    uri = write_model(tmp_path / "written", config)
    fetched = Path(uri).parent  # as `megascale checkpoint fetch` copies it
    for place, options in ((fetched, []), (tmp_path / "written", ["--step", str(STEP)])):
        to = tmp_path / f"from-{place.name}"
        shown = invoke("export", str(place), "--to", str(to), "--format", "hf", "--json", *options)
        assert json.loads(shown.stdout)["step"] == STEP
        assert json.loads((to / "config.json").read_text())["dtype"] == "bfloat16"
    for place, words in (
        (fetched, "holds step 7 alone"),
        (tmp_path / "written", "no complete checkpoint of step 6; give one of 7"),
        (tmp_path, "holds no complete checkpoint"),
    ):
        with pytest.raises(NotFoundError, match=words):
            open_checkpoint(str(place), 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "hf", "--tp", "2"], "--tp: hf is read into any layout"),
        (["--format", "dcp", "--pp", "2"], "--pp: dcp is read into any layout"),
        (["--format", "dcp", "--tokenizer", "x"], "--tokenizer: dcp holds none"),
        (["--format", "dcp", "--dtype", "bf16"], "--dtype: dcp holds the float32 parameters"),
    ],
)
def test_options_of_another_format_are_refused_with_what_to_use(
    options: list[str], words: str, tmp_path: Path
) -> None:
    shown = invoke("export", str(tmp_path), "--to", str(tmp_path / "out"), *options)
    with pytest.raises(RequestError, match=words) as caught:
        raise shown.exception  # type: ignore[misc]
    assert caught.value.fields


def test_a_checkpoint_without_its_model_needs_the_jobs_file(tmp_path: Path) -> None:
    _, fields = MODELS["llama"]
    write_model(tmp_path / "written", job_of(fields), described=False)
    stored = open_checkpoint(str(tmp_path / "written"))
    with pytest.raises(RequestError, match=r"--job: missing, .* give the file of the job"):
        model_of(stored, None)
    job = tmp_path / "job.yaml"
    for text, words in (
        ("a: [", "is not valid YAML"),
        (yaml.safe_dump(tiny_job(model={"layerz": 3})), "unknown field"),
    ):
        job.write_text(text)
        with pytest.raises(ServiceError, match=words):
            model_of(stored, job)
    job.write_text(yaml.safe_dump(tiny_job(model={**fields, "ffn_size": 91})))
    with pytest.raises(RequestError, match=r"ffn_out.weight is of shape \[90, 64\] in the check"):
        export_hugging_face(stored, model_of(stored, job), tmp_path / "out", "bf16", quiet)
    job.write_text(yaml.safe_dump(tiny_job(model=fields)))
    export_hugging_face(stored, model_of(stored, job), tmp_path / "out", "bf16", quiet)
    assert (tmp_path / "out" / "config.json").exists()


BPE = {"kind": "bpe", "path": "", "sha256": ""}
END = {"id": 3, "content": "</s>", "special": True}
LONGER = {"id": 4, "content": "<pad>", "special": True}


def tokenizer_file(folder: Path, added: list[dict[str, Any]], **beside: dict[str, Any]) -> Path:
    """A small tokenizers file, with the files of configuration beside it."""
    folder.mkdir(exist_ok=True)
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2}, []))
    library.add_special_tokens([each["content"] for each in added])
    library.save(str(folder / "tokenizer.json"))
    for name, values in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder / "tokenizer.json"


def exported(folder: Path, given: Any, *options: str) -> tuple[Path, dict[str, Any], Result]:
    """Export a small model whose job had the tokenizer ``given``; the folder, facts and all."""
    config = job_of({**MODELS["llama"][1], "vocab_size": 257})
    uri = Path(write_model(folder / "written", config))
    values = {k: v for k, v in json.loads(uri.read_bytes()).items() if k != "xxh3"}
    values["small_state"]["tokenizer"] = given
    uri.write_bytes(dump_record(values))
    to = ["--to", str(folder / "out"), "--format", "hf", *options]
    shown = invoke("export", str(uri.parent), *to, "--json")
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    return folder / "out", json.loads(shown.stdout), shown


def ids_of(folder: Path) -> set[object]:
    """The end tokens by config.json and by generation_config.json."""
    names = ("config.json", "generation_config.json")
    found = [json.loads((folder / name).read_text()).get("eos_token_id") for name in names]
    return {tuple(each) if isinstance(each, list) else each for each in found}


def test_the_bytes_tokenizer_goes_along_as_a_file(tmp_path: Path) -> None:
    out, facts, _ = exported(tmp_path, {"kind": "bytes", "path": "", "sha256": ""})
    assert facts["eos_token_id"] == 256 and ids_of(out) == {256}
    library = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "Grüße, 世界 \n\t\0 <ok>"
    assert library.encode(text).ids == list(text.encode())
    assert library.decode(list(text.encode())) == text
    assert library.decode([104, 105, 256]) == "hi", "the end is no text"
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["eos_token"] == library.id_to_token(256)


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({}, 3),
        ({"tokenizer_config": {"eos_token": "<pad>"}}, 4),
        ({"special_tokens_map": {"eos_token": {"content": "<pad>"}}}, 4),
        ({"config": {"eos_token_id": [3, 4]}, "tokenizer_config": {"eos_token": "a"}}, (3, 4)),
        ({"generation_config": {"eos_token_id": 4}, "config": {"eos_token_id": 3}}, 4),
        ({"config": {"eos_token_id": 70_000}, "tokenizer_config": {"eos_token": "</s>"}}, 3),
    ],
)
def test_the_jobs_tokenizer_goes_along_with_its_end(
    tmp_path: Path, beside: dict[str, Any], end: object
) -> None:
    added = [END] if not beside else [END, LONGER]
    path = tokenizer_file(tmp_path / "words", added, **beside)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    out, facts, _ = exported(tmp_path, {**BPE, "path": str(path), "sha256": sha256})
    assert ids_of(out) == {end} and not facts["problem"]
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    config = json.loads((out / "tokenizer_config.json").read_text())
    expected = beside.get("tokenizer_config", {"eos_token": "</s>" if end == 3 else "<pad>"})
    assert config["eos_token"] == expected["eos_token"]


@pytest.mark.parametrize("beside", [{}, {"tokenizer_config": {"eos_token": "</s>"}}])
def test_the_end_with_which_the_corpus_was_made_goes_along(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    """As `data tokenize --end-token` records it beside the corpus and its copy of the tokenizer."""
    words = tokenizer_file(tmp_path / "words", [END, LONGER], **beside)
    path = words.rename(words.with_name("corpus.tokenizer.json"))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    made = CorpusRecord("bpe", sha256, 4, 5, 4, 1, 9, "identity")
    record_path(words.with_name("corpus")).write_text(made.to_json())
    (tmp_path / "job").mkdir()
    (tmp_path / "again").mkdir()
    out, facts, _ = exported(tmp_path / "job", {**BPE, "path": str(path), "sha256": sha256})
    assert ids_of(out) == {LONGER["id"]} and not facts["problem"]
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["eos_token"] == LONGER["content"]
    other = replace(made, tokenizer_sha256="0" * 64)  # a record of another tokenizer says nothing
    record_path(words.with_name("corpus")).write_text(other.to_json())
    out, _, _ = exported(tmp_path / "again", {**BPE, "path": str(path), "sha256": sha256})
    assert ids_of(out) == ({END["id"]} if beside else {None})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "does not say which tokenizer the job had"),
        ("abc", "does not say which tokenizer the job had"),
        ({"kind": "bpe", "path": ""}, "named no tokenizer for its vocabulary of 257"),
        ({**BPE, "path": "{secret}"}, "is not a Hugging Face tokenizers file"),
        ({**BPE, "path": "/nowhere/tokenizer.json"}, "cannot be read here"),
        ({**BPE, "path": "{words}", "sha256": "0" * 64}, "is not the tokenizer that the job had"),
        ({**BPE, "path": "{deep}"}, "is JSON nested deeper"),
    ],
)
def test_what_is_not_known_is_null_and_reported(tmp_path: Path, given: Any, words: str) -> None:
    """And nothing else is copied, whatever file somebody's checkpoint names."""
    (tmp_path / "secret").write_text('{"key": "of somebody"}')
    (tmp_path / "deep").write_text("[" * 100_000)
    places = {"{secret}": tmp_path / "secret", "{deep}": tmp_path / "deep"}
    places["{words}"] = tokenizer_file(tmp_path / "words", [END])
    if isinstance(given, dict):
        given = {**given, "path": str(places.get(given["path"], given["path"]))}
    out, facts, _ = exported(tmp_path, given)
    assert words in facts["problem"] and facts["tokenizer"] == []
    assert ids_of(out) == {None} and not (out / "tokenizer.json").exists()


def test_a_tokenizer_can_be_given(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "words", [END])
    out, facts, _ = exported(tmp_path, None, "--tokenizer", str(path))
    assert ids_of(out) == {3} and facts["tokenizer"] == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "other").mkdir()
    with pytest.raises(RequestError, match=r"--tokenizer: .*cannot be read"):
        exported(tmp_path / "other", None, "--tokenizer", str(tmp_path / "none"))


def test_a_large_vocabulary_is_none_of_bytes() -> None:
    """Who trains on a corpus of elsewhere may leave the tokenizer at its default."""
    found = tokenizer_files({"kind": "bytes", "path": ""}, 32_000)
    assert not found.files and found.id_fields()["eos_token_id"] is None
