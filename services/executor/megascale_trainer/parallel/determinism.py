"""What makes NCCL add in one order: its algorithm and protocol, before the first communicator."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Left alone, NCCL chooses both by message size, topology and version, and each adds in an order of
# its own. Rings exist for all collectives that are used here; Simple is the protocol for large
# messages. Trees, NVLink SHARP and the low-latency protocols are given up for it.
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def pin_collectives(
    deterministic: bool, environment: MutableMapping[str, str] = os.environ
) -> dict[str, str]:
    """Set NCCL's choices for ``training.deterministic``; returns what holds.

    Variables that are set already stay: they are as fixed as ours. Without ``deterministic``
    nothing is set.
    """
    if deterministic:
        for name, value in PINNED.items():
            environment.setdefault(name, value)
    return {name: environment.get(name, "NCCL's choice") for name in PINNED}
