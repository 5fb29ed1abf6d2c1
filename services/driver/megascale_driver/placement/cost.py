"""Which placement of a gang is the cheapest: the one function that the queue calls for it.

What is valid is decided by :mod:`megascale_driver.placement.queue`. Another rule of cost is another
function of the same form (:data:`megascale_driver.placement.queue_values.Placer`).
"""

from __future__ import annotations

from collections.abc import Iterable

from megascale_driver.placement.gang import Candidate, place
from megascale_driver.placement.queue_values import Choice


def fewest_switches(world_size: int, tp: int, candidates: Iterable[Candidate]) -> Choice | None:
    """The placement on the fewest switches, and then the fewest nodes."""
    candidates = list(candidates)
    parts = place(world_size, tp, candidates)
    if parts is None:
        return None
    chosen = {part.node for part in parts}
    switches = {c.switch for c in candidates if c.name in chosen}
    nodes = f"{len(parts)} node{'' if len(parts) == 1 else 's'}"
    if switches == {""}:
        return Choice(parts, f"{nodes}, the fewest that have room")
    count = f"{len(switches)} switch{'' if len(switches) == 1 else 'es'}"
    return Choice(parts, f"{nodes} on {count}, the fewest that have room")
