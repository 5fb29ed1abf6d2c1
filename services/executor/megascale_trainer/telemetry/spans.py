"""Named spans of a step in a profiler's trace; while no profile runs they are one shared object
that does nothing.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.profiler import record_function

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_on = False


def switch(on: bool) -> None:
    """Whether spans are recorded from now on; the profiler's word."""
    global _on
    _on = on


def span(name: str, *numbers: int) -> AbstractContextManager[Any]:
    """A span named ``name`` and, behind it, the numbers: ``span("forward", 3, 0)`` is "forward
    3.0".

    The text is only put together while a profile runs.
    """
    if not _on:
        return _NOTHING
    return record_function(f"{name} {'.'.join(map(str, numbers))}" if numbers else name)
