"""Named spans of a step in a profiler's trace; without a profile one object that does nothing."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.profiler import record_function

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_on = False


def switch(on: bool) -> None:
    """Whether spans are recorded from now on; called by the profiler."""
    global _on
    _on = on


def span(name: str, *numbers: int) -> AbstractContextManager[Any]:
    """A span of this name and, behind it, the numbers: ``span("forward", 3, 0)`` is "forward 3.0".

    The text is only put together while a profile runs.
    """
    if not _on:
        return _NOTHING
    return record_function(f"{name} {'.'.join(map(str, numbers))}" if numbers else name)
