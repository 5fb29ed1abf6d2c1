"""The storages by scheme: those of this package, and those that installed packages add.

A package adds one through an entry point, whose name is the scheme (see
docs/how-to/add-a-storage-backend.md):

    [project.entry-points."megascale.storage"]
    acme = "acme_storage:AcmeStorage"

A scheme's class is imported when a URI of it is opened: who uses no S3 needs no boto3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, cast

from megascale_checkpoint.storage.protocol import Storage
from megascale_common.service.errors import RequestError, invalid

GROUP = "megascale.storage"
Opener = Callable[[str], Storage]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A storage of this package that needs an extra of it.

    Attributes:
        target: its class, as an entry point.
        extra: the extra of megascale that installs what it imports.
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
    """What opens URIs of ``scheme``, as ``opener(uri)``.

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
    # SystemExit as well: a module that calls sys.exit() must not end the daemon.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise invalid(
            "checkpoint.uri",
            f"{scheme}:// of package {package} cannot be imported ({reason})",
            "repair or reinstall the package on this node",
        ) from error
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
