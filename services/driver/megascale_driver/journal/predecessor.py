"""Removes the leader key of a driver that died on this host, instead of waiting for its lease.

The driver is gone if its process id, of the same boot and the same process-id namespace, is free or
belongs to a process that started later. That is positive evidence; in all other cases the lease (10
s) has to expire. Removing the key is safe even if the evidence were wrong: every write of that
leader compares the create revision of the key and would be refused (Note [Fencing] in
:mod:`megascale_driver.journal.fenced`).
"""

from __future__ import annotations

import json
import os

from megascale_common.etcd.operations import CreateRevisionEquals, Delete, Etcd
from megascale_common.node.process import boot_id, start_ticks
from megascale_common.service import logs
from megascale_common.service.start import build_version
from megascale_driver.journal.store import LEADER_KEY

_log = logs.get(__name__)


def self_description(address: str) -> dict[str, str | int]:
    """The value of the leader key: the driver's address, and what identifies its process."""
    return {
        "address": address,
        "build": build_version(),
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
    }


async def clear_dead_leader(client: Etcd, own_value: bytes | None = None) -> bool:
    """Remove the leader key if its holder was a process of this host that is gone.

    ``own_value``: a key with this value is removed as well: the caller led before, and could not
    resign while etcd was away. Returns whether the key was removed.
    """
    holder = await client.get(LEADER_KEY)
    if holder is None or not (holder.value == own_value or is_gone(holder.value)):
        return False
    _log.info("removing the leader key of a term that has ended")
    # Only this key: another driver may have been elected since it was read.
    guard = CreateRevisionEquals(LEADER_KEY, holder.create_revision)
    return (await client.txn(compare=[guard], success=[Delete(LEADER_KEY)])).succeeded


def is_gone(value: bytes) -> bool:
    """True if the leader that wrote ``value`` is certainly gone."""
    try:
        found = json.loads(value)
    except ValueError:
        return False
    here = boot_id(), _pid_namespace()
    if not isinstance(found, dict) or not all(here) or not isinstance(found.get("pid"), int):
        return False
    if (found.get("boot_id"), found.get("pid_namespace")) != here:
        return False
    return _start_time(found["pid"]) != found.get("started")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if there is none, or a zombie."""
    ticks = start_ticks(pid)
    return "" if ticks is None else str(ticks)
