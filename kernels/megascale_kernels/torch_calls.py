"""Calls that torch leaves untyped, with their types."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``: the results of its forward, recorded by autograd."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def cuda_event(*, timed: bool = False) -> torch.cuda.Event:
    """A CUDA event; ``timed``: it records the time at which the device reaches it."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def is_reached(event: torch.cuda.Event) -> bool:
    """Whether the device has done all that was enqueued before the event."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def cuda_stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    """A CUDA stream of ``device``; streams with a lower ``priority`` number are served first."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
