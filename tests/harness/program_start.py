"""Starts programs of ours as forks of a process that has imported them: milliseconds, not seconds.

Most of the processor time of a test that starts a cluster was imports: torch for each node, gRPC
for each process. A *template* (:mod:`tests.harness.program_template`) has imported everything once.
:func:`start` takes a command ``python -m megascale_...`` as :class:`subprocess.Popen` does, but has
the template fork. What comes is a child of the caller as any other: its parent, process group,
descriptors, environment and command line are what they would be.

Programs that start others (``megascale up``, agents, drivers) have a template of their own, forked
before they run, while they have one thread.

Tests of the start itself use :class:`subprocess.Popen`: those of options, of bad surroundings, of
`megascale up`, of training by hand, and the slow form of the first hour. So does whatever has
another interpreter or account.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale_common.node import framing
from megascale_common.node.process import child_environment

REPOSITORY = Path(__file__).resolve().parents[2]
# Room in the process table for the command line and the environment of what is forked.
ROOM_BYTES = 16 * 1024
_FORKED = ("megascale_", "tests.harness.", "torch.distributed.run")
_ROOM_VARIABLE = "MEGASCALE_TEST_ROOM"
# When they are imported, pyarrow's allocator and numpy would start threads, which forks would lack,
# and gRPC handlers of forks, which agents do without.
_BEFORE_IMPORTS = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_executed: Any = getattr(subprocess, "_fork_exec")  # noqa: B009 - the stubs do not have it
_created = asyncio.create_subprocess_exec


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """:class:`subprocess.Popen` with these arguments; ``command`` is ``python -m megascale_...``.

    Any other command is executed. Call it from the main thread if the program arms its
    parent-death signal.
    """
    with forked():
        return subprocess.Popen(list(command), **options)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """In the body, this thread has the template fork the programs of ours that it starts."""
    _chosen.owner = _template()
    fork_from(_chosen.owner)
    try:
        yield
    finally:
        _chosen.owner = None


class Owner:
    """A template as the process sees it whose children it forks.

    Args:
        always: all programs of ours are forked, and not those of :func:`start` alone.
    """

    def __init__(self, connection: socket.socket, *, always: bool) -> None:
        self._connection, self.always = connection, always
        self._lock = threading.Lock()

    def spawn(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process.

        Raises:
            OSError: the template has ended.
        """
        with self._lock, _adopting():
            framing.send(self._connection, {**request, "owner": os.getpid()}, descriptors)
            answer = framing.receive(self._connection)
        if answer is None:
            raise OSError("the template of programs has ended")
        return int(answer[0]["pid"])


class _Chosen(threading.local):
    """The template from which this thread starts a program at this moment."""

    owner: Owner | None = None


_chosen = _Chosen()


@functools.cache
def _template() -> Owner:
    """The one template of this process."""
    ours, theirs = socket.socketpair()
    room = "x" * ROOM_BYTES
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.program_template", str(theirs.fileno()), room],
        cwd=REPOSITORY,
        env={
            **child_environment(_BEFORE_IMPORTS),
            "PYTHONPATH": path,
            _ROOM_VARIABLE: room,
        },
        pass_fds=[theirs.fileno()],
        process_group=0,
    )
    theirs.close()

    def end() -> None:
        process.kill()
        process.wait()
        ours.close()

    atexit.register(end)
    return Owner(ours, always=False)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among our descendants become children of this process, for a moment."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def fork_from(owner: Owner) -> None:
    """From now on have ``owner`` fork the programs that this process starts."""

    def fork_exec(*arguments: Any) -> int:
        asked = owner.always or _chosen.owner is not None
        request = _request(arguments) if asked else None
        if request is None:
            return int(_executed(*arguments))
        return owner.spawn(request, list(request.pop("descriptors")))

    setattr(subprocess, "_fork_exec", fork_exec)  # noqa: B010 - as above
    if owner.always:
        asyncio.create_subprocess_exec = _create_subprocess_exec


def _ours(command: Sequence[str | bytes]) -> bool:
    python, *words = (os.fsdecode(word) for word in command)
    module = words[words[:1] == ["-u"] :][:2]
    return python == sys.executable and module[:1] == ["-m"] and module[1].startswith(_FORKED)


def _request(arguments: Sequence[Any]) -> dict[str, Any] | None:
    """What the template is asked for; None for a program that only exec can start.

    Args:
        arguments: those of ``_posixsubprocess.fork_exec`` of Python 3.11 and 3.12.
    """
    command, _, closed, kept, folder, environment, stdin, _, _, stdout, _, stderr = arguments[:12]
    _, failures, _, new_session, group, *account = arguments[12:21]
    if not closed or not _ours(command) or account[:3] != [None] * 3:
        return None
    given = enumerate((stdin, stdout, stderr))
    descriptors = {target: found if found >= 0 else target for target, found in given}
    descriptors |= {number: number for number in kept if number != failures}
    return {
        "command": [os.fsdecode(word) for word in command],
        "folder": str(Path.cwd()) if folder is None else os.fsdecode(folder),
        "environment": _variables(environment),
        "targets": list(descriptors),
        # The last is closed once the program is there: Popen waits for that.
        "descriptors": [*descriptors.values(), failures],
        "new_session": bool(new_session),
        "group": os.getpgrp() if group < 0 else group,
    }


def _variables(environment: Sequence[bytes] | None) -> dict[str, str]:
    if environment is None:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in environment)
    return {name: value for name, _, value in pairs}


async def _create_subprocess_exec(*command: Any, **options: Any) -> Any:
    """For every event loop: uvloop's does not use the module subprocess."""
    pipes = [options.get(name) for name in ("stdin", "stdout", "stderr")]
    if not _ours(command) or asyncio.subprocess.PIPE in pipes:
        return await _created(*command, **options)
    # It blocks for milliseconds, as a fork does.
    return _Process(subprocess.Popen(command, **options))  # noqa: ASYNC220


class _Process:
    """What :class:`asyncio.subprocess.Process` offers of a process without pipes."""

    stdin = stdout = stderr = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self._process, self._ended = process.pid, process, asyncio.Event()
        self._descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._process.wait()
        self._ended.set()
