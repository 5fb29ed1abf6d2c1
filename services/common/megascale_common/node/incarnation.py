"""Ids that distinguish one start of a process, or of its host, from the next one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def boot_id() -> str:
    """Id of the host's current boot, which a restart of a process alone does not change."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def new_incarnation() -> str:
    """Id of one start of a process: unique, and in no order."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"
