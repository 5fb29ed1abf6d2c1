"""Two TAP devices with a long cable between them: each frame comes out after a delay.

``python -m tests.harness.delay_relay TAP TAP DELAY_MS`` prints ``ready`` when both are there, and
relays until it is ended. A cable holds as many frames as fit into ``QUEUE_BYTES`` for each
direction; more are lost, as in a switch. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import collections
import fcntl
import os
import selectors
import struct
import sys
import time

from megascale_common.node.process import arm_parent_death

TUN = "/dev/net/tun"
QUEUE_BYTES = 64 << 20
FRAME_BYTES = 1 << 16
AT_ONCE = 64  # frames of one device before the other has its turn
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000


def open_tap(name: str) -> int:
    """A new TAP device; it lives as long as the descriptor, in whichever namespace it is put."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


class Direction:
    """Frames from one device to the other, each with the time at which it comes out."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self._bytes = 0

    def take_in(self) -> None:
        """Read the frames that are there, AT_ONCE of them at most."""
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, FRAME_BYTES)
            except (BlockingIOError, OSError):  # none, or the device is down
                return
            if self._bytes + len(frame) <= QUEUE_BYTES:
                self._waiting.append((time.monotonic() + self._delay_s, frame))
                self._bytes += len(frame)

    def let_out(self) -> float | None:
        """Write the frames whose time has come; seconds until the next one's, None without."""
        while self._waiting:
            due_s, frame = self._waiting[0]
            if (left_s := due_s - time.monotonic()) > 0:
                return left_s
            self._waiting.popleft()
            self._bytes -= len(frame)
            try:
                os.write(self._target, frame)
            except OSError:  # the device is down or its queue is full: the frame is lost
                continue
        return None


def relay(first: int, second: int, delay_s: float) -> None:
    """Relay both ways for ever."""
    directions = (Direction(first, second, delay_s), Direction(second, first, delay_s))
    with selectors.DefaultSelector() as selector:
        for direction in directions:
            selector.register(direction.source, selectors.EVENT_READ, direction)
        while True:
            waits = [wait for each in directions if (wait := each.let_out()) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                key.data.take_in()


def main() -> None:
    """See the docstring of the module."""
    arm_parent_death()
    first, second, delay_ms = sys.argv[1:]
    taps = open_tap(first), open_tap(second)
    print("ready", flush=True)
    relay(*taps, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
