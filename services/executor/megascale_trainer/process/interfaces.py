"""Over which interface the ranks of a job connect: the one on the route to where they meet.

Without a word gloo takes the address that the host's name stands for, which is a loopback one on
many hosts, and NCCL the first interface that it finds.
"""

from __future__ import annotations

import os

from megascale_common.node.addresses import (
    LOOPBACK_INTERFACE,
    interface_of,
    is_loopback,
    on_route_to,
)

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def pin_interface(store_host: str, cuda: bool) -> str:
    """Set the variable that gloo or NCCL reads, unless somebody has; returns the interface or "".

    Ranks that share a host need no look-up of its name. NCCL finds its own way between them.
    """
    variable = NCCL if cuda else GLOO
    if variable in os.environ:
        return os.environ[variable]
    if is_loopback(store_host):
        found = "" if cuda else LOOPBACK_INTERFACE
    else:
        try:
            found = interface_of(on_route_to(store_host))
        except OSError:  # the store's connection reports it
            found = ""
    if found:
        # NCCL takes a name as the beginning of one, but for a '=' before it.
        os.environ[variable] = f"={found}" if cuda else found
    return found
