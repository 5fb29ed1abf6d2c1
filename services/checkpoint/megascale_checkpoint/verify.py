"""Check every byte of a checkpoint against its manifest."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from megascale_checkpoint import manifest as manifests
from megascale_checkpoint.checksums import CHUNK_BYTES
from megascale_checkpoint.commit_log import Record
from megascale_checkpoint.manifest import File
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import DamagedError, ServiceError


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
    problems, before = [], 0
    for file in manifest.files:

        def beat(count: int, before: int = before) -> None:
            progress(before + count)

        before += file.size_bytes
        try:
            verify_file(storage, file, beat)
        except (ServiceError, OSError) as error:
            problems.append(str(error))
    return problems


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
