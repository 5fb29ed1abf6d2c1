"""``megascale checkpoint export`` and ``import``: models to and from other software."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from megascale_checkpoint.export.foreign_config import ForeignModel
from megascale_checkpoint.export.output import Report, bar
from megascale_checkpoint.export.stored import (
    ParameterReader,
    model_of,
    open_checkpoint,
    tokenizer_of,
)
from megascale_checkpoint.export.tokenizer_files import TokenizerFiles, tokenizer_files
from megascale_common.service.errors import ServiceError, invalid
from megascale_job.config import ExpertsConfig, ModelConfig, model_values
from megascale_job.visible import counted, visible


class ExportFormat(StrEnum):
    """Target formats of an export."""

    HF = "hf"
    DCP = "dcp"
    MEGATRON = "megatron"


class ImportFormat(StrEnum):
    """Source formats of an import."""

    HF = "hf"


class Dtype(StrEnum):
    """Type of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


def _absolute(uri: str) -> str:
    # Storage refuses relative paths, which each node would resolve in its own working directory.
    # This command runs on one machine, so it can resolve them.
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; no progress bar.")]
From = Annotated[
    str,
    typer.Argument(
        metavar="URI_OR_FOLDER",
        callback=_absolute,
        help="A job's checkpoint.uri, or a folder that `megascale checkpoint fetch` wrote.",
    ),
]
ToFolder = Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for the export.")]
FormatTo = Annotated[
    ExportFormat,
    typer.Option(
        "--format",
        help="hf: Hugging Face transformers, weights alone; dcp: PyTorch's distributed checkpoint, "
        "with optimizer states; megatron: Megatron-core's format torch, weights alone.",
    ),
]
Step = Annotated[
    int | None, typer.Option(min=0, help="Its step; default: the newest complete one.")
]
WeightDtype = Annotated[
    Dtype | None,
    typer.Option(help="Of the weights of hf and megatron, by default bf16; dcp is always in fp32."),
]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, max=99, help="Tensor-parallel size of megatron's files.")
]
PipelineParallel = Annotated[
    int, typer.Option("--pp", min=1, max=999, help="Pipeline-parallel size of megatron's files.")
]
JobFile = Annotated[
    Path | None,
    typer.Option(
        "--job",
        metavar="FILE",
        help="The job's file; hf and megatron need it if an earlier version wrote the checkpoint.",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json to add to hf; default: the one that the job has named.",
    ),
]
Model = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A Hugging Face model: config.json, safetensors.")
]
ToUri = Annotated[
    str,
    typer.Option(
        metavar="URI", callback=_absolute, help="New folder of checkpoints, for load_uri."
    ),
]
FormatFrom = Annotated[
    ImportFormat, typer.Option("--format", help="hf: Hugging Face transformers.")
]


def export_checkpoint(
    uri: From,
    to: ToFolder,
    form: FormatTo,
    step: Step = None,
    dtype: WeightDtype = None,
    job: JobFile = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a complete checkpoint in the format of other software, without a cluster.

    hf: a folder for from_pretrained of transformers: Llama or Mistral (serial
    block, RMSNorm, SwiGLU), Mixtral, Qwen3Moe or Olmoe (the same with experts),
    Cohere (parallel block, SwiGLU), Phi (parallel block, GELU) and others. A model
    that none of them computes is refused, and the error names the field. The job's
    tokenizer and its end token are added.

    dcp: a folder for torch.distributed.checkpoint.load on any layout, with the
    keys "model", "optimizer" and "step".

    megatron: a folder for Megatron-core's --load with --ckpt-format torch and
    --no-load-optim --no-load-rng, or for its tools/checkpoint/convert.py:
    serial block without experts, for --tp and --pp.

    Every byte read is compared with its checksum. Memory holds one parameter
    at a time (megatron: one stage). FOLDER appears when it is complete.

    Example: megascale checkpoint export /data/example --to out --format hf
    """
    _refuse(form, dtype, tp, pp, tokenizer)  # before any storage is read
    stored = open_checkpoint(uri, step)
    manifest = stored.manifest
    with bar(f"step {manifest.step} of {manifest.job}", quiet=as_json) as progress:
        if form is ExportFormat.HF:
            model, kept = model_of(stored, job), dtype or Dtype.BF16
            given = tokenizer_of(stored, job)
            if tokenizer is not None:
                given = {"kind": "bpe", "path": str(tokenizer)}
            words = tokenizer_files(given, model.vocab_size)
            if tokenizer is not None and not words.files:
                raise invalid("--tokenizer", words.problem, "give a tokenizer.json")
            facts = _hugging_face(stored, model, to, kept, words, progress)
        elif form is ExportFormat.MEGATRON:
            model, kept = model_of(stored, job), dtype or Dtype.BF16
            facts = _megatron(stored, model, to, kept, (tp, pp), progress)
        else:
            facts = _dcp(stored, to, progress)
    facts |= {"format": form.value, "folder": str(to.absolute())}
    facts |= {"job": manifest.job, "step": manifest.step, "attempt": manifest.attempt}
    if as_json:
        typer.echo(json.dumps(facts))
        return
    states = ", ".join(stored.states)
    what = facts.get("architecture") or f"torch.distributed.checkpoint ({states})"
    typer.echo(
        f"step {facts['step']} of job {visible(facts['job'])} is in {visible(str(to))}: "
        f"{visible(what)}, {facts['dtype']}, {facts['size_bytes'] / 2**20:.1f} MiB"
    )
    if facts.get("problem"):
        lacks = "its end token is null" if facts["eos_token_id"] is None else "it has no tokenizer"
        typer.echo(f"{lacks}: {visible(facts['problem'])}; give --tokenizer FILE", err=True)


def import_checkpoint(folder: Model, to: ToUri, form: FormatFrom, as_json: AsJson = False) -> None:
    """Write a Hugging Face model as the checkpoint of step 0, from which a job starts.

    It reads Llama, Mistral, Ministral, Mixtral, Qwen 2 and 3, Qwen3Moe, Olmoe,
    Cohere, StableLM, Phi and Starcoder2 in safetensors, and prints the lines for
    the job file. The job's own checkpoint.uri is another folder.

    A model that a job cannot compute is refused, and the error names the field
    of config.json. Pickled weights are never loaded.

    Example: megascale checkpoint import llama/ --format hf --to /data/llama
    """
    from megascale_checkpoint.export.hugging_face import import_hugging_face

    with bar(f"import of {folder}", quiet=as_json) as progress:
        done = import_hugging_face(folder, to, progress)
    if as_json:
        facts = {
            "uri": to,
            "step": 0,
            "manifest_uri": done.manifest_uri,
            "architecture": done.foreign.architecture.name,
            "parameters": done.parameters,
            "head_is_copy_of_embedding": done.foreign.copied,
            "model": model_values(done.foreign.model),
            "tokenizer": dict(done.tokenizer),
            **_loss(done.foreign),
        }
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"# {done.foreign.architecture.name} with {counted(done.parameters, 'parameter')} is "
        f"the checkpoint of step 0 in {visible(to)}"
    )
    if done.foreign.copied:
        typer.echo("# Its head was a scaled embedding; a job trains a scaled copy of its own.")
    typer.echo("# Put this into the job file:")
    trainer: dict[str, Any] = {"model": _fields(done.foreign.model), **_loss(done.foreign)}
    if "path" in done.tokenizer:
        named = {name: done.tokenizer[name] for name in ("kind", "path", "sha256")}
        trainer["data"] = {"tokenizer": named}
    section = {"trainer": trainer, "checkpoint": {"load_uri": to}}
    typer.echo(yaml.safe_dump(section, sort_keys=False).rstrip())


def import_for_job(folder: Path, uri: str) -> dict[str, Any]:
    """Import a Hugging Face model for `megascale init --from-hf`.

    Returns its architecture, and the sections model and loss of trainer, loss if it has experts.

    Raises:
        ServiceError: as ``megascale checkpoint import``.
    """
    from megascale_checkpoint.export.hugging_face import import_hugging_face

    with bar(f"import of {folder}", quiet=False) as progress:
        done = import_hugging_face(folder, uri, progress)
    name, model = done.foreign.architecture.name, _fields(done.foreign.model)
    return {"architecture": name, "model": model, **_loss(done.foreign)}


def _refuse(
    form: ExportFormat, dtype: Dtype | None, tp: int, pp: int, tokenizer: Path | None
) -> None:
    """Raise RequestError for options that the format does not support."""
    if tokenizer is not None and form is not ExportFormat.HF:
        raise invalid("--tokenizer", f"{form.value} holds none", "leave it out, or use hf")
    for name, size in (("--tp", tp), ("--pp", pp)):
        if form is not ExportFormat.MEGATRON and size != 1:
            raise invalid(
                name, f"{form.value} is read into any layout", "leave it out, or use megatron"
            )
    if form is ExportFormat.DCP and dtype is Dtype.BF16:
        raise invalid(
            "--dtype",
            "dcp holds the float32 parameters that the optimizer updates",
            "leave the option out, or use --format hf",
        )


def _hugging_face(
    stored: ParameterReader,
    model: ModelConfig,
    to: Path,
    dtype: Dtype,
    words: TokenizerFiles,
    progress: Report,
) -> dict[str, Any]:
    from megascale_checkpoint.export.hugging_face import export_hugging_face

    done = export_hugging_face(stored, model, to, dtype.value, progress, tokenizer=words)
    return {
        "tokenizer": sorted(words.files),
        "eos_token_id": words.ids.get("eos"),
        "problem": words.problem,
        "architecture": done.architecture.name,
        "dtype": dtype.value,
        "size_bytes": done.size_bytes,
    }


def _megatron(
    stored: ParameterReader,
    model: ModelConfig,
    to: Path,
    dtype: Dtype,
    cut: tuple[int, int],
    progress: Report,
) -> dict[str, Any]:
    from megascale_checkpoint.export.megatron_layout import Cut

    with _needs_torch(ExportFormat.MEGATRON):
        from megascale_checkpoint.export.megatron import export_megatron
    size = export_megatron(stored, model, to, dtype.value, Cut(*cut), progress)
    name = f"Megatron-core GPT, tp {cut[0]}, pp {cut[1]}"
    return {"architecture": name, "dtype": dtype.value, "size_bytes": size}


@contextmanager
def _needs_torch(form: ExportFormat) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ServiceError(
            f"--format {form.value} needs torch ({error}): pip install 'megascale[executor]'",
            reason="NOT_INSTALLED",
        ) from error


def _dcp(stored: ParameterReader, to: Path, progress: Report) -> dict[str, Any]:
    with _needs_torch(ExportFormat.DCP):
        from megascale_checkpoint.export.dcp import export_dcp
    size = export_dcp(stored, to, progress)
    return {"states": list(stored.states), "dtype": "fp32", "size_bytes": size}


def _fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of trainer.model that differ from their defaults."""
    required = [each.name for each in fields(model) if _is_required(each)]
    chosen = model_values(model)
    defaults = model_values(ModelConfig(**{name: chosen[name] for name in required}))
    found = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in chosen.items()
        if name in required or value != defaults[name]
    }
    if model.experts.count:
        dense = asdict(ExpertsConfig())
        experts = asdict(model.experts)
        found["experts"] = {name: value for name, value in experts.items() if value != dense[name]}
    return found


def _loss(foreign: ForeignModel) -> dict[str, Any]:
    """The section trainer.loss of an imported model, if it has losses of experts."""
    if not foreign.global_balance:
        return {}
    return {"loss": {"global_balance": foreign.global_balance}}


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING
