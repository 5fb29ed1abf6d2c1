"""Diagnostic: does the node match the site's network profile?

Before an attempt the driver sends the profile's NCCL settings, each with its reason. They are
compared with the workers' environment without them, with the NCCL release, and with the RDMA
devices of the node. A missing card is a FAIL, because NCCL would find no device of that name. A
different variable is DEGRADED: the workers get the profile's value, unless the job sets the
variable itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascale_executor.counters.reading import folders
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.host_checks import nccl_version
from megascale_executor.diagnostics.wanted_network import WantedNetwork
from megascale_job.visible import counted

NAME = "network_profile"
INFINIBAND = Path("sys/class/infiniband")


class NetworkProfile(Diagnostic):
    """Runs only before attempts, because the profile arrives with an assignment."""

    name = NAME
    on_demand = False
    stage = 0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """Findings for the environment, the NCCL release and the cards.

        One SKIPPED finding without a profile, or on CPUs, where no process uses NCCL.
        """
        wanted = node.attempt.network if node.attempt is not None else None
        if node.attempt is None or wanted is None:
            return [_skipped("the driver has no network profile (--network-profile)")]
        if all(device.kind == "cpu" for device in node.devices):
            return [_skipped("the attempt uses no GPU here, and so no NCCL")]
        job = node.attempt.environment
        return [
            compare_environment(wanted, job, os.environ),
            compare_release(wanted, await asyncio.to_thread(nccl_version)),
            compare_cards(wanted, await asyncio.to_thread(cards)),
        ]


def compare_environment(
    wanted: WantedNetwork, job: Mapping[str, str], node: Mapping[str, str]
) -> Finding:
    """Variables for which job or node have another value. A job's value can be secret."""
    kept = [
        f"{each.name} is the job's own, wanted {each.value} ({each.reason})"
        for each in wanted.settings
        if job.get(each.name, each.value) != each.value
    ]
    replaced = [
        f"{each.name} is {node[each.name]} on this node, the workers get {each.value} "
        f"({each.reason})"
        for each in wanted.settings
        if each.name not in job and node.get(each.name, each.value) != each.value
    ]
    if kept or replaced:
        return Finding(NAME, "environment", "DEGRADED", "; ".join([*kept, *replaced]))
    count = len(wanted.settings)
    return Finding(
        NAME, "environment", "PASS", f"the workers get {counted(count, 'setting')} of NCCL"
    )


def compare_release(wanted: WantedNetwork, found: str) -> Finding:
    """The NCCL release. Its defaults change between releases, so the settings are for one."""
    if not found:
        detail = f"no package of NCCL is installed that could be compared with {wanted.nccl}"
        return Finding(NAME, "nccl", "SKIPPED", detail)
    same = found.split(".")[:2] == wanted.nccl.split(".")[:2]
    detail = f"NCCL {found}, the profile is for {wanted.nccl}"
    if not same:
        detail += ": set nccl in the driver's profile, or update the node"
    return Finding(NAME, "nccl", "PASS" if same else "DEGRADED", detail)


def compare_cards(wanted: WantedNetwork, found: Sequence[str]) -> Finding:
    """The RDMA devices that the profile names."""
    missing = [card for card in wanted.cards if card not in found]
    if missing:
        detail = (
            f"this node has no {', '.join(missing)}; it has {', '.join(found) or 'none'}: "
            "repair the card, or correct nics in the driver's profile"
        )
        return Finding(NAME, "cards", "FAIL", detail)
    return Finding(NAME, "cards", "PASS", ", ".join(wanted.cards))


def cards(root: Path = Path("/")) -> list[str]:
    """Names of the RDMA devices; ``root`` replaces / in tests."""
    return sorted(path.name for path in folders(root / INFINIBAND))


def _skipped(reason: str) -> Finding:
    return Finding(NAME, "node", "SKIPPED", reason)
