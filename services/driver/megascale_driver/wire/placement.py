"""The placement of an attempt as clients get it."""

from __future__ import annotations

from megascale.v1 import driver_pb2
from megascale_driver.core.values.attempt import Placement


def placement_message(placement: Placement) -> driver_pb2.Placement | None:
    """Why an attempt runs where it does, and the score; None where that is not known."""
    if not placement.why:
        return None
    score = placement.score
    return driver_pb2.Placement(
        reason=placement.why,
        order=placement.order,
        score=driver_pb2.PlacementScore(
            cost_byte_tiers=score.cost,
            between_nodes_bytes=score.between_bytes,
            cross_switch_share=score.cross_share,
            cross_switch_edges=score.crossing_edges,
        )
        if score is not None
        else None,
    )
