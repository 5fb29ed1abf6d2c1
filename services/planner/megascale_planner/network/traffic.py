"""Who sends to whom in a training job, for an order of its ranks over the hosts.

Tensor-parallel groups stay on a host, so a host stands for one place in the data-parallel and one
in the pipeline dimension, and each of its NICs carries what its own GPU sends to the same NIC of
another host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megascale_planner.network.fabric import Integers, mixed_bits

ORDERS = ("pp-inner", "dp-inner", "block", "random")
PHASES = ("dp", "pp")


class BadJob(ValueError):
    """The job does not fit the fabric; the message has the option and the remedy."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Transfers of a phase, one for each NIC of each host.

    Attributes:
        source: the sender's host, shape ``[groups, members]``: a group is the ring of a
            data-parallel group, or the line of a pipeline.
        target: the receiver's host, of the same shape.
        rail: NIC of both, of the same shape.
    """

    source: Integers
    target: Integers
    rail: Integers


def hosts_in_order(order: str, dp: int, pp: int, hosts_per_tor: int, seed: int = 0) -> Integers:
    """The host of each place: shape ``[dp, pp]``.

    ``pp-inner`` and ``dp-inner`` count the stages, or the replicas, within a ToR first; ``block``
    gives each set of ToRs as square a part of both as divides them; ``random`` is what a placement
    without knowledge of the network gives.
    """
    hosts = np.arange(dp * pp, dtype=np.int64)
    if order == "pp-inner":
        return hosts.reshape(dp, pp)
    if order == "dp-inner":
        return np.ascontiguousarray(hosts.reshape(pp, dp).T)
    if order == "random":
        keys = mixed_bits(hosts.astype(np.uint64) ^ mixed_bits(np.array([seed], np.uint64)))
        return np.argsort(keys, kind="stable").reshape(dp, pp).astype(np.int64)
    if order != "block":
        raise BadJob(f"order {order!r} is unknown: give one of {', '.join(ORDERS)}")
    rows, columns = _block_of(dp, pp, hosts_per_tor)
    blocks = hosts.reshape(dp // rows, pp // columns, rows, columns)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3).reshape(dp, pp))


def _block_of(dp: int, pp: int, hosts_per_tor: int) -> tuple[int, int]:
    """Replicas and stages of a block: as many hosts as fit a ToR, then as square as possible."""
    sizes = [
        (rows, columns)
        for rows in range(1, min(dp, hosts_per_tor) + 1)
        for columns in range(1, min(pp, hosts_per_tor // rows) + 1)
        if not dp % rows and not pp % columns
    ]
    return max(sizes, key=lambda size: (size[0] * size[1], -abs(math.log(size[0] / size[1]))))


def pairs(phase: str, places: Integers, rails: int, *, interleaved: bool = True) -> Pairs:
    """Transfers of a phase.

    Args:
        phase: ``dp``: each replica sends to the next of its ring (gradients and parameters);
            ``pp``: each stage sends to the next (activations).
        places: the host of each place, shape ``[dp, pp]``.
        rails: NICs of a host.
        interleaved: the last stage sends to the first, too (several chunks a stage).
    """
    if phase == "dp":
        source, target = places.T, np.roll(places, -1, axis=0).T
    elif phase == "pp":
        source, target = places, np.roll(places, -1, axis=1)
        if not interleaved:
            source, target = source[:, :-1], target[:, :-1]
    else:
        raise BadJob(f"phase {phase!r} is unknown: give one of {', '.join(PHASES)}")
    if not source.size or (source == target).all():
        raise BadJob(f"no host sends to another in phase {phase}: give a {phase} above 1")
    rail = np.broadcast_to(np.arange(rails)[:, None, None], (rails, *source.shape))
    shape = (rails * source.shape[0], source.shape[1])
    return Pairs(
        np.broadcast_to(source, rail.shape).reshape(shape),
        np.broadcast_to(target, rail.shape).reshape(shape),
        rail.reshape(shape),
    )
