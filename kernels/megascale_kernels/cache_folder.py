"""Where this machine keeps what was measured or compiled once, for the processes that follow."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """``megascale`` in the user's cache folder, which need not exist; None: there is no home."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return Path(cache) / "megascale"
