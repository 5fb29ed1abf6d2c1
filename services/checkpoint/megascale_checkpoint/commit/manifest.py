"""manifest.json: the files, layout and small state of one checkpoint, in the checkpoint's folder.

It is written after all rank files are durable and before the COMMIT record that makes the
checkpoint exist. Its paths are relative to its own folder, so a checkpoint can be copied elsewhere
and still be read.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from megascale_checkpoint.checksums import (
    Count,
    Positive,
    checksum,
    convert,
    dump_record,
    load_record,
)
from megascale_checkpoint.storage import Storage, check_path, open_storage, read_bounded, split
from megascale_common.service.errors import (
    DamagedError,
    DataLossError,
    MissingFileError,
    RequestError,
)
from megascale_job.visible import counted

SCHEMA_VERSION = 1
NAME = "manifest.json"
# The largest job has 131,072 ranks with some 230 bytes each: 29 MiB. The rest is for small states
# that differ from rank 0's. Reading JSON of that size takes up to 2.4 GiB of memory.
MAX_MANIFEST_BYTES = 64 << 20


def attempt_folder(attempt: int) -> str:
    """Folder of an attempt's checkpoints below the job's uri."""
    return f"attempts/attempt-{attempt:06d}"


def step_folder(attempt: int, step: int) -> str:
    """Folder of a checkpoint below the job's uri.

    Each attempt has its own folders, so two attempts never write the same file.
    """
    return f"{attempt_folder(attempt)}/step-{step:09d}"


def rank_file(rank: int, writing: int = 1) -> str:
    """Name of a rank's file in the checkpoint's folder; ``writing`` counts its tries for a step."""
    again = f"-{writing}" if writing > 1 else ""
    return f"rank-{rank:05d}{again}.safetensors"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file.

    Attributes:
        path: relative to the manifest's folder.
        xxh3: xxh3-128 of all its bytes, hexadecimal.
        layout_digest: digest of the rank's shard layout when it was written.
    """

    path: str
    size_bytes: Count
    xxh3: str
    rank: Count
    layout_digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint.

    Attributes:
        layout: sizes of tp, cp, dp and pp; of ep if experts are split.
        small_state: small state of rank 0 (data position, random state, counters).
        rank_small_states: small states that differ from rank 0's, by rank.
    """

    job: str
    attempt: Positive
    step: Count
    world_size: Positive
    layout: dict[str, Positive]
    files: tuple[File, ...]
    small_state: dict[str, Any]
    rank_small_states: dict[str, dict[str, Any]]
    created_at: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def small_state_of(self, rank: int, layout_digest: str) -> dict[str, Any]:
        """The small state of a rank.

        Rank 0's if the layout has changed since: this rank held other pieces, or did not exist.
        """
        same = any(file.rank == rank and file.layout_digest == layout_digest for file in self.files)
        return self.rank_small_states.get(str(rank), self.small_state) if same else self.small_state


_AXES = ("tp", "cp", "dp", "pp")  # their product is the number of ranks


def differing(small_states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Small states that differ from rank 0's, for ``rank_small_states``."""
    return {
        str(rank): state for rank, state in sorted(small_states.items()) if state != small_states[0]
    }


def now() -> str:
    """The current time in UTC, ISO 8601 with milliseconds, as manifests and records write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def encode(manifest: Manifest) -> bytes:
    """Bytes of manifest.json."""
    values = msgspec.structs.asdict(manifest)
    files = [msgspec.structs.asdict(file) for file in manifest.files]
    return dump_record({**values, "schema_version": SCHEMA_VERSION, "files": files})


def decode(data: bytes, file: str) -> Manifest:
    """The inverse of :func:`encode`.

    Raises:
        DamagedError: ``file`` is not what was written, or has another schema version.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        problem = f"has {len(data)} bytes, and manifests have {MAX_MANIFEST_BYTES} at most"
        raise DamagedError(file, problem)
    values = load_record(data, file)
    version = values.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise DamagedError(file, f"has schema version {version}; this build reads {SCHEMA_VERSION}")
    manifest = convert(values, Manifest, file)
    _check_meaning(manifest, file)
    return manifest


def _check_meaning(manifest: Manifest, file: str) -> None:
    """Raise DamagedError if the fields contradict each other."""
    ranks, layout = {each.rank for each in manifest.files}, manifest.layout
    if len(ranks) != manifest.world_size or max(ranks) >= manifest.world_size:
        raise DamagedError(
            file,
            f"world_size is {manifest.world_size}, and it names files of "
            f"{counted(len(ranks), 'rank')}",
        )
    if all(axis in layout for axis in _AXES):  # some builds have written none
        count = math.prod(layout[axis] for axis in _AXES)
        if count != manifest.world_size:
            raise DamagedError(
                file,
                f"layout is of {counted(count, 'rank')}, and world_size is {manifest.world_size}",
            )
    if len({each.path for each in manifest.files}) != len(manifest.files):
        raise DamagedError(file, "files names one file twice")
    for each in manifest.files:
        try:
            check_path(each.path, "its folder")
        except RequestError as error:
            raise DamagedError(file, str(error)) from error
    for rank in manifest.rank_small_states:
        if not rank.isdecimal() or int(rank[:20]) >= manifest.world_size:
            raise DamagedError(file, f"rank_small_states names rank {rank[:20]!r}")


def write(storage: Storage, path: str, manifest: Manifest) -> bytes:
    """Write a manifest durably, or find one that names the same files; return its bytes.

    Raises:
        DamagedError: no reader could read it, because of what a rank has reported.
        DataLossError: ``path`` holds another manifest.
        OSError: the storage does not answer; the manifest can be there all the same.
    """
    data = encode(manifest)
    decode(data, path)  # refuse now what no restore could read later
    try:
        if storage.create(path, data):
            return data
    except OSError:
        # The reply may be lost, or the name not yet durable.
        if storage.size(path) is None:
            raise
    # An earlier committer, or an earlier try, wrote it and failed before the COMMIT. No file is
    # ever overwritten, so it must name the same files.
    found = read_bounded(storage, path, MAX_MANIFEST_BYTES, f"{storage.uri}/{path}")
    if decode(found, path).files != manifest.files:
        raise DataLossError(f"{storage.uri}/{path} names other files than the ranks reported")
    if not storage.confirm(path, found):
        raise DataLossError(f"{storage.uri}/{path} was changed or removed while it was committed")
    return found


def commit_fields(manifest: Manifest, path: str, data: bytes) -> dict[str, Any]:
    """Fields of the COMMIT record for a manifest whose bytes at ``path`` are ``data``."""
    return {
        "job": manifest.job,
        "manifest": path,
        "manifest_xxh3": checksum(data),
        "world_size": manifest.world_size,
        "size_bytes": manifest.size_bytes,
    }


def load(uri: str, xxh3: str = "") -> tuple[Storage, Manifest]:
    """The storage rooted at the manifest's folder, and the manifest at ``uri``.

    Args:
        xxh3: checksum of the manifest's bytes in the COMMIT record; "" if the caller has none, as
            for a plan that an older build has stored.

    Raises:
        MissingFileError: there is no manifest.
        DamagedError: it is not what was written, or not what was committed.
        RequestError: the uri is not supported.
        OSError: the storage does not answer, which is no evidence of damage.
    """
    folder, name = split(uri)
    if not name:
        raise RequestError(f"manifest uri {uri!r} does not name a file")
    storage = open_storage(folder)
    try:
        data = read_bounded(storage, name, MAX_MANIFEST_BYTES, uri)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(uri, "is missing") from error
    manifest = decode(data, uri)
    if xxh3 and checksum(data) != xxh3:
        raise DamagedError(uri, "is not the manifest that was committed")
    return storage, manifest


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Raise DamagedError for the first file that is missing or has another size."""
    for file in manifest.files:
        check_size(storage, file)


def check_size(storage: Storage, file: File) -> None:
    """Raise DamagedError if the file is missing or has another size."""
    size = storage.size(file.path)
    if size is None:
        raise DamagedError(f"{storage.uri}/{file.path}", "is missing")
    if size != file.size_bytes:
        raise DamagedError(
            f"{storage.uri}/{file.path}", f"has {size} bytes where {file.size_bytes} were written"
        )
