"""The rule for names of jobs, tenants, nodes and clusters: they are DNS-1123 labels. Pure."""

from __future__ import annotations

import re

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def is_dns_label(name: str) -> bool:
    """Whether ``name`` is 1 to 63 of a-z, 0-9 and '-', with no '-' at either end (RFC 1123)."""
    return _DNS_LABEL.fullmatch(name) is not None
