"""A second stream of high priority, for transfers that computation hides.

On a CPU there is none, and work runs in the order of the calls. "Main" is the stream that was
current for the caller at the last :meth:`SideStream.follow_main`. Each operation begins with that
call, because looking up a stream again costs the host 5 us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megascale_kernels.torch_calls import cuda_stream

_HIGH_PRIORITY = -1


class SideStream:
    """The stream. Only the calls below order it and main, on the device and never on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = cuda_stream(device, priority=_HIGH_PRIORITY)

    def follow_main(self) -> None:
        """Make the side stream's next work wait for all work that main has got so far."""
        if self._stream is not None:
            self._main = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(self._main)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Launch the body's work on the side stream. The body allocates no memory.

        torch's allocator assigns memory to the stream that is current: it would give it to other
        work of that stream while main still uses it.
        """
        if self._stream is None or self._main is None:
            yield
            return
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self._main)

    def mark(self) -> torch.cuda.Event | None:
        """A point after all work that the side stream has got so far, for :meth:`hold_main`."""
        return None if self._stream is None else self._stream.record_event()

    def hold_main(self, mark: torch.cuda.Event | None) -> None:
        """Make main's next work wait for ``mark``."""
        if mark is not None and self._main is not None:
            self._main.wait_event(mark)
