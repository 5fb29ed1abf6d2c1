"""This machine as a platform: the nodes of a run folder, started by `megascale node start`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from megascale_common.node.files import replace_file
from megascale_common.service.errors import ClusterError, OptionError, UnavailableError
from megascale_driver.platform.interface import PREFIX, PlatformNode, require_count
from megascale_driver.platform.local.node import (
    RUN_FOLDER_VARIABLE,
    node_folder,
    record_node,
    running_nodes,
    stored_node,
)
from megascale_driver.platform.local.running_cluster import RunningCluster
from megascale_job.visible import agreed, counted

DRAINED_FILE = "drained"  # in the node's folder; its content is the reason
START_TIMEOUT_S = 120.0
MAX_LOCAL_NODES = 256  # as of `megascale up`


class LocalPlatform:
    """All nodes that a run folder has had.

    The default folder is $MEGASCALE_RUN_FOLDER, else runs/current.
    """

    def __init__(self, run_folder: Path | None = None) -> None:
        self.run_folder = run_folder or Path(os.environ.get(RUN_FOLDER_VARIABLE) or "runs/current")

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """See :class:`Platform`."""
        if not self.run_folder.is_dir():
            raise UnavailableError(f"{self.run_folder} is no run folder of `megascale up`")
        running = running_nodes(self.run_folder)
        found = []
        for name in self._known():
            node, reason = stored_node(self.run_folder, name), self._reason(name)
            if node is not None:
                found.append(
                    PlatformNode(
                        name=name,
                        switch=node.switch,
                        ready=name in running,
                        drained=bool(reason),
                        conditions=("RUNNING",) if name in running else ("ENDED",),
                        reason=reason,
                        reached=name in running,
                    )
                )
        return tuple(found)

    async def drain(self, name: str, reason: str) -> None:
        """See :class:`Platform`: :meth:`replace` and :meth:`provide` do not start it again."""
        if not reason.strip():
            raise OptionError("reason: say why the node is drained")
        self._require(name)
        replace_file(node_folder(self.run_folder, name) / DRAINED_FILE, f"{reason.strip()}\n")

    async def restore(self, name: str) -> None:
        """See :class:`Platform`."""
        self._require(name)
        if self._reason(name).startswith(PREFIX):
            (node_folder(self.run_folder, name) / DRAINED_FILE).unlink(missing_ok=True)

    async def replace(self, name: str) -> bool:
        """See :class:`Platform`: starts the node again, or a new one if it is drained."""
        self._require(name)
        if self._reason(name):
            name = self._cluster().next_name()
        elif name in running_nodes(self.run_folder):
            return True
        await self._start(name)
        return True

    async def provide(self, count: int) -> int:
        """See :class:`Platform`: first starts ended nodes again, then new ones.

        A new node's name is stored before it is started. So after a crash in between the next call
        starts that node, and not one more.
        """
        require_count(count)
        if count > MAX_LOCAL_NODES:
            raise UnavailableError(
                f"{counted(count, 'node')} {agreed(count, 'are')} asked for, and a machine "
                f"runs at most {MAX_LOCAL_NODES}"
            )
        while len(serving := self._serving()) < count:
            cluster = self._cluster()
            ended = (name for name in self._known() if not self._reason(name))
            name = next((name for name in ended if name not in serving), cluster.next_name())
            try:
                record_node(self.run_folder, cluster.node(name, None))
            except ClusterError as error:  # too few GPUs
                raise UnavailableError(error.message) from None
            await self._start(name)
        return len(serving)

    def _cluster(self) -> RunningCluster:
        try:
            return RunningCluster.find(self.run_folder)
        except ClusterError as error:  # its files cannot be read
            raise UnavailableError(error.message) from None

    def _serving(self) -> set[str]:
        return {name for name in running_nodes(self.run_folder) if not self._reason(name)}

    def _known(self) -> list[str]:
        return [path.parent.name for path in sorted(self.run_folder.glob("nodes/*/node.json"))]

    async def _start(self, name: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megascale_driver.commands.node",
            "start",
            name,
            "--detach",
            "--cluster",
            str(self.run_folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, errors = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise UnavailableError(f"{name} has not started in {START_TIMEOUT_S:g} s") from None
        if process.returncode:
            raise UnavailableError(errors.decode(errors="replace").strip()[-500:])

    def _reason(self, name: str) -> str:
        try:
            return (node_folder(self.run_folder, name) / DRAINED_FILE).read_text().strip()
        except FileNotFoundError:
            return ""

    def _require(self, name: str) -> None:
        if "/" in name or stored_node(self.run_folder, name) is None:
            raise OptionError(f"node: {self.run_folder} has had none of the name {name!r}")
