"""Artifacts of code on storage: packed, written under their digest, fetched by every node.

An artifact is one file: a wheel as it is, or a folder packed into an archive. The archive has no
times, owners or compiled files, so the same folder gives the same bytes. Artifacts come from
storage and are not trusted: names that leave the folder, links, special files and more bytes than
code can need are refused.

For `code.uri`, a node's agent runs this module to fetch one artifact into a new folder:

    python -m megascale_checkpoint.artifacts --uri URI --sha256 DIGEST --to FOLDER

Exit status 0, or 1 with one line on stderr that says why.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from megascale_checkpoint.storage import Storage, join, open_storage, split
from megascale_common.node.process import PARENT_PID_VARIABLE, arm_parent_death
from megascale_common.service.errors import RequestError, ServiceError

WHEEL, PACKED = ".whl", ".tar.gz"
MAX_FILES = 20_000  # of one artifact: a large package has a few thousand
MAX_BYTES = 1 << 30  # of the artifact, and of what it unpacks to
CHUNK_BYTES = 1 << 20
_LEFT_OUT = frozenset({"__pycache__", ".git", ".hg", ".venv"})


def pack(folder: Path, target: Path) -> None:
    """Write all files of ``folder`` to ``target``, in the order of their names.

    Raises:
        RequestError: a link or special file is in it, or it is too large.
        OSError: a file cannot be read or written.
    """
    count = size_bytes = 0
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _files(folder):
            found = path.lstat()
            name = path.relative_to(folder).as_posix()
            if not stat.S_ISREG(found.st_mode):
                raise RequestError(f"{path} is not a plain file: replace it with a plain copy")
            count, size_bytes = count + 1, size_bytes + found.st_size
            _bound(count, size_bytes, str(folder))
            entry = tarfile.TarInfo(name)
            entry.size = found.st_size
            entry.mode = 0o755 if found.st_mode & stat.S_IXUSR else 0o644
            with path.open("rb") as content:
                archive.addfile(entry, content)
    if not count:
        raise RequestError(f"{folder} has no files: give the folder that holds the packages")


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(20, "not a folder", str(folder))
    for place, names, files in os.walk(folder, onerror=_raise):
        names[:] = sorted(name for name in names if name not in _LEFT_OUT)
        links = [name for name in names if (Path(place) / name).is_symlink()]
        for name in sorted([*files, *links]):
            if not name.endswith(".pyc"):
                yield Path(place) / name


def _raise(error: OSError) -> None:
    raise error


def unpack(file: Path, folder: Path, name: str) -> None:
    """Unpack the artifact ``file``, called ``name``, into the new ``folder``.

    Raises:
        RequestError: it is damaged, too large or unsafe to unpack, or a wheel that needs an
            installer.
    """
    folder.mkdir()
    try:
        if name.endswith(WHEEL):
            _unpack_wheel(file, folder)
        else:
            _unpack_folder(file, folder)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        EOFError,
        ValueError,
        OSError,
        zlib.error,
    ) as error:
        raise RequestError(f"{name} cannot be unpacked: {error}") from error


def _unpack_folder(file: Path, folder: Path) -> None:
    count = size_bytes = 0
    with tarfile.open(file, "r:gz") as archive:
        # Bounded entry by entry, before anything is written: a small archive can unpack to
        # terabytes.
        for entry in archive:
            count, size_bytes = count + 1, size_bytes + entry.size
            _bound(count, size_bytes, file.name)
            if not entry.isfile() and not entry.isdir():
                raise RequestError(f"{entry.name} is not a plain file: pack the folder again")
            content = archive.extractfile(entry) if entry.isfile() else None
            _place(folder, entry.name, content, bool(entry.mode & stat.S_IXUSR))


def _unpack_wheel(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as wheel:
        entries = wheel.infolist()
        _bound(len(entries), sum(entry.file_size for entry in entries), file.name)
        for entry in entries:
            first = entry.filename.partition("/")[0]
            if first.endswith(".data"):
                raise RequestError(
                    f"the wheel has {first}, which only an installer puts in place: "
                    "`pip install --target FOLDER WHEEL`, and push that folder"
                )
        for entry in entries:
            if entry.is_dir():
                _place(folder, entry.filename.rstrip("/"), None, False)
                continue
            # zipfile reads no more than the entry states, and checks its CRC.
            with wheel.open(entry) as content:
                _place(folder, entry.filename, content, False)


def _place(folder: Path, name: str, content: IO[bytes] | None, executable: bool) -> None:
    """Write one file, or make one folder if ``content`` is None, below ``folder``.

    No links are unpacked, so a name without ".." stays below ``folder``.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise RequestError(f"{name!r} leaves the artifact's folder")
    target = folder / path
    if content is None:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as copy:
        shutil.copyfileobj(content, copy, CHUNK_BYTES)
    target.chmod(0o755 if executable else 0o644)


def _bound(count: int, size_bytes: int, what: str) -> None:
    if count > MAX_FILES or size_bytes > MAX_BYTES:
        raise RequestError(
            f"{what} has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB: "
            "give code alone; data belongs on storage of its own"
        )


def digest(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def push(source: Path, folder_uri: str) -> tuple[str, str]:
    """Write a wheel or a folder to storage; return the artifact's URI and its SHA-256.

    Its name is its digest: an artifact of that name and size that is there already stays.

    Raises:
        RequestError: ``source`` is neither, or cannot be packed, or another file has the name.
        OSError: it cannot be read, or the storage does not take it.
    """
    storage = open_storage(folder_uri)
    with tempfile.TemporaryDirectory(prefix="megascale-code-") as scratch:
        file, end = source, WHEEL
        if source.is_dir():
            file, end = Path(scratch) / "packed", PACKED
            pack(source, file)
        elif not source.name.endswith(WHEEL):
            raise RequestError(f"{source} is neither a folder nor a wheel (.whl)")
        found = digest(file)
        name, size = f"{found}{end}", file.stat().st_size
        # Tried here, so that an artifact that nodes would refuse is never pushed.
        unpack(file, Path(scratch) / "tried", name)
        try:
            storage.write(name, _chunks(file))
        except FileExistsError:
            # Its name is its digest, so the size shows well enough whether it is the same.
            if storage.size(name) != size:
                raise RequestError(
                    f"{join(folder_uri, name)} does not have the bytes that it is named for: "
                    "remove it"
                ) from None
    return join(folder_uri, name), found


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            yield chunk


def fetch(uri: str, sha256: str, folder: Path) -> None:
    """Fetch an artifact, compare its digest, and unpack it into the new ``folder``.

    Raises:
        RequestError: there is none, its digest differs, or it cannot be unpacked.
        OSError: the storage does not answer.
    """
    place, name = split(uri)
    storage = open_storage(place)
    size = storage.size(name)
    if size is None:
        raise RequestError(f"code.uri {uri}: there is no such file")
    if size > MAX_BYTES:
        raise RequestError(f"code.uri {uri}: more than {MAX_BYTES >> 20} MiB")
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder.parent) as scratch:
        file = Path(scratch) / "artifact"
        _copy(storage, name, size, file)
        found = digest(file)
        if found != sha256:
            raise RequestError(
                f"code.uri {uri} has the digest {found}, and code.sha256 is {sha256}: push it "
                "again and update the job"
            )
        unpack(file, folder, name)


def _copy(storage: Storage, name: str, size: int, target: Path) -> None:
    buffer, offset = memoryview(bytearray(CHUNK_BYTES)), 0
    with target.open("wb") as copy:
        while offset < size:
            count = storage.read_into(name, offset, buffer[: size - offset])
            if not count:
                raise RequestError(f"{name} ends after {offset} of {size} bytes")
            copy.write(buffer[:count])
            offset += count


def main() -> int:
    """Fetch one artifact as the command line says; see the module's docstring."""
    if PARENT_PID_VARIABLE in os.environ:
        arm_parent_death()
    parser = argparse.ArgumentParser(prog="python -m megascale_checkpoint.artifacts")
    parser.add_argument("--uri", required=True, help="the artifact")
    parser.add_argument("--sha256", required=True, help="its digest")
    parser.add_argument("--to", type=Path, required=True, help="a folder that is not there yet")
    options = parser.parse_args()
    try:
        fetch(options.uri, options.sha256, options.to)
    except ServiceError as error:
        print(error.message.replace("\n", " "), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"code.uri {options.uri} cannot be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
