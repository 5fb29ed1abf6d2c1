"""Storage of checkpoints: the verbs that the commit protocol needs, and who implements them.

``protocol`` defines the verbs, ``file`` implements them on a file system through ``disk``, and
``s3`` and ``hdfs`` on servers; ``registry`` finds those two and what installed packages add.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megascale_checkpoint.storage import registry
from megascale_checkpoint.storage.disk import is_link_error
from megascale_checkpoint.storage.file import FileStorage
from megascale_checkpoint.storage.protocol import (
    Storage,
    check_path,
    join,
    read_bounded,
    settle,
    split,
)
from megascale_common.service.errors import RequestError

# The folder of one checkpoint in that of a job, which manifests are opened by: no link is followed
# on the way to it either.
_STEP_FOLDER = re.compile(r"(?P<root>/.*)/attempts/attempt-\d+/step-\d+")

__all__ = [
    "SCHEMES",
    "SYMBOLIC_LINK",
    "FileStorage",
    "Storage",
    "check_path",
    "is_link_error",
    "join",
    "open_storage",
    "read_bounded",
    "settle",
    "split",
]


SYMBOLIC_LINK = "SYMBOLIC_LINK"  # reason of a refusal because of a link below a root


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
    inside = _STEP_FOLDER.fullmatch(str(path))
    return FileStorage(path, links_above=Path(inside["root"]) if inside else None)


# By scheme, what opens a URI without a further package; "" is a path.
SCHEMES: dict[str, Callable[[str], Storage]] = {"": _open_file, "file": _open_file}


# Whether the storage of a job can be reached and written, for `megascale plan`.

FIELD = "checkpoint.uri"


def storage_problem(uri: str) -> dict[str, str] | None:
    """What keeps this machine from using ``uri``: field, problem and remedy; None for nothing.

    A path is not looked at: the nodes may be other machines, and the check would make the folder.
    """
    if "://" not in uri or uri.startswith("file://"):
        return None
    try:
        open_storage(uri).check()
    except RequestError as error:
        field, description = error.fields[0] if error.fields else (FIELD, error.message)
        problem, _, remedy = description.partition("; ")
        where = problem if field == FIELD else f"{field}: {problem}"
        return {"field": FIELD, "problem": where, "remedy": remedy or "correct the URI"}
    except PermissionError as error:
        remedy = "give this machine and the nodes access, or leave the check out (--offline)"
        return {"field": FIELD, "problem": str(error), "remedy": remedy}
    except OSError as error:
        remedy = "try again where the nodes are, or leave the check out (--offline)"
        return {"field": FIELD, "problem": str(error), "remedy": remedy}
    return None
