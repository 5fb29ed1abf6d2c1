"""An artifact of code as one file: a wheel as it is, or a folder as a packed file.

A packed folder has no times, owners or compiled files, so the same folder gives the same bytes.
What is unpacked comes from storage: names that leave the folder, links and special files are
refused, and so is more than a folder of code can need.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from megascale_common.service.errors import RequestError

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
                raise RequestError(f"{path} is no plain file: replace it by a copy of what it is")
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
        RequestError: it is damaged, too large, holds what cannot be unpacked safely, or is a wheel
            that only an installer can put in place.
    """
    folder.mkdir()
    try:
        if name.endswith(WHEEL):
            _unpack_wheel(file, folder)
        else:
            _unpack_folder(file, folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError, gzip.BadGzipFile) as error:
        raise RequestError(f"{name} cannot be unpacked: {error}") from error


def _unpack_folder(file: Path, folder: Path) -> None:
    count = size_bytes = 0
    with tarfile.open(file, "r:gz") as archive:
        for entry in archive:
            count, size_bytes = count + 1, size_bytes + entry.size
            _bound(count, size_bytes, file.name)
            if not entry.isfile() and not entry.isdir():
                raise RequestError(f"{entry.name} is no plain file: pack the folder again")
            archive.extract(entry, folder, filter="data")


def _unpack_wheel(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as wheel:
        entries = wheel.infolist()
        _bound(len(entries), sum(entry.file_size for entry in entries), file.name)
        for entry in entries:
            path = PurePosixPath(entry.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
                raise RequestError(f"{entry.filename!r} leaves the wheel's folder")
            if path.parts[0].endswith(".data"):
                raise RequestError(
                    f"the wheel has {path.parts[0]}, which only an installer puts in place: "
                    "`pip install --target FOLDER WHEEL`, and push that folder"
                )
        for entry in entries:
            target = folder / entry.filename
            if entry.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as source, target.open("xb") as copy:
                # zipfile reads no more than the entry states, and checks its sum.
                shutil.copyfileobj(source, copy, CHUNK_BYTES)


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
