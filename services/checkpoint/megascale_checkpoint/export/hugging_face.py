"""Export to a folder for `from_pretrained` of transformers, and import from one.

An import becomes the checkpoint of step 0 from which a job can start. It reads safetensors and JSON
only: a pickle from elsewhere is never loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megascale_checkpoint.checksums import load_json_object
from megascale_checkpoint.export.architectures import (
    EMBEDDING,
    HEAD,
    Architecture,
    Transfer,
    check_model,
    choose,
    is_merged,
    is_state,
    parameter_shapes,
    transfers,
)
from megascale_checkpoint.export.first_checkpoint import (
    FILE_BYTES,
    Parameter,
    write_first_checkpoint,
)
from megascale_checkpoint.export.foreign_config import ForeignModel, config_values, read_config
from megascale_checkpoint.export.output import Report, new_folder
from megascale_checkpoint.export.safetensors_files import (
    INDEX,
    ITEM_BYTES,
    SINGLE,
    TensorInFile,
    TensorToWrite,
    read_tensors,
    write_files,
)
from megascale_checkpoint.export.stored import ParameterReader
from megascale_checkpoint.export.tokenizer_files import GENERATION, TokenizerFiles, of_folder
from megascale_checkpoint.export.values import Floats, narrow, to_foreign, to_logical
from megascale_common.service.errors import DamagedError, MissingFileError, RequestError, invalid
from megascale_job.config import ModelConfig
from megascale_job.visible import counted

SHARD_BYTES = 5_000_000_000  # of transformers' own save_pretrained
NO_TOKENIZER = TokenizerFiles()
NAMES = {"bf16": "BF16", "fp32": "F32"}
OF_EXPERTS = 3  # dimensions of a parameter of experts: expert, rows, columns


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export; ``size_bytes`` counts the tensors."""

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

    The files of ``tokenizer`` and the ids of its special tokens are added.

    Raises:
        RequestError: no architecture holds the model, or the checkpoint is of another one.
        ExistsError: ``to`` is taken.
        DamagedError: a file of the checkpoint is missing, cut short or changed.
        OSError: a file cannot be read or written.
    """
    architecture = choose(model)
    check_model(stored.shapes, model)
    chosen = transfers(architecture, model)
    done, total = 0, ITEM_BYTES["F32"] * sum(each.elements for each in chosen if each.logical)

    def make(transfer: Transfer) -> memoryview:
        nonlocal done
        if not transfer.logical:  # a bias that the architecture has and the job lacks
            return narrow(np.zeros(transfer.shape, np.float32), NAMES[dtype])
        if transfer.at is not None:
            last = transfer.at + transfer.elements
            values = stored.read_range(transfer.logical, transfer.at, last)
        else:
            values = to_foreign(stored.read(transfer.logical), transfer.change, model.head_size)
        done += values.nbytes
        progress(done, total)
        return narrow(values, NAMES[dtype])

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


MAX_JSON_BYTES = 64 << 20  # of config.json and of the index; real ones have up to 10 MB
_FOREIGN_HEAD = "lm_head.weight"
PART_BYTES = 256 << 20  # of a layer's experts in memory, unless one of them is larger
# Not a parameter but computed from config.json; some versions of transformers have stored it.
_IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    ``tokenizer``: kind, path and sha256 of its file, if there is one, and ``ids`` of tokens.
    """

    foreign: ForeignModel
    parameters: int
    manifest_uri: str
    tokenizer: Mapping[str, Any]


def import_hugging_face(
    folder: Path,
    uri: str,
    progress: Report,
    file_bytes: int = FILE_BYTES,
    part_bytes: int = PART_BYTES,
) -> Imported:
    """Write the model in ``folder`` as the checkpoint of step 0 below ``uri``.

    Memory holds one parameter at a time, of a layer's experts ``part_bytes``, or one expert.

    Raises:
        RequestError: it is not such a model, or a job cannot compute it; names the field.
        DamagedError: a file is missing, cut short, or not of its format.
        ExistsError: ``uri`` holds checkpoints, or belongs to a job.
        OSError: a file cannot be read or written.
    """
    # All checks come before the first write: an import that is refused leaves nothing behind.
    tensors = _tensors(folder)
    config = _json(folder / "config.json")
    _refuse_layers(config, tensors)
    foreign = read_config(config, head_stored=_FOREIGN_HEAD in tensors)
    merged = is_merged(tensors, foreign.model)
    if not merged:
        _refuse_experts(foreign, tensors)
    wanted = transfers(foreign.architecture, foreign.model, merged=merged)
    # A scaled copy of the embedding becomes a head of its own.
    if foreign.copied:
        wanted = tuple(_copied(each, wanted) for each in wanted)
    tied = foreign.copied or foreign.model.tie_embeddings
    _check(folder, wanted, tensors, tied=tied)
    parameters = list(_parameters(wanted, tensors, foreign, part_bytes))
    tokenizer = of_folder(folder, foreign.model.vocab_size)
    manifest_uri = write_first_checkpoint(
        uri, foreign.model, parameters, progress, file_bytes, tokenizer
    )
    count = sum(each.elements for each in wanted if each.logical)
    return Imported(foreign, count, manifest_uri, tokenizer)


def _tensors(folder: Path) -> dict[str, TensorInFile]:
    """All tensors of the model, by name."""
    if not folder.is_dir():
        raise invalid("FOLDER", f"{folder} is not a folder", "give that of a Hugging Face model")
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
            reason = (
                "holds pickled weights, which are never loaded"
                if pickled
                else "holds no safetensors"
            )
            raise invalid(
                "FOLDER",
                f"{folder} {reason}",
                f"{SINGLE} or {INDEX} is needed: save the model with save_pretrained",
            )
        return dict(read_tensors(folder / SINGLE))
    places = _json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise DamagedError(str(folder / INDEX), "has no weight_map of names to files")
    found: dict[str, TensorInFile] = {}
    for name in sorted(set(places.values())):
        if name != Path(name).name:  # nothing outside of the folder is read
            raise DamagedError(str(folder / INDEX), f"names {name!r}, which is not in the folder")
        if not (folder / name).exists():
            raise MissingFileError(str(folder / name), "is missing")
        found |= read_tensors(folder / name)
    return found


def _json(path: Path) -> Mapping[str, Any]:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            problem = f"has {size_bytes} bytes, and at most {MAX_JSON_BYTES} are read"
            raise DamagedError(str(path), problem)
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingFileError(str(path), "is missing") from error
    return load_json_object(data, str(path))


def _refuse_layers(config: Mapping[str, Any], tensors: Mapping[str, TensorInFile]) -> None:
    """Raise RequestError if config.json has more layers than the files can hold.

    Before a list of all layers is made, which a wrong number could make enormous.
    """
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise invalid(
            "config.json: num_hidden_layers",
            f"{counted(layers, 'layer')}, and the files hold "
            f"{counted(len(tensors), 'tensor')} in all",
            "give the config.json that belongs to the files",
        )


def _refuse_experts(foreign: ForeignModel, tensors: Mapping[str, TensorInFile]) -> None:
    """Raise RequestError if there are more experts than the files can hold, as of layers."""
    names, model = foreign.architecture.experts, foreign.model
    count = model.experts.count * (model.layers - model.experts.dense_layers)
    if names is not None and count > len(tensors):
        raise invalid(
            f"config.json: {names.counts[0]}",
            f"{counted(count, 'expert')} in all layers, and the files hold "
            f"{counted(len(tensors), 'tensor')} in all",
            "give the config.json that belongs to the files",
        )


def _copied(transfer: Transfer, wanted: tuple[Transfer, ...]) -> Transfer:
    """Read the head from the embedding."""
    if transfer.logical != HEAD:
        return transfer
    embedding = next(each for each in wanted if each.logical == EMBEDDING)
    return Transfer(embedding.foreign, transfer.shape, HEAD, "none")


def _check(
    folder: Path,
    wanted: tuple[Transfer, ...],
    tensors: Mapping[str, TensorInFile],
    *,
    tied: bool,
) -> None:
    """Raise if a tensor is missing, has another shape, or has no place in a job."""
    for each in wanted:
        found = tensors.get(each.foreign)
        if found is None:
            raise DamagedError(str(folder), f"{each.foreign} is missing")
        if found.shape != each.shape:
            raise DamagedError(
                str(found.file),
                f"{each.foreign} is of shape {list(found.shape)}, and config.json makes it "
                f"{list(each.shape)}",
            )
        if not each.logical and np.any(found.read()):
            raise invalid(each.foreign, "holds values", "a job has no such parameter")
    # Some tools store the tied head as well. It is ignored, but only if it equals the embedding.
    if tied and _FOREIGN_HEAD in tensors:
        embedding = next(each.foreign for each in wanted if each.logical == EMBEDDING)
        head, table = tensors[_FOREIGN_HEAD], tensors[embedding]
        if head.shape != table.shape or not np.array_equal(head.read(), table.read()):
            raise invalid(
                "config.json: tie_word_embeddings",
                f"the files hold a {_FOREIGN_HEAD} of its own, which a tied model has no place for",
                "set it to false, or remove the tensor",
            )
    known = {each.foreign for each in wanted} | ({_FOREIGN_HEAD} if tied else set())
    extra = [n for n in sorted(tensors) if n not in known and not n.endswith(_IGNORED)]
    if extra:
        raise RequestError(
            f"{extra[0]}: no parameter of a job; such a model cannot be imported",
            fields=[(extra[0], "no parameter of a job; such a model cannot be imported")],
        )


def _parameters(
    wanted: tuple[Transfer, ...],
    tensors: Mapping[str, TensorInFile],
    foreign: ForeignModel,
    part_bytes: int,
) -> Iterator[Parameter]:
    """Every parameter of the job in its order; those of experts in parts."""
    by_name: dict[str, list[Transfer]] = {}
    for each in wanted:
        by_name.setdefault(each.logical, []).append(each)
    for name, shape in parameter_shapes(foreign.model).items():
        if is_state(name):
            yield Parameter(name, shape, partial(_zeros, shape))
        elif len(shape) < OF_EXPERTS:
            (transfer,) = by_name[name]
            yield Parameter(name, shape, partial(_read, transfer, tensors, foreign))
        else:
            expert = math.prod(shape[1:])
            step = max(1, part_bytes // (ITEM_BYTES["F32"] * expert)) * expert
            whole = shape[0] * expert
            for first in range(0, whole, step):
                part = first, min(first + step, whole)
                read = partial(_read_part, by_name[name], tensors, part)
                yield Parameter(name, shape, read, part)


def _zeros(shape: tuple[int, ...]) -> Floats:
    return np.zeros(shape, np.float32)


def _read(transfer: Transfer, tensors: Mapping[str, TensorInFile], foreign: ForeignModel) -> Floats:
    values = to_logical(tensors[transfer.foreign].read(), transfer.change, foreign.model.head_size)
    if transfer.logical == HEAD and foreign.head_scale != 1.0:
        values = values * np.float32(foreign.head_scale)
    return values


def _read_part(
    transfers: list[Transfer], tensors: Mapping[str, TensorInFile], part: tuple[int, int]
) -> Floats:
    """A part of a parameter from the tensors that it consists of; 1-D."""
    first, last = part
    values = np.empty(last - first, np.float32)
    for each in transfers:
        begin = each.at or 0
        low, high = max(first, begin), min(last, begin + each.elements)
        if low < high:
            read = tensors[each.foreign].read_range(low - begin, high - begin)
            values[low - first : high - first] = read
    return values
