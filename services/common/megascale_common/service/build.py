"""Which build of megascale this is."""

from __future__ import annotations

from importlib import metadata


def build_version() -> str:
    """Version of the installed package, for hello messages, metrics and ``--version``."""
    try:
        return metadata.version("megascale")
    except metadata.PackageNotFoundError:
        return "unknown"
