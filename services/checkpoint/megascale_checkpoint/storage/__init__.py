"""Storage of checkpoints: the verbs that the commit protocol needs, and who implements them.

``protocol`` defines the verbs, ``file`` implements them on a file system through ``disk``, and
``s3`` and ``hdfs`` on servers; ``registry`` finds those two and what installed packages add.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megascale_checkpoint.storage import registry
from megascale_checkpoint.storage.file import FileStorage
from megascale_checkpoint.storage.protocol import Storage, join, settle, split
from megascale_common.service.errors import RequestError

__all__ = ["SCHEMES", "FileStorage", "Storage", "join", "open_storage", "settle", "split"]


def open_storage(uri: str) -> Storage:
    """Storage at ``uri``: an absolute path, or a URI of a scheme that the registry finds. No I/O.

    Raises:
        RequestError: an unknown scheme, one whose package is not installed, or one that refuses the
            URI (a remote host, a relative path, no bucket).
    """
    scheme = urlsplit(uri).scheme
    return (SCHEMES.get(scheme) or registry.find(scheme))(uri)


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


# By scheme, what opens a URI without a further package; "" is a path.
SCHEMES: dict[str, Callable[[str], Storage]] = {"": _open_file, "file": _open_file}
