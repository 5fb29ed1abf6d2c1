"""Nodes that the driver evicts are drained on their platform, and come back from there.

The driver's journal has the intent: it decides an eviction before this asks for the drain. A record
on disk has which drains are done, and is written after the call, so a crash between the two is
settled by the next run, which asks once more. A node that was drained here, and that the platform
no longer has as drained, was repaired by somebody: the driver takes it back.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megascale_common.node.files import replace_file
from megascale_common.service.errors import DamagedError, OptionError, UnavailableError
from megascale_driver.platform.interface import PREFIX, Platform

MAX_REASON_CHARACTERS = 200  # SLURM and Kubernetes show it in tables
Report = Callable[[str, dict[str, Any]], None]


class Evictions:
    """Keeps a platform's drained nodes like the driver's evicted ones.

    Args:
        record: a file that outlives this process.
        take_back: asks the driver to give a node work again; False when it cannot be reached.

    Raises:
        DamagedError: the record is not one.
    """

    def __init__(
        self,
        platform: Platform,
        record: Path,
        take_back: Callable[[str], Awaitable[bool]],
        report: Report,
    ) -> None:
        self._platform = platform
        self._record = record
        self._take_back = take_back
        self._report = report
        self._drained = _read(record)
        self._refused: dict[str, str] = {}

    async def settle(self, evicted: Mapping[str, str]) -> None:
        """Bring the platform to what the driver has decided; called again and again.

        What the platform refuses is reported once and asked again at the next call.

        Args:
            evicted: all nodes that the driver has evicted now, each with the driver's reason.
        """
        for name in sorted(self._drained - evicted.keys()):
            # An operator has given the node back to the driver.
            if await self._ask(name, self._platform.restore(name)):
                self._keep("restored", name, self._drained - {name})
        known = sorted(self._drained)
        for name in sorted(evicted.keys() - self._drained):
            reason = f"{PREFIX}{evicted[name] or 'evicted'}"[:MAX_REASON_CHARACTERS]
            if await self._ask(name, self._platform.drain(name, reason)):
                self._keep("drained", name, self._drained | {name})
        if known:
            await self._take_back_repaired(known)

    async def _take_back_repaired(self, names: Collection[str]) -> None:
        try:
            nodes = await self._platform.nodes()
        except UnavailableError:
            return
        for node in nodes:
            repaired = node.name in names and node.ready and not node.drained
            if repaired and await self._take_back(node.name):
                self._keep("returned", node.name, self._drained - {node.name})

    async def _ask(self, name: str, call: Awaitable[None]) -> bool:
        try:
            await call
        except (OptionError, UnavailableError) as error:
            if self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                self._report("refused", {"node": name, "error": str(error)})
            return False
        self._refused.pop(name, None)
        return True

    def _keep(self, event: str, name: str, drained: set[str]) -> None:
        self._drained = drained
        replace_file(self._record, json.dumps(sorted(drained)) + "\n")
        self._report(event, {"node": name})


def _read(record: Path) -> set[str]:
    """The record's nodes; none where a crash of the host has left an empty file."""
    try:
        names = json.loads(record.read_text() or "[]")
    except FileNotFoundError:
        return set()
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DamagedError(str(record), "no list of nodes; remove it, and drains are asked again")
    return set(names)
