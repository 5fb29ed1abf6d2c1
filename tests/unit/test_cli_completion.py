"""Completion as a shell does it: the script of the program in a bash, asked word by word."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from tests.harness.command_line import application
from typer.testing import CliRunner

from megascale_cli.plugins import KNOWN, PLANNING, loaded_command

ASK = """
eval "$(_MEGASCALE_COMPLETE=source_bash megascale)"
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _megascale_completion "$1"
        echo "${COMPREPLY[*]}"; }
"""
# What is typed up to TAB, and some of what must be offered.
TYPED = {
    "megascale su": {"submit", "suspend"},
    "megascale da": {"data", "dashboard"},
    "megascale data ": {"tokenize", "inspect"},
    "megascale data tokenize --": {"--output", "--tokenizer", "--overwrite"},
    "megascale plan sp": {"spares"},
    "megascale plan search --gp": {"--gpus", "--gpu"},
    "megascale plan calibrate --": {"--output"},
    "megascale plan --of": {"--offline"},
    "megascale plan --dev": {"--devices-per-node"},
    "megascale spans ": {"heat", "why", "timeline"},
    "megascale net ": {"render", "verify"},
    "megascale slurm --": {"--help"},
    "megascale code ": {"push"},
    "megascale certs ": {"init"},
    "megascale checkpoint ": {"list", "fetch", "verify", "export"},
    "megascale checkpoint f": {"fetch"},
    "megascale checkpoint export --": {"--to"},
    "megascale pipeline draw --sta": {"--stages"},
    "megascale node st": {"start", "stop"},
    "megascale up --nodes-": {"--nodes-per-switch"},
    "megascale config ": {"show", "diff"},
    "megascale platform ": {"list", "follow"},
    "megascale sim --": {"--help"},
    "megascale generate --": {"--help"},
}


def offered_in_bash(folder: Path, typed: list[str]) -> list[list[str]]:
    """What bash offers at the end of each line."""
    program = folder / "megascale"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m megascale_cli "$@"\n')
    program.chmod(0o755)
    lines = ["ask " + " ".join(map(shlex.quote, line.split(" "))) for line in typed]
    script = "\n".join([f"PATH={shlex.quote(str(folder))}:$PATH", ASK, *lines])
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_tab_in_a_bash_offers_the_commands_of_every_package(tmp_path: Path) -> None:
    typed = ["megascale da", "megascale plan sp"]  # each starts the program
    for line, found in zip(typed, offered_in_bash(tmp_path, typed), strict=True):
        assert TYPED[line] <= set(found), line


@pytest.mark.parametrize("typed", TYPED)
def test_tab_offers_commands_and_options(typed: str) -> None:
    words = typed.split(" ")
    protocol = {
        "_MEGASCALE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(application(), env=protocol, prog_name="megascale")
    assert TYPED[typed] <= set(done.output.split()), done.output


def names_of_options(command: object) -> set[str]:
    """All options of a command and of those below it."""
    own = {name for one in getattr(command, "params", ()) for name in one.opts}
    below = getattr(command, "commands", {})
    return own.union(*(names_of_options(below[name]) for name in below))


@pytest.mark.parametrize("name", [*KNOWN, *PLANNING])
def test_no_command_of_a_package_installs_completion_over_that_of_the_program(name: str) -> None:
    command = loaded_command(name, {**KNOWN, **PLANNING}[name])
    assert not {option for option in names_of_options(command) if "completion" in option}


def test_the_program_itself_installs_completion() -> None:
    root = typer.main.get_command(application())
    assert {"--install-completion", "--show-completion"} <= {
        name for one in root.params for name in one.opts
    }
