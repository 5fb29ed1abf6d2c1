"""Events about the traffic between the nodes of an attempt, of the shell that counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_driver.core.values.events import RankPages


@dataclass(frozen=True, slots=True)
class TrafficStood:
    """No byte moves between the nodes of an attempt whose ranks wait; ``pages`` are the newest.

    ``limit_s``: for how long no step may have been completed.
    """

    now_s: float
    job: str
    attempt: int
    limit_s: float
    sentence: str
    pages: tuple[RankPages, ...]


@dataclass(frozen=True, slots=True)
class TrafficChanged:
    """The traffic of an attempt has declined, fluctuates, or cannot be watched.

    ``kind``: decline, fluctuation or unseen. ``nodes``: those concerned; empty: all.
    """

    now_s: float
    job: str
    attempt: int
    kind: str
    source: str
    sentence: str
    nodes: tuple[str, ...] = ()
