"""Keeps one template process ready for the next attempt, and replaces it when it ends.

The handle on one such process is :mod:`megascale_executor.agent.processes.template_process`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from megascale_common.service import tasks
from megascale_common.service.errors import TemplateError
from megascale_executor.agent import asyncio_tasks
from megascale_executor.agent.processes import child_processes
from megascale_executor.agent.processes.job_processes import DEFAULT, JobProcesses
from megascale_executor.agent.processes.template_process import FORK_TIMEOUT_S, TemplateProcess


class TemplateKeeper:
    """The current template process and its replacement.

    Args:
        processes: how the first one is started, before any job is known.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, processes: JobProcesses = DEFAULT
    ) -> None:
        self._command, self._log_path = command, log_path
        self._processes = processes
        self._current: TemplateProcess | None = None
        self._arrival = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._child = child_processes.SupervisedChild("template", self._start)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid

    def begin(self) -> None:
        """Start the first template."""
        self._child.begin()

    async def ready(self) -> TemplateProcess:
        """A template that has imported what workers need; waits for one at most FORK_TIMEOUT_S.

        Raises:
            TemplateError: there is none in time, or it ended too often.
        """
        self._child.revive()
        deadline_s = time.monotonic() + FORK_TIMEOUT_S
        while not self._child.gave_up.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            current = self._current
            if current is None or current.ended:
                self._arrival.clear()
                await asyncio_tasks.either(self._arrival, self._child.gave_up, timeout_s=left_s)
            elif current.ready.is_set():
                return current
            else:
                await asyncio_tasks.either(current.ready, current.end, timeout_s=left_s)
        raise TemplateError(f"no template process becomes ready; see {self._log_path}")

    async def ready_for(self, processes: JobProcesses) -> TemplateProcess:
        """A template that was started so; one that was started otherwise is replaced.

        Raises:
            TemplateError: as :meth:`ready`.
        """
        if processes != self._processes:
            await self.stop()
            self._processes, self._current = processes, None
            self._child = child_processes.SupervisedChild("template", self._start)
            self._child.begin()
        return await self.ready()

    async def stop(self) -> None:
        """End the template and all that it forked."""
        await asyncio_tasks.cancelled(self._ending)
        if self._current is not None:
            await self._current.close()
        await self._child.stop()

    async def _start(self) -> asyncio.subprocess.Process:
        self._current, process = await TemplateProcess.spawn(
            self._command, self._log_path, self._processes
        )
        self._ending = tasks.single(_end_with(self._current, process), "template-end")
        self._arrival.set()
        return process


async def _end_with(template: TemplateProcess, process: asyncio.subprocess.Process) -> None:
    """Kill a template that does not end although its socket is closed, so that another starts."""
    await template.end.wait()
    try:
        async with asyncio.timeout(child_processes.TERMINATE_GRACE_S):
            await process.wait()
    except TimeoutError:
        await child_processes.stop(process, grace_s=0)
