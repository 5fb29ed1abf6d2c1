"""The folder in which a machine keeps measurements and compiled kernels for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """``megascale`` in the user's cache folder; it may not exist yet. None: there is no home."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return Path(cache) / "megascale"
