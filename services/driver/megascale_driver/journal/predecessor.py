"""A leader that died on this host need not be waited for: its process is seen to be gone, its key
is removed.

The lease (10 s) still guards every other case. The same boot, the same process-id namespace and a
process id that is free or was taken by a later process are positive evidence; anything less is left
to the lease.
"""

from __future__ import annotations

import json
import os

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.operations import CreateRevisionEquals, Delete
from megascale_common.node.incarnation import boot_id
from megascale_common.node.process import start_ticks
from megascale_common.service import logs
from megascale_common.service.build import build_version
from megascale_driver.journal.store import LEADER_KEY

_log = logs.get(__name__)


def self_description(address: str) -> dict[str, str | int]:
    """Value of the leader key: where this driver serves, and how to tell whether its process is
    still there.
    """
    return {
        "address": address,
        "build": build_version(),
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
    }


async def clear_dead_leader(client: EtcdClient, own_value: bytes | None = None) -> bool:
    """Remove the leader key if its holder was a process of this host that is gone; whether it was
    removed.

    So is a key with ``own_value``, the caller's: it led before, and could not resign while etcd was
    away.
    """
    holder = await client.get(LEADER_KEY)
    if holder is None or not (holder.value == own_value or is_gone(holder.value)):
        return False
    _log.info("the leader key of a term that is over is removed")
    guard = CreateRevisionEquals(LEADER_KEY, holder.create_revision)
    return (await client.txn(compare=[guard], success=[Delete(LEADER_KEY)])).succeeded


def is_gone(value: bytes) -> bool:
    """Whether the leader that wrote ``value`` is known to be gone; False where that cannot be told
    from here.
    """
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
    """Start time of a live process in clock ticks since boot; empty when there is none, or only its
    zombie.
    """
    ticks = start_ticks(pid)
    return "" if ticks is None else str(ticks)
