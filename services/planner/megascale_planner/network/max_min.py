"""Max-min fair rates of flows: what congestion control aims at where flows share links.

Water-filling, many links at a time: a link is a bottleneck as soon as none of its flows has a
smaller share elsewhere. The flows of all such links get their share in one pass, which gives the
same rates as one link after another (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

import numpy as np

from megascale_planner.network.fabric import Floats, Integers

_EPSILON = 1e-9  # shares that differ by less are the same


def max_min_rates(ways: Integers, capacities: Floats) -> Floats:
    """The rate of each flow, in the unit of the capacities.

    Args:
        ways: the links of each flow, shape ``[flows, links of a flow]``; a link with an infinite
            capacity limits nothing.
        capacities: of each link, shape ``[links]``.

    Returns:
        Shape ``[flows]``.
    """
    rates = np.zeros(len(ways))
    left = capacities.astype(np.float64).copy()
    open_flows = np.arange(len(ways))
    while len(open_flows):
        links = ways[open_flows]
        used, places = np.unique(links, return_inverse=True)
        places = places.reshape(links.shape)
        counts = np.bincount(places.ravel(), minlength=len(used))
        shares = left[used] / counts
        least = shares[places].min(axis=1)
        # The least of what the flows of each link get: it is its own share where it is bottleneck.
        lowest = np.full(len(used), np.inf)
        np.minimum.at(lowest, places, least[:, None])
        bottleneck = lowest >= shares * (1.0 - _EPSILON)
        fixed = bottleneck[places].any(axis=1)
        rates[open_flows[fixed]] = least[fixed]
        taken = np.bincount(
            places[fixed].ravel(),
            weights=np.repeat(least[fixed], links.shape[1]),
            minlength=len(used),
        )
        left[used] = np.maximum(left[used] - taken, 0.0)
        open_flows = open_flows[~fixed]
    return rates
