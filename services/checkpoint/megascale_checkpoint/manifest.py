"""manifest.json: what one checkpoint consists of. It lies in the checkpoint's folder, beside the
files that it names.

It is written after all files are durable and before the COMMIT record that makes the checkpoint
exist. Paths in it are relative to its own folder, so that a checkpoint can be copied elsewhere and
still be read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from megascale_checkpoint.checksums import dump_record, load_record
from megascale_checkpoint.errors import DamagedError, RequestError
from megascale_checkpoint.storage import Storage, open_storage, split

SCHEMA_VERSION = 1
NAME = "manifest.json"


class MissingError(DamagedError):
    """There is no manifest where one was written."""


def attempt_folder(attempt: int) -> str:
    """Folder of an attempt's checkpoints below the job's uri."""
    return f"attempts/attempt-{attempt:06d}"


def step_folder(attempt: int, step: int) -> str:
    """Folder of a checkpoint below the job's uri: fresh for every attempt, so nothing is ever
    overwritten.
    """
    return f"{attempt_folder(attempt)}/step-{step:09d}"


def rank_file(rank: int) -> str:
    """Name of a rank's file in the checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class File:
    """One file: ``path`` relative to the manifest's folder, ``xxh3`` (128 bits, hexadecimal) of all
    its bytes.
    """

    path: str
    size_bytes: int
    xxh3: str
    rank: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    ``layout`` holds the sizes of tp, cp, dp, pp; ``rank_small_states`` those that differ from rank
    0's.
    """

    job: str
    attempt: int
    step: int
    world_size: int
    layout: dict[str, int]
    files: tuple[File, ...]
    small_state: dict[str, Any]
    rank_small_states: dict[str, dict[str, Any]]
    created_at: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def small_state_of(self, rank: int, layout_digest: str) -> dict[str, Any]:
        """Small state (data position, random state, counters) of a rank.

        Rank 0's where the rank held something else when this was written, or did not exist.
        """
        same = any(file.rank == rank and file.layout_digest == layout_digest for file in self.files)
        return self.rank_small_states.get(str(rank), self.small_state) if same else self.small_state


def differing(small_states: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The small states that are not rank 0's."""
    return {
        str(rank): state for rank, state in sorted(small_states.items()) if state != small_states[0]
    }


def now() -> str:
    """The time as manifests and log records write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def encode(manifest: Manifest) -> bytes:
    """Bytes of manifest.json."""
    return dump_record({"schema_version": SCHEMA_VERSION, **asdict(manifest)})


def decode(data: bytes, file: str) -> Manifest:
    """The inverse of :func:`encode`.

    Raises:
        DamagedError: ``file`` is not what was written, or of a newer schema.
    """
    values = load_record(data, file)
    version = values.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise DamagedError(file, f"has schema version {version}; this build reads {SCHEMA_VERSION}")
    values["files"] = tuple(File(**item) for item in values["files"])
    return Manifest(**values)


def load(uri: str) -> tuple[Storage, Manifest]:
    """The manifest at ``uri`` and the storage rooted at its folder.

    Raises:
        MissingError: there is none.
        DamagedError: it is not what was written.
        RequestError: the uri is not supported.
        OSError: the storage does not answer, which says nothing about the checkpoint.
    """
    folder, name = split(uri)
    if not name:
        raise RequestError(f"manifest uri {uri!r} does not name a file")
    storage = open_storage(folder)
    try:
        data = storage.read(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError(uri, "is missing") from error
    return storage, decode(data, uri)


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Raise DamagedError naming the first file that is missing or has another size."""
    for file in manifest.files:
        check_size(storage, file)


def check_size(storage: Storage, file: File) -> None:
    """Raise DamagedError when the file is missing or has another size."""
    size = storage.size(file.path)
    if size is None:
        raise DamagedError(f"{storage.uri}/{file.path}", "is missing")
    if size != file.size_bytes:
        raise DamagedError(
            f"{storage.uri}/{file.path}", f"has {size} bytes where {file.size_bytes} were written"
        )
