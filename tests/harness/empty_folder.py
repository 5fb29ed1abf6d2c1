"""A folder as a new user has it, in which a test pastes the commands of the pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Of a job that `megascale init` has written: as many steps as a test can wait for.
INITIAL_STEPS, CUT_STEPS = "steps: 200", "steps: 12"


PROGRAMS = {"python": "", "megascale": "-m megascale_cli", "torchrun": "-m torch.distributed.run"}


class Desk:
    """An empty folder but for a text, with the programs of an environment that is activated."""

    def __init__(self, folder: Path) -> None:
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

    def begin(self, line: str) -> subprocess.Popen[str]:
        """Paste a line into a shell of its own."""
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env={**self.environment, "MEGASCALE_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, line: str, begun: subprocess.Popen[str]) -> str:
        """Await the success of a line; what it printed."""
        shown, errors = begun.communicate()
        assert begun.returncode == 0, f"{line}\n{shown}\n{errors}"
        for job in self.folder.glob("*.yaml"):
            job.write_text(job.read_text().replace(INITIAL_STEPS, CUT_STEPS))
        return shown
