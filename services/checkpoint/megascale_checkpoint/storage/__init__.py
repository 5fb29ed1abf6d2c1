"""Storage of checkpoints: the verbs that the commit protocol needs, and who implements them.

``protocol`` defines the verbs, ``file`` implements them on a file system through ``disk``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megascale_checkpoint.storage.file import FileStorage
from megascale_checkpoint.storage.protocol import Storage, join, settle, split
from megascale_common.service.errors import RequestError

__all__ = ["SCHEMES", "FileStorage", "Storage", "join", "open_storage", "settle", "split"]


def open_storage(uri: str) -> Storage:
    """Storage at ``uri``: an absolute path, or a URI of a scheme in ``SCHEMES``. No I/O.

    Raises:
        RequestError: another scheme, or one that refuses the URI (a remote host, a relative path).
    """
    opener = SCHEMES.get(urlsplit(uri).scheme)
    if opener is None:
        raise RequestError(
            f"checkpoint uri {uri!r} is not supported: give an absolute path or file:///path"
        )
    return opener(uri)


def _open_file(uri: str) -> Storage:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise RequestError(
            f"checkpoint uri {uri!r} is not supported: give an absolute path or file:///path"
        )
    path = Path(unquote(parts.path) if parts.scheme else uri)
    if not path.is_absolute():
        raise RequestError(
            f"checkpoint uri {uri!r} is relative, and each node would resolve it differently: "
            "give an absolute path"
        )
    return FileStorage(path)


# By scheme, what opens a URI; "" is a path.
SCHEMES: dict[str, Callable[[str], Storage]] = {"": _open_file, "file": _open_file}
