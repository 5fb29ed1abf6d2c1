"""Ids that distinguish one start of a process, or of its host, from the next one, or its files."""

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


def file_view() -> str:
    """Equal in two processes only if they see the same files: kernel, mounts and root; "" unknown.

    Processes of one host may see different files, in containers or under another root.
    """
    try:
        mounts, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{mounts.st_ino}/{root.st_dev}-{root.st_ino}" if boot else ""


def network_view() -> str:
    """Equal in two processes only if one reaches the other at 127.0.0.1; "" unknown.

    Containers of one host have a loopback each.
    """
    try:
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{network.st_ino}" if boot else ""


def new_incarnation() -> str:
    """Id of one start of a process: unique, and in no order."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"
