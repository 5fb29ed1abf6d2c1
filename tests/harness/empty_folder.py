"""A folder as a new user has it, in which a test pastes the commands of the pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.harness import program_start

# Of a job that `megascale init` has written: as many steps as a test can wait for.
INITIAL_STEPS, CUT_STEPS = "steps: 200", "steps: 12"


PROGRAMS = {"python": "", "megascale": "-m megascale_cli", "torchrun": "-m torch.distributed.run"}

_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
# What only a shell understands where it is not quoted.
_OF_SHELLS = re.compile(r"[*?$|&;<>()~`]")


def command_of(line: str) -> list[str] | None:
    """The command that a line starts, if it is one of PROGRAMS and nothing needs a shell."""
    program, *words = shlex.split(line, comments=True) or [""]
    if program not in PROGRAMS or _OF_SHELLS.search(_QUOTED.sub("", line.partition(" #")[0])):
        return None
    return [sys.executable, *PROGRAMS[program].split(), *words]


class Desk:
    """An empty folder but for a text, with the programs of an environment that is activated.

    ``executed``: shells execute every line, as for users. Else what needs no shell is forked by
    :mod:`tests.harness.program_start`.
    """

    def __init__(self, folder: Path, *, executed: bool) -> None:
        self._executed = executed
        self.folder, programs = folder / "desk", folder / "bin"
        self.folder.mkdir()
        programs.mkdir()
        for name, module in PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / name).chmod(0o755)
        text = "The trainer reads this page, and learns to write others like it.\n"
        (self.folder / "TEXT.txt").write_text(text * 200)
        known = ("MEGASCALE_RUN_FOLDER", "CUDA_VISIBLE_DEVICES")
        self.environment = {
            **{key: value for key, value in os.environ.items() if key not in known},
            "CUDA_VISIBLE_DEVICES": "",  # as on a machine without GPUs: eight ranks need eight
            "HOME": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "COLUMNS": "200",
        }

    def paste(self, code: str) -> str:
        """Paste lines into a shell, one after the other, each with success; what they printed.

        A job that is written is cut to a few steps before the next line.
        """
        return "".join(self.end(line, self.begin(line)) for line in code.splitlines())

    def begin(self, line: str, log: IO[Any] | None = None) -> subprocess.Popen[str]:
        """Start a line, in a shell of its own if it needs one; its output goes to ``log``."""
        command = None if self._executed else command_of(line)
        last = "exec " if log else ""  # a signal is for the program
        starts = program_start.start if command else subprocess.Popen
        return starts(
            command or ["bash", "-euo", "pipefail", "-c", last + line],
            cwd=self.folder,
            env={**self.environment, "MEGASCALE_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log or subprocess.PIPE,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            text=True,
        )

    def end(self, line: str, begun: subprocess.Popen[str]) -> str:
        """Await the success of a line; what it printed."""
        shown, errors = begun.communicate()
        assert begun.returncode == 0, f"{line}\n{shown}\n{errors}"
        for job in self.folder.glob("*.yaml"):
            job.write_text(job.read_text().replace(INITIAL_STEPS, CUT_STEPS))
        return shown
