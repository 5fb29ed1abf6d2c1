"""Loss curves of a small model in bf16 and with its layers' linears in FP8, on real text.

    python benchmarks/fp8_losses.py --folder out              # the runs in parallel, by GPU
    python benchmarks/fp8_losses.py --folder out --quick      # a dry run on a CPU

A prototype: the layers' column- and row-parallel linears of the trainer are replaced, on one rank.
Embedding, head, attention and norms stay as they are. All runs begin with the same values and read
the same samples; "bf16, other sums" takes them in micro-batches of half the size, and shows how far
runs part that differ in the order of sums alone. The text is the Python source of the standard
library, byte by byte. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.batches import Batches
from benchmarks.compare_losses import compare, read_losses

from megascale_common.job.config import JobConfig, ModelConfig, from_accepted
from megascale_kernels import quantize as plain
from megascale_kernels.fused.norm_operand import norm_bound
from megascale_kernels.gemm import Gemm
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand, scale_of
from megascale_trainer.data.indexed import token_dtype
from megascale_trainer.data.indexed_writer import IndexedWriter
from megascale_trainer.model.layer import Context
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.parallel.pipeline import stage as stage_module
from megascale_trainer.process.bootstrap import create_groups, destroy_groups
from megascale_trainer.trainer import Trainer, set_determinism
from megascale_trainer.weights import Weight, Weights

END_OF_FILE = 256
VOCABULARY = 257
OTHER_SUMS = "bf16, other sums"
Cast = Callable[..., Operand]


@dataclass(frozen=True)
class Gradients:
    """The format of gradients: ``dtype``, with one scale for the tensor or for each row."""

    dtype: torch.dtype
    per: plain.Per


FORMATS: Mapping[str, Gradients | None] = {
    "bf16": None,
    OTHER_SUMS: None,
    "fp8, e5m2 gradients": Gradients(E5M2, "tensor"),
    "fp8, e4m3 gradients by rows": Gradients(E4M3, "row"),
    "fp8, e4m3 gradients under one scale": Gradients(E4M3, "tensor"),
}


def main(arguments: Sequence[str]) -> int:
    """Run every format in a process of its own, and compare the curves."""
    options = _parser().parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        train(options.only, options)
        return 0
    corpus = write_corpus(options.folder, options.text, limit=1 << (16 if options.quick else 25))
    devices, running = max(1, torch.cuda.device_count()), []
    for number, name in enumerate(FORMATS):
        command = [sys.executable, __file__, *arguments, "--only", name]
        environment = {**os.environ, "FP8_LOSSES_DEVICE": str(number % devices)}
        running.append(subprocess.Popen(command, env=environment))
    failed = sum(process.wait() != 0 for process in running)
    curves = {
        name: read_losses(_curve(options, name))
        for name in FORMATS
        if _curve(options, name).exists()
    }
    found = {"tokens": corpus, "steps": options.steps, "failed": failed, "rows": _rows(curves)}
    print(json.dumps(found), flush=True)
    return failed


def train(name: str, options: argparse.Namespace) -> None:
    """Train with linears in the format ``name`` and write the losses step by step."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("FP8_LOSSES_DEVICE", "0")))
        torch.cuda.set_device(device)
    config = _job(options, 2 if name == OTHER_SUMS else 1, cuda=device.type == "cuda")
    gradients = FORMATS[name]
    if gradients is not None:
        replace_linears(gradients, device)
    set_determinism(config, device)
    groups = create_groups(config.layout, 0, HashStore(), device, timeout_s=60.0)
    trainer, batches = Trainer(config, 0, groups, device), Batches(config, 0, device)
    trainer.initialise()
    begin, previous = time.monotonic(), None
    with _curve(options, name).open("w") as file:
        for step in range(options.steps):
            result = trainer.train_step(batches.step(trainer.step))
            if previous is not None:
                _write(file, step, previous)
            previous = result
        _write(file, options.steps, previous)
    print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    destroy_groups()


def _write(file: Any, step: int, result: Any) -> None:
    record = result.read()
    line = {"step": step, "loss": record.loss, "norm": record.gradient_norm}
    file.write(json.dumps({**line, "skipped": record.skipped}) + "\n")
    file.flush()


def write_corpus(folder: Path, text: Path, limit: int) -> int:
    """Bytes of the Python files under ``text`` as a tokenised corpus; returns its tokens."""
    with IndexedWriter(folder / "corpus", token_dtype(VOCABULARY)) as writer:
        for path in sorted(text.rglob("*.py")):
            if writer.tokens < limit:
                data = np.frombuffer(path.read_bytes(), np.uint8)
                writer.add_document(np.append(data.astype(np.int64), END_OF_FILE))
    return writer.tokens


class Fp8Sharding:
    """What a layer is given, with its linears in FP8; for one rank."""

    size = 1

    def __init__(self, weights: Weights, gradients: Gradients, gemm: Gemm, casts: Cast) -> None:
        self._weights, self._rest = weights, (gradients, gemm, casts)

    def column_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The input projection; its input has the scale that the norm before it is bounded by."""
        name = next(name for name, own in self._weights.items() if own is weight)
        norm = name.removesuffix("in.weight") + "norm"
        scaling, shift = self._weights[f"{norm}.weight"], self._weights.get(f"{norm}.bias")
        bound = norm_bound(scaling.value, None if shift is None else shift.value)
        return _apply(x, weight, scale_of(bound, E4M3), False, *self._rest)

    def row_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The output projection."""
        return _apply(x, weight, None, True, *self._rest)


def replace_linears(gradients: Gradients, device: torch.device) -> None:
    """Have layers of the trainer multiply in FP8 from now on, in this process."""
    gemm, casts, plain_layer = Gemm(timed=False), _casts(device), stage_module.layer

    def layer(
        x: torch.Tensor,
        context: Context,
        weights: Weights,
        model: ModelConfig,
        sharding: LayerSharding,
    ) -> torch.Tensor:
        in_fp8 = Fp8Sharding(weights, gradients, gemm, casts)
        return plain_layer(x, context, weights, model, in_fp8)

    stage_module.layer = layer


def _casts(device: torch.device) -> Cast:
    """A cast of a matrix with its transposed copy: the fused one, or on a CPU the plain one."""
    if device.type != "cuda":
        return lambda x, dtype, per: plain.quantize(x, dtype, per=per, transposed=True)
    from megascale_kernels.fused import quantize as fused

    def cast(x: torch.Tensor, dtype: torch.dtype, per: plain.Per) -> Operand:
        if per == "row":
            return fused.quantize_rows(x, dtype, transposed=True)
        return fused.quantize(x, dtype, amax=fused.amax(x))

    return cast


def _apply(
    x: torch.Tensor,
    weight: Weight,
    scale: torch.Tensor | None,
    flipped: bool,
    gradients: Gradients,
    gemm: Gemm,
    casts: Cast,
) -> torch.Tensor:
    y: torch.Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        x, weight.value, weight.main_grad, gradients, scale, gemm, casts, flipped
    )
    return y


class _Fp8Linear(torch.autograd.Function):
    """y = x @ weight^T, or x @ weight where the weight is stored the other way (``flipped``)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        main_grad: torch.Tensor,
        gradients: Gradients,
        scale: torch.Tensor | None,
        gemm: Gemm,
        casts: Cast,
        flipped: bool,
    ) -> torch.Tensor:
        rows = x.detach().flatten(0, 1).contiguous()
        if scale is None:
            operand = casts(rows, E4M3, "tensor")
        else:  # a scale that is known is no amax: cast by torch, in more passes
            operand = plain.transpose(Operand(plain.cast(rows, scale, E4M3), scale))
        factor = casts(weight.detach(), E4M3, "tensor")
        ctx.flipped, ctx.operand, ctx.factor = flipped, operand, factor
        ctx.main_grad, ctx.gradients, ctx.gemm, ctx.casts = main_grad, gradients, gemm, casts
        return _product(operand, factor.over_rows() if flipped else factor.over_columns(), x, gemm)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients: Gradients = ctx.gradients
        x, factor, gemm = ctx.operand, ctx.factor, ctx.gemm
        gradient = ctx.casts(d_y.flatten(0, 1).contiguous(), gradients.dtype, gradients.per)
        right = factor.over_columns() if ctx.flipped else factor.over_rows()
        d_x = _product(gradient, right, d_y, gemm)
        sides = gradient.over_rows(), x.over_rows()
        gemm.multiply(*(reversed(sides) if ctx.flipped else sides), ctx.main_grad, accumulate=True)
        return d_x, *(None for _ in range(7))


def _product(left: Operand, right: Factor, like: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    """``left`` @ ``right``^T, [S, B, columns] in the dtype of ``like`` [S, B, ...]."""
    out = like.new_empty(*like.shape[:2], right.data.shape[0])
    gemm.multiply(left.over_columns(), right, out.flatten(0, 1))
    return out


def _rows(curves: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each curve beside that of bf16: differences over all steps, signed means by fifths, ends."""
    reference = curves["bf16"]
    rows = []
    for name, losses in curves.items():
        found = compare(reference, losses, 0.0)
        signed = [other - one for one, other in zip(reference, losses, strict=False)]
        fifth = max(1, math.ceil(len(signed) / 5))
        rows.append(
            {
                "run": name,
                "steps": len(losses),
                "first": losses[0],
                "last_fifth": statistics.mean(losses[-fifth:]),
                "mean_difference": found["mean_difference"],
                "max_difference": found["max_difference"],
                "max_at_step": 1 + max(range(len(signed)), key=lambda n: abs(signed[n])),
                "signed_by_fifths": [
                    statistics.mean(signed[first : first + fifth])
                    for first in range(0, len(signed), fifth)
                ],
            }
        )
    return rows


def _job(options: argparse.Namespace, micro_batches: int, *, cuda: bool) -> JobConfig:
    small = options.quick
    steps, batch = options.steps, 2 if small else options.batch
    return from_accepted(
        {
            "name": "fp8-losses",
            "model": {
                "layers": 2 if small else options.layers,
                "hidden_size": 64 if small else options.hidden,
                "heads": 4 if small else options.hidden // 128,
                "vocab_size": VOCABULARY,
                "sequence_length": 32 if small else 1024,
                "bias": True,
            },
            "training": {
                "steps": steps,
                "global_batch_size": batch,
                "micro_batch_size": batch // micro_batches,
                "precision": "bf16" if cuda else "fp32",
            },
            "schedule": {"warmup_steps": max(1, steps // 20)},
            "data": {
                "document_attention": False,
                "sources": [{"prefix": str(options.folder / "corpus")}],
            },
        }
    )


def _curve(options: argparse.Namespace, name: str) -> Path:
    folder: Path = options.folder
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for the corpus and the curves")
    add("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files")
    add("--steps", type=int, default=600)
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=1024)
    add("--batch", type=int, default=16, help="sequences of 1024 a step")
    add("--only", choices=FORMATS, help="one run, in this process")
    add("--quick", action="store_true", help="a tiny model: a dry run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
