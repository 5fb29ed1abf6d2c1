"""A token bucket: how long a sender waits so that it stays below a rate. Pure, without a clock."""

from __future__ import annotations

BURST_S = 0.25  # what may go out at once, as time at the full rate


class TokenBucket:
    """Bytes that may be sent; ``bytes_per_s`` 0 is no limit."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._tokens, self._at_s = bytes_per_s * BURST_S, now_s

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take ``size_bytes`` at ``now_s``; returns the seconds to wait before they are sent.

        Several threads that take in turn each wait for those before them.
        """
        if not self.bytes_per_s:
            return 0.0
        filled = self._tokens + max(0.0, now_s - self._at_s) * self.bytes_per_s
        self._tokens = min(filled, self.bytes_per_s * BURST_S) - size_bytes
        self._at_s = max(self._at_s, now_s)
        return max(0.0, -self._tokens / self.bytes_per_s)
