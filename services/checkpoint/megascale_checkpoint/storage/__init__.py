"""Storage of checkpoints: finds the implementation for a URI by its scheme.

``protocol`` defines the verbs; ``file`` implements them on a file system through ``disk``, and
``s3`` and ``hdfs`` on servers.

An installed package adds a storage through an entry point, whose name is the scheme (see
docs/how-to/add-a-storage-backend.md):

    [project.entry-points."megascale.storage"]
    acme = "acme_storage:AcmeStorage"

A scheme's class is imported when the first URI of it is opened, so boto3 is needed only for S3.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

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
from megascale_common.service.errors import RequestError, invalid

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

GROUP = "megascale.storage"
Opener = Callable[[str], Storage]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A storage of this package that needs an extra.

    Attributes:
        target: its class, as an entry point.
        extra: the extra of megascale that installs its dependencies.
    """

    target: str
    extra: str


BUILT_IN = {
    "s3": BuiltIn("megascale_checkpoint.storage.s3:S3Storage", "s3"),
    "hdfs": BuiltIn("megascale_checkpoint.storage.hdfs:HdfsStorage", "hdfs"),
}
VERBS = tuple(
    name
    for name, value in vars(Storage).items()
    if inspect.isfunction(value) and not name.startswith("_")
)


def find(scheme: str) -> Opener:
    """The opener for URIs of ``scheme``, called as ``opener(uri)``.

    Raises:
        RequestError: no storage here has the scheme, or it cannot be imported or used; the message
            names the field and what to install.
    """
    if scheme in BUILT_IN:
        return _built_in(scheme)
    entries = {entry.value: entry for entry in metadata.entry_points(group=GROUP, name=scheme)}
    if not entries:
        known = sorted({"file", *BUILT_IN, *metadata.entry_points(group=GROUP).names})
        raise invalid(
            "checkpoint.uri",
            f"no storage here has the scheme {scheme}:// (known: {', '.join(known)})",
            "give an absolute path, file:///path or one of these, or install the package that "
            f"adds it under {GROUP} on every node",
        )
    if len(entries) > 1:
        raise invalid(
            "checkpoint.uri",
            f"several packages add {scheme}:// ({', '.join(sorted(entries))})",
            "uninstall all but one of them",
        )
    [entry] = entries.values()
    return _installed(scheme, entry)


def _built_in(scheme: str) -> Opener:
    built_in = BUILT_IN[scheme]
    try:
        loaded: Any = metadata.EntryPoint(scheme, built_in.target, GROUP).load()
    except ImportError as error:
        raise invalid(
            "checkpoint.uri",
            f"{scheme}:// needs what is not installed here ({error.name})",
            f"pip install 'megascale[{built_in.extra}]' on every node",
        ) from error
    return cast(Opener, loaded)


def _installed(scheme: str, entry: metadata.EntryPoint) -> Opener:
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        loaded: Any = entry.load()
    # SystemExit too: a module that calls sys.exit() must not end the daemon.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise invalid(
            "checkpoint.uri",
            f"{scheme}:// of package {package} cannot be imported ({reason})",
            "repair or reinstall the package on this node",
        ) from error
    # Checked now, so that a missing verb does not first show in the middle of a commit.
    missing = [name for name in (*VERBS, "uri") if not hasattr(loaded, name)]
    if missing:
        raise invalid(
            "checkpoint.uri",
            f"{scheme}:// of package {package}: {entry.value} lacks {', '.join(missing)}",
            "its package must name a class with all verbs of Storage",
        )

    def opener(uri: str) -> Storage:
        try:
            return cast(Storage, loaded(uri))
        except (RequestError, OSError):
            raise
        except Exception as error:
            raise invalid(
                "checkpoint.uri",
                f"{uri!r} is refused by package {package}: {type(error).__name__}: {error}",
                "correct the URI, or repair the package",
            ) from error

    return opener


# The folder of one checkpoint in a job's folder, by which manifests are opened: links are refused
# from the job's folder on.
_STEP_FOLDER = re.compile(r"(?P<root>/.*)/attempts/attempt-\d+/step-\d+")


SYMBOLIC_LINK = "SYMBOLIC_LINK"  # reason of a refusal because of a link


def open_storage(uri: str) -> Storage:
    """The storage at ``uri``: an absolute path, or a URI of a known scheme. No I/O.

    Raises:
        RequestError: an unknown scheme, one whose package is not installed, or one that refuses the
            URI (a remote host, a relative path, no bucket).
    """
    scheme = urlsplit(uri).scheme
    # SCHEMES first, which tests replace; no package can take over paths or file:// either.
    return (SCHEMES.get(scheme) or find(scheme))(uri)


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


# Openers that need no further package, by scheme; "" is a path.
SCHEMES: dict[str, Callable[[str], Storage]] = {"": _open_file, "file": _open_file}


FIELD = "checkpoint.uri"


def storage_problem(uri: str) -> dict[str, str] | None:
    """Why this machine cannot use ``uri``, as field, problem and remedy; None if it can.

    Paths are not checked: the nodes may be other machines, and the check would make the folder.
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
