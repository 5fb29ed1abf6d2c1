"""What the newest report of a platform says of a node that it does not reach. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlatformSign:
    """A platform does not reach the node, as of ``at_s``; ``words`` are the platform's, and whose.

    ``at_s`` 0: it reaches the node, or nobody reports for a platform.
    """

    at_s: float = 0.0
    words: str = ""


REACHED = PlatformSign()
