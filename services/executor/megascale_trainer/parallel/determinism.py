"""Fixes the order of NCCL's sums: its algorithm and protocol, before the first communicator."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# By default NCCL chooses both by message size, topology and version, and each choice adds in
# another order. Rings exist for all collectives that are used here; Simple is the protocol for
# large messages. The price: no trees, no NVLink SHARP, no low-latency protocols.
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def pin_collectives(
    deterministic: bool, environment: MutableMapping[str, str] = os.environ
) -> dict[str, str]:
    """Pin NCCL's choices for ``training.deterministic``; returns the choices in force.

    Variables that are already set stay: they fix the order just as well. Without ``deterministic``
    nothing is set.
    """
    if deterministic:
        for name, value in PINNED.items():
            environment.setdefault(name, value)
    return {name: environment.get(name, "NCCL's choice") for name in PINNED}
