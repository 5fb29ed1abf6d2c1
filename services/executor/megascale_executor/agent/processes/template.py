"""The template process, which forks the processes that need torch, and its keeper.

The template (``python -m megascale_trainer.process``) imports torch ahead of need, so a fork takes
milliseconds where a new process would take seconds. When it ends, its socket closes, and the
processes that it forked are killed by their parent-death signals. The keeper has a template ready
for the next attempt and replaces one that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megascale_common.node import framing
from megascale_common.node.messages import (
    Accepted,
    Exited,
    Fork,
    Forked,
    TemplateHello,
    TemplateMessage,
)
from megascale_common.service import logs, tasks
from megascale_common.service.errors import TemplateError
from megascale_executor.agent import asyncio_tasks
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.processes import child_processes
from megascale_executor.agent.processes.job_processes import DEFAULT, JobProcesses

_log = logs.get(__name__)
_FROM_TEMPLATE: Accepted[TemplateMessage] = Accepted("the agent", TemplateHello, Forked, Exited)

# Importing torch takes 2 s on a quiet machine; with several nodes on two cores it takes longer.
FORK_TIMEOUT_S = READY_TIMEOUT_S = 90.0
# Device indices in the order of nvidia-smi, the same in all processes of the host.
_ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}


class ForkedProcess:
    """A process that the template forked.

    ``exited`` becomes its exit status, or minus the number of the signal that ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Peak memory, known once it has exited; 0 if its template did not report it.
        self.peak_bytes = 0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # A pid can be reused once the template has reaped the process; a pidfd never refers to
        # another process.
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
        self.exited.add_done_callback(lambda _: self._close())

    @property
    def alive(self) -> bool:
        """Whether the process runs now; False even before the template reports its end."""
        if self.exited.done() or self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process has ended."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Send SIGKILL without a template to report the end; sets ``exited`` when it is gone.

        A process with much memory, or with a device, takes a while to go.
        """
        self.kill()
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._gone)
        else:
            self._gone()

    def _gone(self) -> None:
        if not self.exited.done():
            self.exited.set_result(-signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _close(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class TemplateProcess:
    """One template process and what it forked; start it with :meth:`spawn`."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._waiting: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}
        self._reader = asyncio.create_task(self._read(), name="template-messages")
        self.ready = asyncio.Event()
        self.end = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the process has ended or its socket is closed."""
        return self.end.is_set()

    @classmethod
    async def spawn(
        cls, command: Sequence[str], log_path: Path, processes: JobProcesses = DEFAULT
    ) -> tuple[TemplateProcess, asyncio.subprocess.Process]:
        """Start ``command`` (by default the trainer) with ``--socket-fd N``.

        Args:
            processes: interpreter, account and environment; without ``command`` all of them hold.

        Raises:
            OSError: the program cannot be started.
        """
        channel, theirs = MessageChannel.pair()
        with theirs:
            descriptor = theirs.fileno()
            option = ("--socket-fd", str(descriptor))
            program = processes.command("-m", "megascale_trainer.process", *option)
            try:
                process = await child_processes.spawn(
                    [*command, *option] if command else program,
                    log_path,
                    environment={**_ENVIRONMENT, **processes.environment},
                    pass_fds=[descriptor],
                )
            except OSError:
                channel.close()
                raise
        return cls(channel), process

    async def fork(self, rank: int, socket_fd: int, log_fd: int) -> ForkedProcess:
        """Fork one process; the caller may close the two descriptors when this returns or raises.

        Raises:
            TemplateError: the template is gone, or does not fork within FORK_TIMEOUT_S.
        """
        if self.ended:
            raise TemplateError("the template process has ended")
        forked: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            # The kernel duplicates the descriptors while it sends them (SCM_RIGHTS), so the caller
            # may close them before the template has read the message.
            self._channel.send(Fork(rank=rank), [socket_fd, log_fd])
            self._waiting.append(forked)
            # Not wait_for, which on Python 3.11 swallows a cancellation that arrives together with
            # the answer.
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await forked
        except framing.FramingError as error:
            raise TemplateError(f"the template process cannot be reached: {error}") from error
        except asyncio.CancelledError:
            if forked.done() and not forked.cancelled() and forked.exception() is None:
                forked.result().kill()  # forked just when the caller gave up
            raise
        except TimeoutError as error:
            # The template hangs. It ends without its socket, or its keeper kills it; then another
            # one is started.
            self.end.set()
            self._reader.cancel()
            raise TemplateError(
                f"the template process forked nothing within {FORK_TIMEOUT_S:.0f} s"
            ) from error

    async def _read(self) -> None:
        try:
            async for message in self._channel.messages():
                self._take(_FROM_TEMPLATE.read(message))
        except framing.FramingError as error:
            _log.error("template sent a bad message", error=str(error))
        finally:
            self._end()

    def _take(self, message: TemplateMessage) -> None:
        if isinstance(message, TemplateHello):
            if message.version != framing.PROTOCOL_VERSION:
                raise framing.FramingError(
                    f"template has protocol version {message.version}, "
                    f"agent {framing.PROTOCOL_VERSION}"
                )
            self.ready.set()
            _log.info("template is ready", torch=message.torch)
        elif isinstance(message, Forked):
            process = ForkedProcess(message.pid)
            self._running[process.pid] = process
            waiting = self._waiting.popleft()  # the template answers in the order of the requests
            if waiting.done():
                process.kill()  # the caller has given up
            else:
                waiting.set_result(process)
        else:
            ended = self._running.pop(message.pid, None)
            if ended is not None and not ended.exited.done():
                ended.peak_bytes = message.peak_bytes
                ended.exited.set_result(message.status)

    def _end(self) -> None:
        self.end.set()
        self._channel.close()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(TemplateError("the template process ended"))
        # Their parent-death signals kill them too, but only once the template has ended, and one
        # that hangs is still alive here.
        for process in self._running.values():
            process.end()
        self._running.clear()

    async def close(self) -> None:
        """Close the socket, which ends the template and all processes that it forked."""
        await asyncio_tasks.cancelled(self._reader)


class TemplateKeeper:
    """The current template process and its replacement.

    Args:
        processes: surroundings of the first template, which starts before any job is known.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, processes: JobProcesses = DEFAULT
    ) -> None:
        self._command = command
        self._log_path = log_path
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
        """A template with all imports done; waits at most READY_TIMEOUT_S for one.

        Raises:
            TemplateError: none was ready in time, or it ended too often.
        """
        self._child.revive()
        deadline_s = time.monotonic() + READY_TIMEOUT_S
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
        """A template with these surroundings; replaces the current one if it has others.

        Raises:
            TemplateError: as :meth:`ready`.
        """
        if processes != self._processes:
            await self.stop()
            self._processes = processes
            self._current = None
            self._child = child_processes.SupervisedChild("template", self._start)
            self._child.begin()
        return await self.ready()

    async def stop(self) -> None:
        """End the template and all processes that it forked."""
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
    """Kill a template that does not end although its socket is closed; another is then started."""
    await template.end.wait()
    try:
        async with asyncio.timeout(child_processes.TERMINATE_GRACE_S):
            await process.wait()
    except TimeoutError:
        await child_processes.stop(process, grace_s=0)
