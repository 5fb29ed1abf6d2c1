"""Child processes of the agent: checkpoint daemon, template and data loader (workers are forked).

They end with the agent, see Note [Parent-death signal] in :mod:`megascale_common.node.process`; so
they are started on the event loop, which runs on the main thread. They stay in the agent's process
group, so that killing the group kills the node. Their output goes to log files. A supervised child
is restarted within a budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from megascale_common.node.process import armed_command, child_environment
from megascale_common.service import logs, tasks
from megascale_executor.agent import asyncio_tasks

_log = logs.get(__name__)

RESTART_BUDGET = 4
RESTART_WINDOW_S = 60.0
_RESTART_DELAYS_S = (0.1, 0.2, 0.5, 1.0)
TERMINATE_GRACE_S = 3.0


async def spawn(
    command: Sequence[str],
    log_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start ``command`` with its output appended to ``log_path``.

    Raises:
        OSError: the program or the log cannot be opened.
    """
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(environment),
            pass_fds=tuple(pass_fds),
        )


async def spawn_armed(command: Sequence[str], log_path: Path) -> asyncio.subprocess.Process:
    """Start a program that does not arm a parent-death signal itself; it ends with the agent too.

    Raises:
        OSError: as :func:`spawn`.
    """
    return await spawn(armed_command(command), log_path)


async def stop(process: asyncio.subprocess.Process, *, grace_s: float = TERMINATE_GRACE_S) -> None:
    """Send SIGTERM, and SIGKILL after ``grace_s`` (0: at once); return once it is reaped."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
    if grace_s > 0:
        try:
            await asyncio.wait_for(process.wait(), grace_s)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await process.wait()


class RestartBudget:
    """At most ``limit`` restarts within ``window_s``; beyond that the caller gives the child up."""

    def __init__(self, limit: int = RESTART_BUDGET, window_s: float = RESTART_WINDOW_S) -> None:
        self._limit = limit
        self._window_s = window_s
        self._times: deque[float] = deque()

    def delay_s(self, now_s: float) -> float | None:
        """Count a restart and return the seconds to wait before it; None if none is left."""
        while self._times and now_s - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return None
        self._times.append(now_s)
        return _RESTART_DELAYS_S[min(len(self._times), len(_RESTART_DELAYS_S)) - 1]


class SupervisedChild:
    """Keeps one process running until :meth:`stop`.

    Args:
        name: name of the child in the log.
        start: starts the process; called for each restart too.
        on_exit: called with the exit status after each end.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[asyncio.subprocess.Process]],
        on_exit: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.name = name
        self._start = start
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._budget = RestartBudget()
        self._task: asyncio.Task[None] | None = None
        self.gave_up = asyncio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else None
        )

    def begin(self) -> None:
        """Start the process and its supervision."""
        self._task = tasks.essential(self._supervise(), f"supervise-{self.name}")

    def revive(self) -> None:
        """Restart a child that was given up, with a new budget: the cause may be gone."""
        if self.gave_up.is_set():
            self.gave_up.clear()
            self._budget = RestartBudget()
            self.begin()

    async def _supervise(self) -> None:
        while True:
            try:
                self._process = await self._start()
                status = await self._process.wait()
            except OSError as error:
                _log.error("child cannot be started", child=self.name, error=str(error))
                status = -1
            self._on_exit(status)
            delay_s = self._budget.delay_s(time.monotonic())
            if delay_s is None:
                self.gave_up.set()
                _log.error(
                    "child ended too often and is given up",
                    child=self.name,
                    status=status,
                    limit=RESTART_BUDGET,
                    window_s=RESTART_WINDOW_S,
                )
                return
            self.restarts += 1
            _log.warning(
                "child ended and is restarted", child=self.name, status=status, delay_s=delay_s
            )
            await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """End the process and its supervision."""
        await asyncio_tasks.cancelled(self._task)
        if self._process is not None and self._process.returncode is None:
            await stop(self._process)
