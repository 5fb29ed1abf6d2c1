"""Surroundings of a job's processes on this node: interpreter, code, secrets, account.

Template and data loader are started with them, and the processes that the template forks inherit
them. Attempts with equal surroundings share a template.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megascale_common.node.account import Account
from megascale_common.node.output import NAMES_VARIABLE, Redactor
from megascale_common.service.errors import AssignmentError, OptionError
from megascale_executor.agent.processes import child_processes, job_inputs
from megascale_executor.agent.processes.folders import FolderCache, HeldFolder
from megascale_executor.agent.processes.job_inputs import INSTALLED, JobCode
from megascale_job.config import JobConfig
from megascale_job.sections.code import NO_REQUIREMENTS, EnvironmentConfig

FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class JobProcesses:
    """Surroundings of the processes of one job."""

    code: JobCode = INSTALLED
    python: str = sys.executable
    account: Account | None = None
    # Not in the repr, because a log or an error can show this object.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def redact(self) -> Redactor:
        """Removes the values of the job's secrets from texts."""
        return Redactor(self.secrets)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables in addition to the agent's."""
        named = {NAMES_VARIABLE: ",".join(self.secrets)} if self.secrets else {}
        own = self.account.variables if self.account is not None else {}
        return {**self.code.environment, **own, **self.secrets, **named}

    def command(self, *arguments: str) -> list[str]:
        """A command line for the job's interpreter under the job's account."""
        command = [self.python, *arguments]
        return self.account.command(command) if self.account is not None else command


DEFAULT = JobProcesses()


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """Options of the agent for the surroundings of jobs.

    Attributes:
        cache: folder for fetched code.
        secrets_folder: folder of ``file:NAME``; None: such references are refused.
        secret_variables: values of ``env:NAME``, by NAME.
        accounts: under which processes may run; the first is the default, none: the agent's own.
    """

    cache: Path
    secrets_folder: Path | None = None
    secret_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    accounts: tuple[Account, ...] = ()


class Preparation:
    """Prepares the surroundings of jobs on this node, and keeps them in place while they run."""

    def __init__(self, setup: NodeSetup, log_folder: Path) -> None:
        self._setup = setup
        self._log_folder = log_folder
        self._code = FolderCache(setup.cache / "code")
        self._held: list[HeldFolder] = []

    @property
    def idle(self) -> JobProcesses:
        """Surroundings of processes that start before a job is known."""
        return JobProcesses(account=self._account(""))

    async def processes(self, config: JobConfig) -> JobProcesses:
        """Surroundings for the processes of this job, once everything in them is in place.

        Raises:
            AssignmentError: this node cannot provide something; the text names the field.
            OSError: the cache cannot be written.
        """
        account = self._account(config.environment.run_as)
        secrets = job_inputs.resolve(
            config.environment.secrets, self._setup.secrets_folder, self._setup.secret_variables
        )
        before = self._held
        self._held = []
        try:
            code = await self._job_code(config)
            python = await self._interpreter(config.environment)
        finally:
            for folder in before:  # only now, so that folders in both sets are held throughout
                folder.release()
        return JobProcesses(code, python, account, secrets)

    async def close(self) -> None:
        """End the fetching of code."""
        await self._code.close()

    def _account(self, name: str) -> Account | None:
        offered = {account.name: account for account in self._setup.accounts}
        if not name:
            return next(iter(offered.values()), None)
        if name not in offered:
            raise AssignmentError(
                f"environment.run_as: this node's agent runs nothing as {name} "
                f"(--run-as has {', '.join(offered) or 'no account'})"
            )
        return offered[name]

    async def _job_code(self, config: JobConfig) -> JobCode:
        code = config.code
        if not code.uri:
            return await job_inputs.find(code)

        async def fetch(folder: Path) -> None:
            fetcher = [sys.executable, "-m", "megascale_checkpoint.artifacts"]
            fetcher += ["--uri", code.uri, "--sha256", code.sha256, "--to", str(folder)]
            log = self._log_folder / "fetch.log"
            await _run(fetcher, log, FETCH_TIMEOUT_S, "code.uri")
            if self._setup.accounts:
                # The agent's umask may hide the files from the node's accounts.
                await asyncio.to_thread(_make_readable, folder)

        held = await self._code.hold(code.sha256, fetch)
        self._held.append(held)
        return JobCode(str(held.path), code.sha256)

    async def _interpreter(self, wanted: EnvironmentConfig) -> str:
        if wanted.requirements:
            raise AssignmentError(
                f"environment.requirements {wanted.requirements}: no longer installed by this "
                f"build; {NO_REQUIREMENTS} (`megascale update` changes the job)"
            )
        if not wanted.python:
            return sys.executable
        if not await asyncio.to_thread(_is_program, Path(wanted.python)):
            raise AssignmentError(
                f"environment.python {wanted.python} is not a program on this node"
            )
        return wanted.python


def offered_accounts(names: tuple[str, ...], entered: tuple[Path, ...]) -> tuple[Account, ...]:
    """The accounts of ``--run-as``, checked.

    Args:
        entered: files and folders that the processes of each account have to reach.

    Raises:
        OptionError: an account does not exist, is root, cannot be taken on by this process, or
            cannot reach one of the folders.
    """
    found = []
    for name in names:
        try:
            account = Account.of(name)
        except KeyError:
            raise OptionError(f"--run-as {name}: this host has no such account") from None
        if account.uid == 0:
            raise OptionError(f"--run-as {name}: it is root; give an account without its rights")
        _check_account(account, entered)
        found.append(account)
    return tuple(found)


def _check_account(account: Account, entered: tuple[Path, ...]) -> None:
    if os.geteuid() != 0:
        raise OptionError(
            f"--run-as {account.name}: only an agent that runs as root can start processes of "
            "another account"
        )
    for path in entered:
        if (closed := account.closed_folder(path)) is not None:
            raise OptionError(
                f"--run-as {account.name}: it cannot enter {closed}, which leads to {path}: "
                f"`chmod o+x {closed}`, or use another folder"
            )


def _make_readable(folder: Path) -> None:
    folder.parent.chmod(0o755)
    for place, _, files in os.walk(folder):
        Path(place).chmod(0o755)
        for path in (Path(place) / name for name in files):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


async def _run(command: list[str], log: Path, timeout_s: float, what: str) -> None:
    """Run a program to its end.

    Raises:
        AssignmentError: it failed, with the last line of its output, or took too long.
    """
    start = log.stat().st_size if log.exists() else 0
    process = await child_processes.spawn_armed(command, log)
    try:
        async with asyncio.timeout(timeout_s):
            status = await process.wait()
    except TimeoutError:
        raise AssignmentError(f"{what}: not done within {timeout_s:.0f} s; see {log}") from None
    finally:
        if process.returncode is None:
            await child_processes.stop(process, grace_s=0)
    if status:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read(1 << 20).decode(errors="replace").strip().splitlines()
        text = lines[-1] if lines else f"exit status {status}"
        raise AssignmentError(text if text.startswith(what) else f"{what}: {text}")
