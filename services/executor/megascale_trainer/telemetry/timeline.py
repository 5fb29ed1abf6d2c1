"""What a long operation waits for: seconds by name, in the order of first use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Timeline:
    """Adds up the time spent in each of its parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body as time of ``name``."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - began_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {spent_s:.3f} s" for name, spent_s in self.seconds.items())
