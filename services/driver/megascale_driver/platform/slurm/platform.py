"""SLURM as a platform, through its commands: nodes, draining, further allocations.

With several levels of switches, the switch of a node is the lowest one, level 0.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from megascale_common.service.errors import OptionError, UnavailableError
from megascale_driver.platform.interface import PREFIX, PlatformNode, require_count
from megascale_driver.platform.local.node import RUN_FOLDER_VARIABLE
from megascale_driver.platform.slurm.further_allocations import AllocatedCluster, add, held, output

_STATE = re.compile(r"\bState=(\S+)")
_NAME = re.compile(r"^NodeName=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?(?: Comment=.*)?$")
_LEAF = re.compile(r"^SwitchName=(\S+) Level=0 .*\bNodes=(\S+)")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


# States in which a node can run jobs. DRAIN is a flag and read separately.
_READY = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED"}
_NOT_READY = {"NOT_RESPONDING", "FAIL", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"}


class SlurmPlatform:
    """The nodes of the SLURM cluster that the commands on this host reach.

    ``run_folder``: of the cluster for which :meth:`provide` adds nodes; default:
    ``$MEGASCALE_RUN_FOLDER``, else runs/current.
    """

    def __init__(self, run_folder: Path | None = None) -> None:
        given = run_folder or Path(os.environ.get(RUN_FOLDER_VARIABLE) or "runs/current")
        self._run_folder = given.resolve()

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """See :class:`Platform`; a node's conditions are its base state, then its flags."""
        switches = {}
        for switch, hosts in read_leaves(await output("scontrol", "show", "topology")).items():
            for name in (await output("scontrol", "show", "hostnames", hosts)).split():
                switches[name] = switch
        return read_nodes(await output("scontrol", "show", "node", "--oneliner"), switches)

    async def drain(self, name: str, reason: str) -> None:
        """See :class:`Platform`; running steps of SLURM continue."""
        if not reason.strip():
            raise OptionError("reason: SLURM drains no node without one; say why")
        await self._node(name)
        await _update(name, "State=DRAIN", f"Reason={reason}")

    async def restore(self, name: str) -> None:
        """See :class:`Platform`."""
        node = await self._node(name)
        if node.drained and node.reason.startswith(PREFIX):
            await _update(name, "State=RESUME")

    async def replace(self, name: str) -> bool:
        """Return False: SLURM cannot add a node to a running allocation.

        A requeued allocation gets healthy nodes.
        """
        del name
        return False

    async def provide(self, count: int) -> int:
        """See :class:`Platform`: adds a further allocation, which SLURM can queue.

        A node counts from the time when its allocation is queued until it is drained or no longer
        reachable.
        """
        require_count(count)
        cluster = AllocatedCluster.find(self._run_folder)
        # Queued nodes count as provided, or each call would queue another allocation.
        names, queued = await held(cluster)
        nodes = [node for node in await self.nodes() if node.name in names]
        there = queued + sum(node.ready and not node.drained for node in nodes)
        if there < count:
            await add(cluster, count - there)
        return max(there, count)

    async def _node(self, name: str) -> PlatformNode:
        for node in await self.nodes():
            if node.name == name:
                return node
        raise OptionError(f"node: SLURM has none of the name {name!r}; see `scontrol show node`")


def read_nodes(text: str, switches: dict[str, str]) -> tuple[PlatformNode, ...]:
    """Return the nodes in ``text``, the output of `scontrol show node --oneliner`."""
    found = []
    for line in map(str.strip, text.splitlines()):
        name, state, reason = _NAME.search(line), _STATE.search(line), _REASON.search(line)
        if not name or not state:
            continue
        # A trailing * means that the node's slurmd does not answer.
        words = tuple(state[1].replace("*", "+NOT_RESPONDING").split("+"))
        found.append(
            PlatformNode(
                name=name[1],
                switch=switches.get(name[1], ""),
                ready=words[0] in _READY and not _NOT_READY.intersection(words),
                drained="DRAIN" in words,
                conditions=words,
                reason=reason[1] if reason else "",
                reached="NOT_RESPONDING" not in words,
            )
        )
    return tuple(sorted(found, key=lambda node: node.name))


def read_leaves(text: str) -> dict[str, str]:
    """Return the host list of each leaf switch in the output of `scontrol show topology`."""
    return {m[1]: m[2] for m in map(_LEAF.search, text.splitlines()) if m}


async def own_address() -> str:
    """The address at which the other nodes reach this one.

    Raises:
        UnavailableError: SLURM does not know this node, or its name has no address.
    """
    name = os.environ.get("SLURMD_NODENAME", "")
    found = _ADDRESS.search(await output("scontrol", "show", "node", name, "--oneliner"))
    try:
        return socket.gethostbyname(found[1] if found else name)
    except OSError as error:
        raise UnavailableError(
            f"node {name!r} of SLURM has no address ({error}): give one with --host"
        ) from None


async def _update(name: str, *changes: str) -> None:
    await output("scontrol", "update", f"NodeName={name}", *changes)
