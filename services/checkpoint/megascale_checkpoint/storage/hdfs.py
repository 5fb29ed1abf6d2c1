"""HdfsStorage: a folder of HDFS, through the native client (no Java on the nodes).

A file is written under a temporary name, synced to the disks of its DataNodes, closed, and renamed
without overwriting: the NameNode decides atomically who gets the name.

Settings are Hadoop's own: ``HADOOP_CONF_DIR`` (for the names of clusters with several NameNodes),
``HADOOP_USER_NAME``, a Kerberos ticket.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import hdfs_native

from megascale_checkpoint.storage.protocol import check_path, reads_as
from megascale_common.service.errors import RequestError

# Calls of the HDFS client: bounded in time, and with the errors that :class:`Storage` promises.
#
# The client waits without limit for a NameNode that has accepted its connection and does not
# answer. So each call runs in a thread of its own, which is left behind when its time is over; the
# number of such threads is bounded.

T = TypeVar("T")
MAX_CALLS = 64  # at once, those left behind included
_slots = threading.BoundedSemaphore(MAX_CALLS)
# Names of Java exceptions, by what they mean.
_ERRNOS = (
    ("AccessControlException|SaslException|InvalidToken", errno.EACCES),
    ("PathIsNotEmptyDirectory", errno.ENOTEMPTY),
    ("ParentNotDirectory|is not a directory", errno.ENOTDIR),
    ("QuotaExceeded", errno.EDQUOT),
    ("SafeMode|StandbyException|RetriableException", errno.EHOSTDOWN),
    ("DiskOutOfSpace|could only be replicated to 0 nodes|could only be written to 0", errno.ENOSPC),
)


def bounded(call: Callable[..., T], *arguments: Any, limit_s: float) -> T:
    """The call's result, or the error that it raises.

    Raises:
        TimeoutError: it takes longer than ``limit_s``. Its thread is left behind, and whether the
            call takes effect is unknown.
    """
    if not _slots.acquire(timeout=limit_s):
        raise TimeoutError(errno.ETIMEDOUT, f"{MAX_CALLS} calls hang: HDFS does not answer")
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*arguments))
        # The client's panics are no Exceptions.
        except BaseException as error:
            errors.append(error)
        finally:
            _slots.release()

    thread = threading.Thread(target=run, name="hdfs", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, f"HDFS does not answer within {limit_s:g} s")
    return results[0]


@contextmanager
def mapped(name: str) -> Iterator[None]:
    """Raise OSError with ``name``, the first line of what HDFS reports, and a remedy if known."""
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:
        raise type(error)(error.errno or _default(error), _text(error), name) from error
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EHOSTDOWN
        raise OSError(number, _remedied(number, _text(error)), name) from error
    except RuntimeError as error:
        text = _text(error)
        number = next((no for words, no in _ERRNOS if re.search(words, text)), errno.EIO)
        raise OSError(number, _remedied(number, text), name) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise OSError(errno.EIO, f"the HDFS client failed: {_text(error)}", name) from error


def _default(error: OSError) -> int:
    return errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EEXIST


def _text(error: BaseException) -> str:
    """The message without Java's stack."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return re.split(r"\n|\\n", text, maxsplit=1)[0].removeprefix("RPCError(").strip()


def _remedied(number: int, text: str) -> str:
    remedies = {
        errno.EACCES: "give the user of the nodes (HADOOP_USER_NAME, or the Kerberos ticket) the "
        "right to write there",
        errno.EHOSTDOWN: "check host and port of the NameNode, and that it is up",
        errno.ETIMEDOUT: "check that the NameNode and its DataNodes are up",
        errno.EDQUOT: "raise the folder's quota, or free space",
    }
    return f"{text}: {remedies[number]}" if number in remedies else text


# Of the client itself, which would try for three minutes by default.
_CLIENT = {
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "200",
    "dfs.client.failover.sleep.max.millis": "2000",
    "dfs.client.socket-timeout": "15000",
}
CALL_S = 15.0  # of one call to the NameNode, its tries included
DATA_S = 60.0  # of one chunk to or from DataNodes
WRITE_BYTES = 16 * 2**20  # at once, so that a slow DataNode is no stall
UNFINISHED = "."  # temporary names start with it


class HdfsStorage:
    """A folder of HDFS. See :class:`Storage` for its verbs.

    Args:
        uri: hdfs://host:port/path, or hdfs://cluster/path with a cluster of HADOOP_CONF_DIR.

    Raises:
        RequestError: the URI names no NameNode, or one that no configuration knows.
    """

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        if not parts.netloc or parts.query or parts.fragment:
            raise RequestError(f"checkpoint uri {uri!r} names no host: give hdfs://host:port/path")
        self._root = "/" + unquote(parts.path).strip("/")
        self._server = f"hdfs://{parts.netloc}"
        self._uri = f"{self._server}{parts.path.rstrip('/')}"

    @property
    def uri(self) -> str:
        """hdfs://host:port/path."""
        return self._uri

    def check(self) -> None:
        """See :meth:`Storage.check`; also finds out whether a DataNode takes data."""
        name = self._temporary(self._root, "check")
        try:
            self._write(name, [b"check"])
        finally:
            with suppress(OSError):
                self._remove(name)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        target = self._at(path)
        folder, _, name = target.rpartition("/")
        temporary = self._temporary(folder, name)
        try:
            size = self._write(temporary, chunks)
            with mapped(self._name(target)):
                bounded(self._client.rename, temporary, target, False, limit_s=CALL_S)
        except BaseException:
            # Removed by a later attempt, or renamed although the reply was lost, or to be removed
            # by the next attempt where the NameNode does not answer.
            with suppress(OSError):
                self._remove(temporary)
            raise
        return size

    def create(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False  # most often, and without a temporary file
        try:
            self.write(path, [data])
        except FileExistsError:
            return False
        return True

    def confirm(self, path: str, data: bytes) -> bool:
        """See :meth:`Storage.confirm`: a file has its name only after its bytes are synced."""
        return reads_as(self, path, data)

    def read(self, path: str) -> bytes:
        name = self._at(path)
        with mapped(self._name(name)):
            file = bounded(self._client.read, name, limit_s=CALL_S)
            return bytes(bounded(file.read, limit_s=DATA_S))

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        name, done = self._at(path), 0
        with mapped(self._name(name)):
            file = bounded(self._client.read, name, limit_s=CALL_S)
            wanted = min(len(target), max(0, len(file) - offset))
            while done < wanted:
                count = min(WRITE_BYTES, wanted - done)
                data = bounded(file.read_range, offset + done, count, limit_s=DATA_S)
                target[done : done + len(data)] = data
                done += len(data)
        return done

    def size(self, path: str) -> int | None:
        found = self._status(self._at(path))
        return None if found is None else int(found.length)

    def names(self, folder: str, after: str = "") -> list[str]:
        found = self._list(self._at(folder) if folder else self._root)
        return sorted(n for n in found if n > after and not n.startswith(UNFINISHED))

    def delete(self, path: str) -> bool:
        return self._remove(self._at(path))

    def remove_unfinished(self, folder: str) -> int:
        name = self._at(folder)
        found = [each for each in self._list(name) if each.startswith(UNFINISHED)]
        return sum(self._remove(f"{name}/{each}") for each in found)

    @property
    def _client(self) -> hdfs_native.Client:
        # The user, too: the client keeps the one that it was made with.
        return _client(self._server, *map(os.environ.get, ("HADOOP_CONF_DIR", "HADOOP_USER_NAME")))

    def _at(self, path: str) -> str:
        check_path(path, self._uri)
        return f"{self._root.rstrip('/')}/{path}"

    def _name(self, path: str) -> str:
        return f"{self._server}{path}"

    @staticmethod
    def _temporary(folder: str, name: str) -> str:
        return f"{folder.rstrip('/')}/{UNFINISHED}{name}.{uuid.uuid4().hex}"

    def _write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write a file of a name that is free, and sync it to disks; returns its size."""
        size = 0
        with mapped(self._name(path)):
            options = hdfs_native.WriteOptions(overwrite=False, create_parent=True)
            file = bounded(self._client.create, path, options, limit_s=CALL_S)
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                part, rest = rest[:WRITE_BYTES], rest[WRITE_BYTES:]
                with mapped(self._name(path)):
                    bounded(file.write, part, limit_s=DATA_S)
                size += len(part)
        with mapped(self._name(path)):
            if size:
                bounded(file.hsync, limit_s=DATA_S)
            bounded(file.close, limit_s=DATA_S)
        return size

    def _status(self, path: str) -> hdfs_native.FileStatus | None:
        with mapped(self._name(path)):
            try:
                return bounded(self._client.get_file_info, path, limit_s=CALL_S)
            except FileNotFoundError:
                return None

    def _list(self, path: str) -> list[str]:
        """Names of all that is in a folder, hidden or not; none when there is no such folder."""

        def listed() -> list[hdfs_native.FileStatus]:
            return list(self._client.list_status(path))

        with mapped(self._name(path)):
            try:
                found = bounded(listed, limit_s=DATA_S)
            except FileNotFoundError:
                return []
        if [each.path for each in found] == [path]:  # a file lists itself
            return []
        return [each.path.rpartition("/")[2] for each in found]

    def _remove(self, path: str) -> bool:
        with mapped(self._name(path)):
            return bool(bounded(self._client.delete, path, False, limit_s=CALL_S))


@lru_cache(maxsize=8)
def _client(server: str, conf: str | None, user: str | None) -> hdfs_native.Client:
    """A client; it may be used by all threads."""
    try:
        return hdfs_native.Client(server, dict(_CLIENT))
    except RuntimeError as error:
        raise RequestError(
            f"checkpoint.uri: {server} cannot be used: {error}; give hdfs://host:port/path, or set "
            "HADOOP_CONF_DIR to a configuration that has the cluster on every node"
        ) from error
