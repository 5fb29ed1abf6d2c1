"""Artifacts of code on storage: written under their digest, fetched and checked by every node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megascale_checkpoint.artifacts import packing
from megascale_checkpoint.storage import Storage, join, open_storage, split
from megascale_common.service.errors import RequestError


def push(source: Path, folder_uri: str) -> tuple[str, str]:
    """Write a wheel or a folder to storage; returns the artifact's URI and its SHA-256.

    Its name is its digest: one that is there already, with as many bytes, is left as it is.

    Raises:
        RequestError: it is neither, or cannot be packed, or another file has the name.
        OSError: it cannot be read, or the storage does not take it.
    """
    storage = open_storage(folder_uri)
    with tempfile.TemporaryDirectory(prefix="megascale-code-") as scratch:
        file, end = source, packing.WHEEL
        if source.is_dir():
            file, end = Path(scratch) / "packed", packing.PACKED
            packing.pack(source, file)
        elif not source.name.endswith(packing.WHEEL):
            raise RequestError(f"{source} is neither a folder nor a wheel (.whl)")
        found = packing.digest(file)
        name, size = f"{found}{end}", file.stat().st_size
        # Whoever fetches it unpacks it: what a node would refuse is refused here.
        packing.unpack(file, Path(scratch) / "tried", name)
        try:
            storage.write(name, _chunks(file))
        except FileExistsError:
            if storage.size(name) != size:
                raise RequestError(
                    f"{join(folder_uri, name)} has other bytes than its name says: remove it"
                ) from None
    return join(folder_uri, name), found


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        while chunk := content.read(packing.CHUNK_BYTES):
            yield chunk


def fetch(uri: str, sha256: str, folder: Path) -> None:
    """Fetch an artifact, compare its digest, and unpack it into the new ``folder``.

    Raises:
        RequestError: there is none, its digest is another, or it cannot be unpacked.
        OSError: the storage does not answer.
    """
    place, name = split(uri)
    storage = open_storage(place)
    size = storage.size(name)
    if size is None:
        raise RequestError(f"code.uri {uri}: there is no such file")
    if size > packing.MAX_BYTES:
        raise RequestError(f"code.uri {uri}: more than {packing.MAX_BYTES >> 20} MiB")
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder.parent) as scratch:
        file = Path(scratch) / "artifact"
        _copy(storage, name, size, file)
        found = packing.digest(file)
        if found != sha256:
            raise RequestError(
                f"code.uri {uri} has the digest {found}, and code.sha256 is {sha256}: push it "
                "again and update the job"
            )
        packing.unpack(file, folder, name)


def _copy(storage: Storage, name: str, size: int, target: Path) -> None:
    buffer, offset = memoryview(bytearray(packing.CHUNK_BYTES)), 0
    with target.open("wb") as copy:
        while offset < size:
            count = storage.read_into(name, offset, buffer[: size - offset])
            if not count:
                raise RequestError(f"{name} ends after {offset} of {size} bytes")
            copy.write(buffer[:count])
            offset += count
