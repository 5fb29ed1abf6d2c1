"""Commands of the CLI as forks of a process that has imported it: a start costs milliseconds.

Imports are most of the processor time of a command, and tests of what commands do need no start of
their own. Tests of the start, of signals and of pipes use real processes
(:func:`tests.harness.cli_process.start`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

from megascale_common.node.process import arm_parent_death

REPOSITORY = Path(__file__).resolve().parents[2]


class CliTemplate:
    """A process that imported the CLI; it ends with the one that started it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.cli_template"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of ``megascale`` with these arguments.

        It runs in the folder and with the environment of this process. A command that a signal
        ends has the signal's number as a negative status.
        """
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            request = {
                "arguments": arguments,
                "folder": str(Path.cwd()),
                "environment": dict(os.environ),
                "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)],
            }
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the template of the CLI has ended"
            return int(answer), _all(output), _all(errors)

    def close(self) -> None:
        """End it, and the command that it runs."""
        self._process.kill()
        self._process.communicate()


@functools.cache
def cli_template() -> CliTemplate:
    """The one template of this process."""
    template = CliTemplate()
    atexit.register(template.close)
    return template


def _all(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


# What commands import when they run.
_LATE = (
    "typer._adapters",
    "pydantic.plugin._loader",
    "megascale_cli.jobfile",
    "megascale_job.config",
)


def _serve() -> None:
    import typer.main

    for name in _LATE:
        with contextlib.suppress(ImportError):  # typer does without pydantic
            importlib.import_module(name)
    from megascale_cli import __main__ as entry
    from megascale_cli import app

    commands: Any = typer.main.get_command(app.build_app())
    app.build_app = lambda: commands
    for name in commands.commands:
        commands.commands[name]
    # A collection in a fork would walk through all that was imported, and copy its pages.
    gc.collect()
    gc.freeze()
    template = os.getpid()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _carry_out(json.loads(line), entry.main, template)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _carry_out(request: dict[str, Any], main: Any, template: int) -> NoReturn:
    """Be the process of one command."""
    arm_parent_death(expected_parent_pid=template)
    for number, path in enumerate([os.devnull, *request["files"]]):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["megascale", *request["arguments"]]
    status: Any = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
