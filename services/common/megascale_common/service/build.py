"""Which build of megascale this is."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache  # looked up in files; a driver says it to every node that dials
def build_version() -> str:
    """Version of the installed package, for hello messages, metrics and ``--version``."""
    try:
        return metadata.version("megascale")
    except metadata.PackageNotFoundError:
        return "unknown"
