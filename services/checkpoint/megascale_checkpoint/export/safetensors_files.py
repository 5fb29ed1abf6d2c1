"""Safetensors files tensor by tensor: written in one pass, read by ranges; nothing is unpickled.

The safetensors library writes a file from tensors that are all in memory, and cannot read bfloat16
into numpy, which has no such type. So the format (https://github.com/huggingface/safetensors) is
implemented here: the length of a JSON header, the header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale_checkpoint.checksums import is_count, load_json_object
from megascale_checkpoint.commit.shard_file import MAX_DIMENSIONS, MAX_HEADER_BYTES
from megascale_checkpoint.export.values import CARRIERS, Floats, widen
from megascale_common.service.errors import DamagedError

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIGNMENT = 8
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor of known size whose bytes are made only when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], memoryview]


def write_files(
    folder: Path, tensors: Iterable[TensorToWrite], dtype: str, shard_bytes: int
) -> int:
    """Write ``tensors`` of ``dtype`` into files of at most ``shard_bytes``, with an index.

    A larger tensor gets a file of its own. A single file has no index. Returns the bytes of all
    tensors.
    """
    shards: list[list[TensorToWrite]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        size = _size(tensor, dtype)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return _write(folder / SINGLE, shards[0], dtype)
    total, places = 0, dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write(folder / name, shard, dtype)
        places |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _size(tensor: TensorToWrite, dtype: str) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[dtype]


def _write(path: Path, tensors: list[TensorToWrite], dtype: str) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for tensor in tensors:
        end = offset + _size(tensor, dtype)
        header[tensor.name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(_LENGTH.pack(len(body)) + body)
        for tensor in tensors:
            data = tensor.make()
            assert len(data) == _size(tensor, dtype), tensor.name
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return offset


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """Place of a tensor in ``file``; ``start`` counts from the file's beginning."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    def read(self) -> Floats:
        """The values in float32, in the tensor's shape.

        Raises:
            DamagedError: the file is cut short.
            OSError: it cannot be read.
        """
        return self.read_range(0, math.prod(self.shape)).reshape(self.shape)

    def read_range(self, first: int, last: int) -> Floats:
        """The values ``first`` to ``last`` (exclusive) of the flattened tensor; as :meth:`read`."""
        item = ITEM_BYTES[self.dtype]
        data, start = bytearray((last - first) * item), self.start + first * item
        with self.file.open("rb", buffering=0) as file:
            view, done = memoryview(data), 0
            while done < len(data):
                count = os.preadv(file.fileno(), [view[done:]], start + done)
                if count == 0:
                    raise DamagedError(str(self.file), f"ends at byte {start + done}")
                done += count
        return widen(memoryview(data), self.dtype)


def read_tensors(file: Path) -> Mapping[str, TensorInFile]:
    """The tensors of a file, by name; only its header is read.

    Raises:
        DamagedError: it is not a safetensors file, is cut short, or holds anything but floats.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
        # Compared before it is read: any other file has an arbitrary number here.
        if length > size - len(prefix):
            raise DamagedError(str(file), "is not a safetensors file, or is cut short")
        if length > MAX_HEADER_BYTES:
            limit = f"at most {MAX_HEADER_BYTES} are read: save it in several files"
            raise DamagedError(str(file), f"has a header of {length} bytes, and {limit}")
        body = opened.read(length)
    header = load_json_object(body, str(file))
    header.pop("__metadata__", None)
    try:
        found = {
            name: _tensor(file, name, entry, _LENGTH.size + length, size)
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(str(file), f"its safetensors header cannot be read: {error}") from error
    return found


def _tensor(file: Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> TensorInFile:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    low, high = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in CARRIERS:
        known = ", ".join(CARRIERS)
        raise DamagedError(
            str(file), f"{name[:80]} is of type {dtype!r:.20}, and only {known} can be read"
        )
    fits = len(shape) <= MAX_DIMENSIONS and all(map(is_count, (low, high, *shape)))
    if not fits or high - low != math.prod(shape) * ITEM_BYTES[dtype] or start + high > size:
        raise DamagedError(str(file), f"{name[:80]} does not lie in the file as its header says")
    return TensorInFile(file, dtype, shape, start + low, high - low)
