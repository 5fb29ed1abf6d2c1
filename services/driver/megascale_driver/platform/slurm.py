"""SLURM as a platform, through its commands: nodes, draining, batch jobs.

Of several levels of switches, a node's is the lowest, level 0.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket

from megascale_common.service.errors import OptionError, UnavailableError
from megascale_driver.platform.interface import PREFIX, PlatformNode

COMMAND_TIMEOUT_S = 30.0
_STATE = re.compile(r"\bState=(\S+)")
_NAME = re.compile(r"^NodeName=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?(?: Comment=.*)?$")
_LEAF = re.compile(r"^SwitchName=(\S+) Level=0 .*\bNodes=(\S+)")
_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


# States in which a node can run jobs; all but DRAIN, which is told apart.
_READY = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED"}
_NOT_READY = {"NOT_RESPONDING", "FAIL", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"}


class SlurmPlatform:
    """The nodes of the SLURM that the commands on this host reach."""

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """See :class:`Platform`; a node's conditions are its base state, then its flags."""
        switches = {}
        for switch, hosts in read_leaves(await _output("scontrol", "show", "topology")).items():
            for name in (await _output("scontrol", "show", "hostnames", hosts)).split():
                switches[name] = switch
        return read_nodes(await _output("scontrol", "show", "node", "--oneliner"), switches)

    async def drain(self, name: str, reason: str) -> None:
        """See :class:`Platform`; running steps of SLURM go on."""
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
        """SLURM adds no node to an allocation that runs; a requeued one gets healthy nodes."""
        del name
        return False

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
        # A trailing * says that the node's slurmd does not answer.
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
    """Return the host list of each leaf switch in ``text``, of `scontrol show topology`."""
    return {m[1]: m[2] for m in map(_LEAF.search, text.splitlines()) if m}


async def submit(script: str) -> str:
    """Hand a batch script to SLURM; returns the number of its job.

    Raises:
        UnavailableError: `sbatch` is absent, refuses or does not answer.
    """
    return (await _output("sbatch", "--parsable", text=script)).split(";")[0].strip()


async def requeue(job: str) -> None:
    """End the allocation ``job``, and have its script run again when there is room.

    Raises:
        UnavailableError: `scontrol` is absent, refuses or does not answer.
    """
    await _output("scontrol", "requeue", job)


async def own_address() -> str:
    """The address by which the nodes of the cluster reach this one.

    Raises:
        UnavailableError: SLURM does not know this node, or its name has no address.
    """
    name = os.environ.get("SLURMD_NODENAME", "")
    found = _ADDRESS.search(await _output("scontrol", "show", "node", name, "--oneliner"))
    try:
        return socket.gethostbyname(found[1] if found else name)
    except OSError as error:
        raise UnavailableError(
            f"node {name!r} of SLURM has no address ({error}): give one with --host"
        ) from None


async def _update(name: str, *changes: str) -> None:
    await _output("scontrol", "update", f"NodeName={name}", *changes)


async def _output(*command: str, text: str = "") -> str:
    program = command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise UnavailableError(f"{program} is not installed: run this on a host of SLURM") from None
    try:
        answer = await asyncio.wait_for(process.communicate(text.encode()), COMMAND_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnavailableError(f"{program}: no answer in {COMMAND_TIMEOUT_S:.0f} s") from None
    output, errors = (words.decode(errors="replace") for words in answer)
    if process.returncode:
        raise UnavailableError(f"{program} failed: {(errors or output).strip()[:500]}")
    return output
