"""Calls of the HDFS client: bounded in time, and with the errors that :class:`Storage` promises.

The client waits without limit for a NameNode that has accepted its connection and does not answer.
So each call runs in a thread of its own, which is left behind when its time is over; the number of
such threads is bounded.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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
