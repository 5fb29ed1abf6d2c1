"""Check every byte of a checkpoint against its manifest, and that it has a meaning for a reader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import xxhash

from megascale_checkpoint.checksums import CHUNK_BYTES
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import Record
from megascale_checkpoint.commit.manifest import File, Manifest
from megascale_checkpoint.commit.shard_file import pieces_of
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import DamagedError, ServiceError
from megascale_job.visible import counted


def verify_commit(
    record: Record, manifest_uri: str, progress: Callable[[int], None] = lambda done: None
) -> list[str]:
    """The problems of a checkpoint, each with its file's name; none when it is whole.

    ``progress`` is called with the bytes of it that were read so far.
    """
    try:
        storage, manifest = manifests.load(manifest_uri, record.values["manifest_xxh3"])
    except (ServiceError, OSError) as error:
        return [str(error)]
    problems, before = _contradictions(record, manifest, manifest_uri), 0
    stored: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for file in manifest.files:

        def beat(count: int, before: int = before) -> None:
            progress(before + count)

        before += file.size_bytes
        try:
            verify_file(storage, file, beat)
            for each in pieces_of(storage, manifest, file):
                piece = each.piece
                key = piece.name, piece.state, piece.global_shape
                stored[key] += piece.flat_stop - piece.flat_start
        except (ServiceError, OSError) as error:
            problems.append(str(error))
    if not problems:  # else what is missing is named already
        problems += [
            f"{manifest_uri}: {name} ({state}) of shape {list(shape)} is stored with "
            f"{counted(count, 'value')}"
            for (name, state, shape), count in stored.items()
            if count != math.prod(shape)
        ]
    return problems


def _contradictions(record: Record, manifest: Manifest, manifest_uri: str) -> list[str]:
    """In what the manifest is not that of its COMMIT."""
    values = record.values
    return [
        f"{manifest_uri}: {name} is {getattr(manifest, name)}, and {values[name]} was committed"
        for name in ("attempt", "step", "job", "world_size", "size_bytes")
        if name in values and values[name] != getattr(manifest, name)
    ]


def verify_file(
    storage: Storage, file: File, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Read a whole file. Raises DamagedError when its size or checksum is not the manifest's."""
    name = f"{storage.uri}/{file.path}"
    manifests.check_size(storage, file)
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size_bytes)))
    offset = 0
    while offset < file.size_bytes:
        count = storage.read_into(file.path, offset, buffer[: file.size_bytes - offset])
        if count == 0:
            raise DamagedError(name, f"ends at byte {offset}: it is cut short")
        hasher.update(buffer[:count])
        offset += count
        progress(offset)
    if hasher.hexdigest() != file.xxh3:
        raise DamagedError(name, "fails its checksum")
