"""A high-priority stream beside the current one, for transfers that computation hides.

On a CPU there is none, and what is written first runs first. "Main" is the stream that was current
for the caller at the last :meth:`SideStream.follow_main`: each operation begins with one, and
looking a stream up again costs the host 5 us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megascale_kernels.torch_calls import cuda_stream

_HIGH_PRIORITY = -1


class SideStream:
    """The stream; order between it and main is made by the calls below alone, on the device, never
    on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = cuda_stream(device, priority=_HIGH_PRIORITY)

    def follow_main(self) -> None:
        """What comes on the side stream waits for all that main has been given so far."""
        if self._stream is not None:
            self._main = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(self._main)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give the body's work to the side stream. The body allocates nothing: memory belongs to a
        stream.
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
        """A point after all that the side stream has been given so far, for :meth:`hold_main`."""
        return None if self._stream is None else self._stream.record_event()

    def hold_main(self, mark: torch.cuda.Event | None) -> None:
        """What comes on main waits for ``mark``."""
        if mark is not None and self._main is not None:
            self._main.wait_event(mark)
