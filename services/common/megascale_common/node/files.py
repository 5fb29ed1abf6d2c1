"""Files that readers see whole: addresses, lists of process ids, small JSON."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text`` (UTF-8): a reader sees the old file or the new one.

    Nothing is synced: after a crash of the host the file may be the old one, or empty. The name of
    the draft holds the process id, so two processes do not write into one draft.

    Raises:
        OSError: it cannot be written; the old file stays and no draft is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
