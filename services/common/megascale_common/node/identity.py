"""Names of things: build, boot, incarnation, and the DNS-1123 rule that names of jobs, nodes and
clusters obey.
"""

from __future__ import annotations

import os
import re
import secrets
from importlib import metadata
from pathlib import Path

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def is_dns_label(name: str) -> bool:
    """Whether ``name`` is a DNS-1123 label: 1-63 of a-z, 0-9 and '-', neither first nor last a '-'."""
    return _DNS_LABEL.fullmatch(name) is not None


def build() -> str:
    """Version of the installed package, for hello messages and ``--version``."""
    try:
        return metadata.version("megascale")
    except metadata.PackageNotFoundError:
        return "unknown"


def boot_id() -> str:
    """Id of the host's current boot; tells a restarted process from a restarted machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def new_incarnation() -> str:
    """An id for one start of a process: ordered by nothing, equal to no other."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"
