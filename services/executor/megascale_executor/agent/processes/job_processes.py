"""How the processes of a job are started on this node: interpreter, code, secrets, account.

Template and data loader are started so, and what the template forks inherits it. Two attempts whose
processes start alike share a template.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megascale_common.node.account import Account
from megascale_common.node.output import NAMES_VARIABLE, Redactor
from megascale_common.service.errors import AssignmentError, OptionError
from megascale_executor.agent.processes import child_processes, job_inputs, locked_requirements
from megascale_executor.agent.processes.folders import FolderCache, HeldFolder
from megascale_executor.agent.processes.job_inputs import INSTALLED, JobCode
from megascale_job.config import JobConfig

FETCH_TIMEOUT_S = 600.0
INSTALL_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class JobProcesses:
    """What distinguishes the processes of one job from those of another."""

    code: JobCode = INSTALLED
    python: str = sys.executable
    account: Account | None = None
    # Not shown: a log or an error may show this object.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def redact(self) -> Redactor:
        """Takes the values of their secrets out of texts."""
        return Redactor(self.secrets)

    @property
    def environment(self) -> Mapping[str, str]:
        """What they get beside the agent's environment."""
        named = {NAMES_VARIABLE: ",".join(self.secrets)} if self.secrets else {}
        own = self.account.variables if self.account is not None else {}
        return {**self.code.environment, **own, **self.secrets, **named}

    def command(self, *arguments: str) -> list[str]:
        """A command of their interpreter, run as their account."""
        command = [self.python, *arguments]
        return self.account.command(command) if self.account is not None else command


DEFAULT = JobProcesses()


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a node offers to jobs.

    Attributes:
        cache: where fetched code and installed environments are kept.
        secrets_folder: where ``file:NAME`` is looked up; None: such references are refused.
        secret_variables: what ``env:NAME`` means.
        accounts: under which processes may run; the first is the default, none: the agent's own.
    """

    cache: Path
    secrets_folder: Path | None = None
    secret_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    accounts: tuple[Account, ...] = ()


class Preparation:
    """Prepares on this node what the processes of a job need, and holds it while they run."""

    def __init__(self, setup: NodeSetup, log_folder: Path) -> None:
        self._setup = setup
        self._log_folder = log_folder
        self._code = FolderCache(setup.cache / "code")
        self._environments = FolderCache(setup.cache / "environments")
        self._held: list[HeldFolder] = []

    @property
    def idle(self) -> JobProcesses:
        """How processes start before a job is known."""
        return JobProcesses(account=self._account(""))

    async def processes(self, config: JobConfig) -> JobProcesses:
        """How the processes of this job start, with all that they need in place.

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
            python = await self._interpreter(config, code)
        finally:
            for folder in before:  # after the same ones are held again
                folder.release()
        return JobProcesses(code, python, account, secrets)

    async def close(self) -> None:
        """End what is being fetched or installed."""
        await asyncio.gather(self._code.close(), self._environments.close())

    def _account(self, name: str) -> Account | None:
        offered = {account.name: account for account in self._setup.accounts}
        if not name:
            return next(iter(offered.values()), None)
        if name not in offered:
            raise AssignmentError(
                f"environment.run_as: this node's agent runs nothing as {name} "
                f"(--run-as has {', '.join(offered) or 'nobody'})"
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
            await self._offer(folder)

        held = await self._code.hold(code.sha256, fetch)
        self._held.append(held)
        return JobCode(str(held.path), code.sha256)

    async def _interpreter(self, config: JobConfig, code: JobCode) -> str:
        wanted = config.environment
        if wanted.python:
            if not await asyncio.to_thread(_is_program, Path(wanted.python)):
                raise AssignmentError(
                    f"environment.python {wanted.python} is no program on this node"
                )
            return wanted.python
        if not wanted.requirements:
            return sys.executable
        path = Path(code.path or "/") / wanted.requirements
        locked = await asyncio.to_thread(locked_requirements.read, path)

        async def install(folder: Path) -> None:
            await self._install(folder, path, locked)
            await self._offer(folder)

        held = await self._environments.hold(_environment_key(locked), install)
        self._held.append(held)
        return str(held.path / "bin" / "python")

    async def _offer(self, folder: Path) -> None:
        """Let the node's accounts read what the agent, by its mask, may have kept to itself."""
        if self._setup.accounts:
            await asyncio.to_thread(_readable, folder)

    async def _install(self, folder: Path, path: Path, locked: bytes) -> None:
        """A virtual environment with the locked packages before the agent's own."""
        log, what = self._log_folder / "install.log", f"environment.requirements {path}"
        # Without pip in it: the agent's installs, and nothing else is copied.
        create = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        await _run(create, log, INSTALL_TIMEOUT_S, what)
        python = str(folder / "bin" / "python")
        requirements = folder / "requirements.txt"
        requirements.write_bytes(locked)
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        install += ["--no-input", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
        install += [
            "--only-binary",
            ":all:",
            "--ignore-installed",
            "--requirement",
            str(requirements),
        ]
        await _run(install, log, INSTALL_TIMEOUT_S, what)
        # The agent's packages come after what was installed here, editable ones included.
        paths = {"platbase": str(folder), "base": str(folder)}
        own = Path(sysconfig.get_path("purelib", "venv", paths))
        lines = [
            f"import site; site.addsitedir({path!r})\n"
            for path in dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        ]
        (own / "zz_megascale_agent.pth").write_text("".join(lines))


def offered_accounts(names: tuple[str, ...], entered: tuple[Path, ...]) -> tuple[Account, ...]:
    """The accounts of ``--run-as``, checked.

    Args:
        entered: files and folders that their processes have to reach.

    Raises:
        OptionError: there is no such account, it is root, this process may not become it, or it
            cannot reach a folder.
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
            f"--run-as {account.name}: only an agent that runs as root may start processes of "
            "another account"
        )
    for path in entered:
        if (closed := account.closed_folder(path)) is not None:
            raise OptionError(
                f"--run-as {account.name}: it cannot enter {closed}, which leads to {path}: "
                f"`chmod o+x {closed}`, or use another folder"
            )


def _readable(folder: Path) -> None:
    folder.parent.chmod(0o755)
    for place, _, files in os.walk(folder):
        Path(place).chmod(0o755)
        for path in (Path(place) / name for name in files):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _environment_key(locked: bytes) -> str:
    """Digest of what an installed environment depends on."""
    interpreter = f"{sys.executable}\0{sys.version}\0{sys.prefix}\0".encode()
    return hashlib.sha256(interpreter + locked).hexdigest()


async def _run(command: list[str], log: Path, timeout_s: float, what: str) -> None:
    """Run a program of the node to its end; its last line says why it failed."""
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
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        text = errors[0] if errors else f"exit status {status}"
        raise AssignmentError(text if text.startswith(what) else f"{what}: {text}")
