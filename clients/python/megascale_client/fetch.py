"""Fetch a complete checkpoint: copy it from its storage into a folder of this machine.

The manifest lists every file with its size and its xxh3-128, and holds the checksum of its own
canonical form. The client does not depend on ``xxhash``, so checksums are verified where that
package is installed and sizes everywhere; the result names which. The copy has the layout of the
original, because paths in a manifest are relative to its folder, and appears under its name only
when it is complete.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from megascale.v1 import driver_pb2
from megascale_client.errors import DamagedCheckpoint, NotPossible

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
CHUNK_BYTES = 4 << 20
_CHECKSUM_KEY = "xxh3"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """What was fetched.

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


async def fetch(
    checkpoint: driver_pb2.Checkpoint, folder: Path, progress: Progress | None
) -> FetchedCheckpoint:
    """Copy ``checkpoint`` into the new folder ``folder``; see AsyncClient.fetch_checkpoint."""
    cancelled = threading.Event()
    copying = asyncio.ensure_future(
        asyncio.to_thread(_fetch, checkpoint, folder, progress, cancelled)
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
) -> FetchedCheckpoint:
    source = _folder_of(checkpoint.manifest_uri)
    folder = Path(os.path.abspath(folder.expanduser()))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotPossible(
            f"{folder} is taken: give a folder that does not exist yet, or an empty one"
        )
    hasher = _hasher()
    data = _read_manifest(source / MANIFEST)
    manifest = _decode(data, source / MANIFEST, hasher)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.partial-{uuid.uuid4().hex[:8]}"
        partial.mkdir()
    except OSError as error:
        raise NotPossible(
            f"{folder.parent}: {error.strerror}: give a folder that you can write to"
        ) from None
    try:
        _Copy(source, partial, manifest, hasher, progress, cancelled).run()
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
        source: Path,
        target: Path,
        manifest: dict[str, Any],
        hasher: Any,
        progress: Progress | None,
        cancelled: threading.Event,
    ) -> None:
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
        path = self._source / file["path"]
        target = self._target / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = self._hasher() if self._hasher is not None else None
        size_bytes = 0
        try:
            reader = path.open("rb")
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path}: is missing") from None
        with reader, target.open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                if self._cancelled.is_set():
                    raise _Cancelled
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


def _folder_of(manifest_uri: str) -> Path:
    """The folder of a manifest's URI, an absolute path or file:///path."""
    parts = urlsplit(manifest_uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise NotPossible(
            f"{manifest_uri}: only file storage can be fetched from; "
            "copy it with the storage's own tool"
        )
    return Path(unquote(parts.path) if parts.scheme else manifest_uri).parent


def _read_manifest(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotPossible(
            f"{path}: {error.strerror}: checkpoints are copied from their storage, "
            "so fetch on a machine that sees it"
        ) from None


def _decode(data: bytes, path: Path, hasher: Any) -> dict[str, Any]:
    """The manifest's values; its own checksum is verified where ``hasher`` is given."""
    try:
        values = json.loads(data)
        expected = values.pop(_CHECKSUM_KEY)
        version = values["schema_version"]
        files = [(file["path"], file["size_bytes"], file["xxh3"]) for file in values["files"]]
    except (ValueError, KeyError, TypeError, AttributeError):
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
