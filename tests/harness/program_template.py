"""The process that forks programs for :mod:`tests.harness.program_start`, and what it forks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tests.harness.program_start import Owner, fork_from

from megascale_common.node import framing
from megascale_common.node.process import PARENT_GONE_EXIT_CODE, arm_parent_death, stat_fields

# Programs that start others of ours.
_OWNERS = frozenset(
    (
        "megascale_checkpoint.serve.sidecar",
        "megascale_cli",
        "megascale_driver",
        "megascale_driver.commands.node",
        "megascale_executor.agent",
        "megascale_trainer",
        "torch.distributed.run",
    )
)
# What programs import, some of it late.
_IMPORTED = (
    "torch",
    "torch._dynamo",  # when a layer is first computed again
    "torch.distributed.run",
    "duckdb",
    "encodings.idna",
    "pyarrow.compute",
    "pyarrow.parquet",
    "safetensors.numpy",
    "numpy.ma",  # when numpy first makes values unique
    "dateutil.relativedelta",
    "rich._emoji_codes",
    "rich.progress",
    "yaml",
    "typer._adapters",  # when the first command is parsed
    "typer._click.decorators",
    "pydantic.plugin._loader",
    "megascale_cli.app",
    "megascale_cli.checkpoints",
    "megascale_cli.jobs",
    "megascale_cli.planning",
    "megascale_dashboard.server",
    "megascale_driver.__main__",
    "megascale_driver.commands.node",
    "megascale_driver.commands.up",
    "megascale_driver.telemetry.intake",
    "megascale_driver.shell.traffic_watch",
    "megascale_driver.telemetry.watches",
    "megascale_driver.telemetry.views",
    "megascale_executor.agent.__main__",
    "megascale_executor.agent.node_agent",
    "megascale_checkpoint.__main__",
    "megascale_checkpoint.export.commands",
    "megascale_trainer.commands.data",
    "megascale_trainer.data.loader",
    "megascale_trainer.launch.run",
    "megascale_trainer.process.self_check",
    "megascale_trainer.process.worker",
)
_ABOVE = 512  # descriptors are moved above all those that a program may be given
_ADOPTION_LIMIT_S = 60.0
_UNFLUSHED_EXIT_CODE = 120  # of CPython: what was written did not leave its buffer
_ARGUMENTS, _ENVIRONMENT = 45, 47  # in stat_fields: where the kernel reads them


def _serve(connection: socket.socket) -> NoReturn:
    """Fork as the owner asks, until it has gone.

    What is forked is first the child of a process between, whose end makes it the owner's child.
    """
    while (received := framing.receive(connection)) is not None:
        request, descriptors = received
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _become(request, descriptors)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        framing.send(connection, {"pid": int(os.read(reader, 20))})
        for number in (*descriptors, reader, writer):
            os.close(number)
    os._exit(0)


def _become(request: framing.Message, descriptors: Sequence[int]) -> NoReturn:
    """Be the process of ``request``, from its descriptors to its exit status."""
    deadline_s = time.monotonic() + _ADOPTION_LIMIT_S
    while os.getppid() != request["owner"]:
        if time.monotonic() > deadline_s:
            os._exit(PARENT_GONE_EXIT_CODE)
        time.sleep(0.0002)
    if request["new_session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])
    environment: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    command: list[str] = request["command"]
    _show(_ARGUMENTS, command)
    _show(_ENVIRONMENT, [f"{name}={value}" for name, value in environment.items()])
    _take(dict(zip(request["targets"], descriptors[:-1], strict=True)))
    for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)
    module, *arguments = command[command.index("-m") + 1 :]
    sys.argv = ["-m", *arguments]
    _open_streams(unbuffered="-u" in command[:2] or "PYTHONUNBUFFERED" in environment)
    if module in _OWNERS:
        fork_from(_fork_template())
    _run(module)


def _take(descriptors: Mapping[int, int]) -> None:
    """Have these, under the numbers of a program that was executed, and no others."""
    above = {n: fcntl.fcntl(given, fcntl.F_DUPFD, _ABOVE) for n, given in descriptors.items()}
    for target, found in above.items():
        os.dup2(found, target)
    _close_all_but(descriptors)


def _close_all_but(kept: Iterable[int]) -> None:
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - set(kept):
        with contextlib.suppress(OSError):  # that of the folder itself
            os.close(number)


def _show(index: int, words: Iterable[str]) -> None:
    """Have the process table show these, in the memory where the kernel looks for them."""
    begin, end = map(int, stat_fields(os.getpid())[index : index + 2])
    data = os.fsencode("\0".join(words) + "\0")
    assert len(data) <= end - begin, f"{len(data)} bytes do not fit into the process table"
    ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _open_streams(*, unbuffered: bool) -> None:
    """The standard streams, as an interpreter that starts has them."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    for name, number in (("stdout", 1), ("stderr", 2)):
        binary: Any = os.fdopen(number, "wb", 0 if unbuffered else -1, closefd=False)
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(binary, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork_template() -> Owner:
    """A template of this process's own."""
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    if os.fork() == 0:
        arm_parent_death(expected_parent_pid=owner)
        os.setpgid(0, 0)  # no part of what tests end, stop and count
        silent = os.open(os.devnull, os.O_RDWR)
        _take({0: silent, 1: silent, 2: silent, 3: theirs.fileno()})
        _show(_ARGUMENTS, [f"template of the programs of process {owner}"])
        _serve(socket.socket(fileno=3))
    theirs.close()
    return Owner(ours, always=True)


def _run(module: str) -> NoReturn:
    """Run a module as ``python -m`` does, and end as it would."""
    sys.modules.pop(module, None)  # or runpy warns that it is there
    status: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the interpreter says so in this status
            status = status or _UNFLUSHED_EXIT_CODE
        except ValueError:  # it is closed
            pass
    # The interpreter's teardown after torch takes a tenth of a second.
    os._exit((status or 0) & 0xFF)


def _keep_what_torch_has_registered() -> None:
    """Have no fork undo it at its exit: that takes as long as many programs run."""
    for found in vars(weakref.finalize)["_registry"]:
        alive = found.peek()
        if alive is not None and alive[1].__module__.startswith("torch."):
            found.atexit = False


def _main() -> None:
    arm_parent_death()
    # Collections find next to nothing in what is imported, and one in a fork would copy its pages.
    gc.disable()
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
        if name.endswith(".__main__"):
            sys.modules.pop(name, None)
    sys.modules["torch"].set_num_threads(1)
    _keep_what_torch_has_registered()
    gc.enable()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack the template's threads"
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
