"""What a rank registers with at its node's checkpoint daemon: the same values on both sides.

On the wire they are fields of :class:`megascale_common.node.messages.Register` of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RankTerms:
    """One rank of one attempt.

    Attributes:
        uri: the job's checkpoint folder; empty keeps snapshots in memory only.
        committer_endpoint: host:port of the attempt's committer.
        slots: how many slots the rank gets; 0 lets the daemon choose.
        in_flight: how many snapshots may be reserved, copied or unsettled at once: with short
            intervals the next ones begin before the first is sealed.
        local_ranks: how many ranks this node has; they share its memory.
        max_write_mib_per_s: most that the job's ranks of this node write to storage; 0: no limit.
        max_step_slowdown: share by which steps may take longer beside a write; 0: any.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    uri: str
    committer_endpoint: str
    slots: int
    in_flight: int = 1
    local_ranks: int = 1
    max_write_mib_per_s: float = 0.0
    max_step_slowdown: float = 0.0


# The type of each, as a message has it.
KINDS: dict[str, type[Any]] = {
    item.name: {"str": str, "int": int, "float": float}[str(item.type)]
    for item in fields(RankTerms)
}


def of(terms: object) -> dict[str, Any]:
    """The values by name, of terms or of a message."""
    return {name: kind(getattr(terms, name)) for name, kind in KINDS.items()}
