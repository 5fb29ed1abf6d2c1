"""Export to a folder for `from_pretrained` of transformers: config.json and safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megascale_checkpoint.export.architectures import Architecture, choose
from megascale_checkpoint.export.foreign_config import config_values
from megascale_checkpoint.export.new_folder import new_folder
from megascale_checkpoint.export.progress import Report
from megascale_checkpoint.export.safetensors_files import TensorToWrite, write_files
from megascale_checkpoint.export.stored import ParameterReader
from megascale_checkpoint.export.tensors import Transfer, check_model, transfers
from megascale_checkpoint.export.tokenizer_files import GENERATION, TokenizerFiles
from megascale_checkpoint.export.values import narrow, to_foreign
from megascale_job.config import ModelConfig

SHARD_BYTES = 5_000_000_000  # of transformers' own save_pretrained
NO_TOKENIZER = TokenizerFiles()
NAMES = {"bf16": "BF16", "fp32": "F32"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: ``size_bytes`` counts the tensors."""

    architecture: Architecture
    tensors: int
    size_bytes: int


def export_hugging_face(
    stored: ParameterReader,
    model: ModelConfig,
    to: Path,
    dtype: str,
    progress: Report,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: TokenizerFiles = NO_TOKENIZER,
) -> Exported:
    """Write the float32 parameters of a checkpoint in ``dtype`` (bf16, fp32) into folder ``to``.

    With ``tokenizer`` its files, and the ids of its special tokens, go along.

    Raises:
        RequestError: no architecture holds the model, or the checkpoint is of another one.
        ExistsError: ``to`` is taken.
        DamagedError: a file of the checkpoint is missing, cut short or changed.
        OSError: a file cannot be read or written.
    """
    architecture = choose(model)
    check_model(stored.shapes, model)
    done, total = 0, stored.size_bytes(("master",))

    def make(transfer: Transfer) -> memoryview:
        nonlocal done
        if not transfer.logical:
            return narrow(np.zeros(transfer.shape, np.float32), NAMES[dtype])
        values = to_foreign(stored.read(transfer.logical), transfer.change, model.head_size)
        done += values.nbytes
        progress(done, total)
        return narrow(values, NAMES[dtype])

    chosen = transfers(architecture, model)
    tensors = [TensorToWrite(each.foreign, each.shape, partial(make, each)) for each in chosen]
    with new_folder(to) as folder:
        size = write_files(folder, tensors, NAMES[dtype], shard_bytes)
        ids = tokenizer.id_fields()
        values = config_values(architecture, model, dtype) | ids
        known = {name: value for name, value in ids.items() if value is not None}
        for name, content in (
            ("config.json", values),
            (GENERATION, {"_from_model_config": True, **known}),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        for name, data in tokenizer.files.items():
            (folder / name).write_bytes(data)
    return Exported(architecture, len(tensors), size)
