"""The file of the algorithms that were measured fastest, so that a machine measures once."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale_kernels.cublas_lt import CODE_BYTES, Algorithm


class Choices:
    """Algorithms by device, library version and problem, in a JSON file.

    Several processes can write it: each adds its own entries to those in the file, and replaces the
    file atomically. A file that cannot be read counts as empty. A file that cannot be written stays
    as it is, and the next run measures again.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._found: dict[str, Any] = self._read()

    def get(self, key: str) -> Algorithm | None:
        """The algorithm of ``key``; None: there is no entry, or it is not an algorithm."""
        try:
            kept = self._found[key]
            algorithm = Algorithm(bytes.fromhex(kept["code"]), int(kept["workspace_bytes"]))
        except (KeyError, TypeError, ValueError):
            return None
        return algorithm if len(algorithm.code) == CODE_BYTES else None

    def put(self, key: str, algorithm: Algorithm, times_ms: Sequence[float]) -> None:
        """Keep ``algorithm``, and for people the ``times_ms`` of all that were timed."""
        self._found.update(self._read())  # entries that other processes have added since
        self._found[key] = {
            "code": algorithm.code.hex(),
            "workspace_bytes": algorithm.workspace_bytes,
            "times_ms": [round(time_ms, 4) for time_ms in times_ms],
        }
        self._write()

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # A new file, then renamed: a reader sees the old file or the new one, each as a whole.
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as fresh:
                json.dump(self._found, fresh, indent=1, sort_keys=True)
            os.replace(fresh.name, self._file)
