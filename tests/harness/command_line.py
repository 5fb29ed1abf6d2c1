"""The command line in this process: a call costs milliseconds, and a child process a second."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer
import typer.main

from megascale_cli import __main__ as entry
from megascale_cli import app

_build = app.build_app
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and its exit status."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def error(self) -> dict[str, Any]:
        """The JSON object on stderr, which a failed command with --json ends with."""
        found: dict[str, Any] = json.loads(self.stderr.splitlines()[-1])
        return found


@functools.cache
def application() -> typer.Typer:
    """The application, for tests that call it in other ways; to find its plugins takes 10 ms."""
    return _build()


@functools.cache
def _commands() -> Any:
    """All commands, which are the same at every call and take longer to put together than to run.

    It is called as the application is.
    """
    return typer.main.get_command(application())


def command(*arguments: str | Path) -> Answer:
    """Run `megascale` with these arguments, as its entry point does.

    An exception that escapes is a defect of the command: it fails the test.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    status: object = 0
    ctrl_c = signal.getsignal(signal.SIGINT)
    with (
        mock.patch.object(app, "build_app", _commands),
        mock.patch.object(sys, "argv", ["megascale", *map(str, arguments)]),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "TERM": "dumb"}),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            entry.main()
        except SystemExit as end:
            status = 0 if end.code is None else end.code
        finally:
            signal.signal(signal.SIGINT, ctrl_c)
    assert isinstance(status, int), status
    answer = Answer(status, stdout.getvalue(), stderr.getvalue())
    assert TRACEBACK not in answer.text
    return answer
