"""Fetch a complete checkpoint: copy it from its storage into a folder of this machine.

The manifest lists every file with its size and its xxh3-128, and holds the checksum of its own
canonical form. The client does not depend on ``xxhash``, so checksums are verified where that
package is installed and sizes everywhere; the result names which. The copy has the layout of the
original, because paths in a manifest are relative to its folder, and appears under its name only
when it is complete.

The client itself reads folders. For other storages the caller gives a function that opens them,
such as ``megascale_checkpoint.storage.open_storage``.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

from megascale.v1 import driver_pb2
from megascale_client.errors import DamagedCheckpoint, NotFound, NotPossible

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
CHUNK_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 64 << 20  # as the checkpoint service writes and reads them
_CHECKSUM_KEY = "xxh3"
# The folder of a checkpoint in that of its job, and how far it lies below that one.
_STEP_FOLDER, _STEP_DEPTH = re.compile(r"/attempts/attempt-\d+/step-\d+$"), 3

Progress = Callable[[int, int], None]


class Source(Protocol):
    """A storage's folder; errors are raised as OSError, or as errors of its own with a message."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill ``target`` from ``offset`` on; returns fewer bytes only at the file's end.

        FileNotFoundError when there is no file.
        """


OpenSource = Callable[[str], Source]


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """A copy of a checkpoint in a folder of this machine.

    Attributes:
        verified: checksums of all bytes, or only sizes because xxhash is not installed.
    """

    job: str
    step: int
    attempt: int
    folder: Path
    size_bytes: int
    verified: Literal["checksums", "sizes"]


class _Cancelled(Exception):
    """The caller was cancelled."""


async def chosen(
    checkpoints: AsyncIterator[driver_pb2.Checkpoint], job: str, step: int | None
) -> driver_pb2.Checkpoint:
    """The checkpoint of ``step`` among those of a job, newest first; None means the newest.

    Raises:
        NotFound: there is none.
    """
    steps = []
    async for checkpoint in checkpoints:
        if step is None or checkpoint.step == step:
            return checkpoint
        steps.append(str(checkpoint.step))
    if step is None:
        raise NotFound(f"job {job} has no complete checkpoint yet")
    known = f"it has those of steps {', '.join(steps)}" if steps else "it has none yet"
    raise NotFound(f"job {job} has no complete checkpoint of step {step}: {known}")


async def fetch(
    checkpoint: driver_pb2.Checkpoint,
    folder: Path,
    progress: Progress | None,
    open_source: OpenSource | None = None,
) -> FetchedCheckpoint:
    """Copy ``checkpoint`` into the new folder ``folder``; see AsyncClient.fetch_checkpoint."""
    cancelled = threading.Event()
    copying = asyncio.ensure_future(
        asyncio.to_thread(_fetch, checkpoint, folder, progress, cancelled, open_source)
    )
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        # The thread cannot be cancelled, only asked to stop; it removes the partial copy first.
        cancelled.set()
        await asyncio.wait([copying])
        if not copying.cancelled():
            copying.exception()  # marks it as retrieved, or asyncio would log a warning
        raise


def _fetch(
    checkpoint: driver_pb2.Checkpoint,
    folder: Path,
    progress: Progress | None,
    cancelled: threading.Event,
    open_source: OpenSource | None,
) -> FetchedCheckpoint:
    name, source = _source_of(checkpoint.manifest_uri, open_source)
    folder = Path(os.path.abspath(folder.expanduser()))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotPossible(
            f"{folder} is taken: give a folder that does not exist yet, or an empty one"
        )
    hasher = _hasher()
    data = _read_manifest(source, f"{name}/{MANIFEST}")
    manifest = _decode(data, f"{name}/{MANIFEST}", hasher)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.partial-{uuid.uuid4().hex[:8]}"
        partial.mkdir()
    except OSError as error:
        raise NotPossible(
            f"{folder.parent}: {error.strerror}: give a folder that you can write to"
        ) from None
    try:
        _Copy(name, source, partial, manifest, hasher, progress, cancelled).run()
        # The manifest comes last, the rename after it: a folder of the final name is complete.
        (partial / MANIFEST).write_bytes(data)
        partial.replace(folder)
    except OSError as error:
        raise NotPossible(f"{error.filename or folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return FetchedCheckpoint(
        checkpoint.job,
        checkpoint.step,
        checkpoint.attempt,
        folder,
        sum(file["size_bytes"] for file in manifest["files"]),
        "sizes" if hasher is None else "checksums",
    )


class _Copy:
    """Copies all files of one manifest."""

    def __init__(
        self,
        name: str,
        source: Source,
        target: Path,
        manifest: dict[str, Any],
        hasher: Any,
        progress: Progress | None,
        cancelled: threading.Event,
    ) -> None:
        self._name = name
        self._source = source
        self._target = target
        self._files = manifest["files"]
        self._hasher = hasher
        self._progress = progress
        self._cancelled = cancelled
        self._done_bytes = 0
        self._total_bytes = sum(file["size_bytes"] for file in self._files)

    def run(self) -> None:
        """Copy file by file; raises at the first that differs from the manifest."""
        self._report(0)
        for file in self._files:
            self._copy(file)

    def _copy(self, file: dict[str, Any]) -> None:
        path = f"{self._name}/{file['path']}"
        target = self._target / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        # Hashed while it is copied: a second pass would read the whole checkpoint again.
        digest = self._hasher() if self._hasher is not None else None
        size_bytes = 0
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with target.open("wb") as writer:
            while True:
                if self._cancelled.is_set():
                    raise _Cancelled
                try:
                    with _storage_errors(path):
                        count = self._source.read_into(file["path"], size_bytes, buffer)
                except FileNotFoundError:
                    raise DamagedCheckpoint(f"{path}: is missing") from None
                if not count:
                    break
                chunk = buffer[:count]
                writer.write(chunk)
                size_bytes += len(chunk)
                if digest is not None:
                    digest.update(chunk)
                self._report(len(chunk))
        if size_bytes != file["size_bytes"]:
            raise DamagedCheckpoint(
                f"{path}: has {size_bytes} bytes where {file['size_bytes']} were written"
            )
        if digest is not None and digest.hexdigest() != file["xxh3"]:
            raise DamagedCheckpoint(f"{path}: fails its checksum")

    def _report(self, count: int) -> None:
        self._done_bytes += count
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class _Folder:
    """A folder of this machine as a source; nothing below the job's folder is read by a link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside = _STEP_FOLDER.search(str(folder)) is not None

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        with self._opened(path) as file:
            file.seek(offset)
            return file.readinto(target)

    def _opened(self, path: str) -> io.BufferedReader:
        # A link below the job's folder could make the copy read any file of this user's.
        place, parts = self._folder, PurePosixPath(path).parts
        for _ in range(_STEP_DEPTH if self._inside else 0):
            parts = (place.name, *parts)
            place = place.parent
        for part in parts:
            place = place / part
            if place.is_symlink():
                text = "a symbolic link, and nothing below a checkpoint folder is followed"
                raise OSError(errno.ELOOP, text, str(place))
        return place.open("rb")


def _source_of(manifest_uri: str, open_source: OpenSource | None) -> tuple[str, Source]:
    """Name and source of a manifest's folder: an absolute path, file:///path or another URI."""
    parts = urlsplit(manifest_uri)
    if parts.scheme in ("", "file") and parts.netloc in ("", "localhost"):
        folder = Path(unquote(parts.path) if parts.scheme else manifest_uri).parent
        return str(folder), _Folder(folder)
    if open_source is None:
        raise NotPossible(
            f"{manifest_uri}: this client reads folders only; give open_source (such as "
            "megascale_checkpoint.storage.open_storage), or copy it with the storage's own tool"
        )
    uri = manifest_uri.rpartition("/")[0]
    with _storage_errors(uri):
        return uri, open_source(uri)


@contextmanager
def _storage_errors(name: str) -> Iterator[None]:
    """Raises the errors of a storage of another package as errors of the client."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPossible(f"{name}: {error.strerror or error}") from None
    except Exception as error:  # of the package that reads it, whose messages are for people
        raise NotPossible(f"{name}: {error}") from error


def _read_manifest(source: Source, name: str) -> bytes:
    data, buffer = bytearray(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with _storage_errors(name):
            while count := source.read_into(MANIFEST, len(data), buffer):
                data += buffer[:count]
                if len(data) > MAX_MANIFEST_BYTES:
                    break
    except FileNotFoundError as error:
        raise NotPossible(
            f"{name}: {error.strerror or error}: checkpoints are copied from their storage, "
            "so fetch on a machine that sees it"
        ) from None
    if len(data) > MAX_MANIFEST_BYTES:
        limit = f"manifests have {MAX_MANIFEST_BYTES} bytes at most"
        raise DamagedCheckpoint(f"{name}: is no manifest: {limit}, and it has more")
    return bytes(data)


def _decode(data: bytes, path: str, hasher: Any) -> dict[str, Any]:
    """The manifest's values; its own checksum is verified where ``hasher`` is given."""
    try:
        values = json.loads(data)
        expected = values.pop(_CHECKSUM_KEY)
        version = values["schema_version"]
        files = [(file["path"], file["size_bytes"], file["xxh3"]) for file in values["files"]]
        for name, size_bytes, xxh3 in files:
            if (
                not isinstance(name, str)
                or type(size_bytes) is not int
                or not isinstance(xxh3, str)
            ):
                raise TypeError
    # RecursionError: lists within lists, some thousand times.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpoint(f"{path}: is not a manifest") from None
    if version != SCHEMA_VERSION:
        raise NotPossible(
            f"{path}: has schema version {version}; this client reads {SCHEMA_VERSION}"
        )
    if hasher is not None:
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        if hasher(canonical).hexdigest() != expected:
            raise DamagedCheckpoint(f"{path}: fails its checksum")
    # A damaged or foreign manifest must not make the copy write outside its folder.
    for name, _, _ in files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or name == MANIFEST:
            raise DamagedCheckpoint(
                f"{path}: names the file {name!r}, which is outside the checkpoint"
            )
    assert isinstance(values, dict)
    return values


def _hasher() -> Any:
    """xxh3-128, or None where the package is not installed."""
    if importlib.util.find_spec("xxhash") is None:
        return None
    return importlib.import_module("xxhash").xxh3_128
