"""What a node prepares for a job's processes: cached folders, secrets, interpreter, accounts."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waiting import eventually
from tests.harness.wheel import one_module_wheel
from tests.unit.test_job_validation import values_of

from megascale_checkpoint import artifacts
from megascale_common.node.account import Account
from megascale_common.node.output import NAMES_VARIABLE, Redactor
from megascale_common.service.errors import AssignmentError, OptionError, RequestError
from megascale_executor.agent.processes import job_inputs
from megascale_executor.agent.processes.folders import FolderCache
from megascale_executor.agent.processes.job_processes import (
    DEFAULT,
    JobProcesses,
    NodeSetup,
    Preparation,
    offered_accounts,
)
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_job.sections.code import CodeConfig, EnvironmentConfig

NOBODY = Account("acme", 65534, 65534, (65534,), "/nonexistent")
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another account")


def job(code: CodeConfig = CodeConfig(), **environment: Any) -> JobConfig:
    made = loading.from_mapping(values_of())
    return replace(made, code=code, environment=EnvironmentConfig(**environment))


def builder(count: list[Path], text: str = "built") -> Callable[[Path], Any]:
    async def build(folder: Path) -> None:
        count.append(folder)
        folder.mkdir()
        await asyncio.sleep(0.05)
        (folder / "content").write_text(text)

    return build


async def test_concurrent_starts_share_one_build(tmp_path: Path) -> None:
    """Of one agent, and of two agents of a host (locks of two descriptors exclude each other)."""
    built: list[Path] = []
    first, second = FolderCache(tmp_path), FolderCache(tmp_path)
    calls = (cache.hold("key", builder(built)) for cache in (first, first, second, second))
    held = await asyncio.gather(*calls)
    assert len(built) == 1
    assert {folder.path / "content" for folder in held} == {tmp_path / "key" / "content"}
    for folder in held:
        folder.release()
    await first.close()


async def test_a_build_that_fails_or_was_killed_leaves_nothing(tmp_path: Path) -> None:
    cache, built = FolderCache(tmp_path), list[Path]()

    async def fails(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("half")
        raise AssignmentError("no space")

    with pytest.raises(AssignmentError, match="no space"):
        await cache.hold("key", fails)
    assert not (tmp_path / "key").exists()
    (tmp_path / "key").mkdir()  # of a builder that was killed
    (tmp_path / "key" / "half").write_text("half")
    held = await cache.hold("key", builder(built))
    assert [path.name for path in held.path.iterdir() if path.name[0] != "."] == ["content"]
    held.release()


async def test_a_build_goes_on_when_its_attempt_is_stopped(tmp_path: Path) -> None:
    cache, built = FolderCache(tmp_path), list[Path]()
    attempt = asyncio.create_task(cache.hold("key", builder(built)))
    await eventually(lambda: bool(built), "the build begins")
    attempt.cancel()
    await asyncio.wait({attempt})
    (await cache.hold("key", builder(built))).release()
    assert len(built) == 1


async def test_only_old_folders_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, max_kept=2)
    used = await cache.hold("used", builder([]))
    for number, key in enumerate(("idle", "next", "last")):
        (await cache.hold(key, builder([]))).release()
        os.utime(tmp_path / key / ".complete", (number, number))
    (await cache.hold("newest", builder([]))).release()
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert "used" in left and "newest" in left and "idle" not in left
    used.release()


def test_secrets_are_read_from_the_folder_and_the_agents_variables(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from a file\n")
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    environment = {"MEGASCALE_SECRET_TOKEN": "from a variable", "OTHER": "stays"}
    variables = job_inputs.take_variables(environment)
    assert environment == {"OTHER": "stays"}, "children of the agent must not inherit it"
    references = {"A": "file:key", "B": "env:TOKEN"}
    assert job_inputs.resolve(references, tmp_path, variables) == {
        "A": "from a file",
        "B": "from a variable",
    }
    for reference, problem in (
        ("env:ABSENT", "MEGASCALE_SECRET_ABSENT"),
        ("env:OTHER", "MEGASCALE_SECRET_OTHER"),
        ("file:absent", "cannot be read"),
        ("file:link", "leads out of --secrets-folder"),
        ("file:pipe", "not a plain file"),
    ):
        with pytest.raises(AssignmentError, match=problem):
            job_inputs.resolve({"A": reference}, tmp_path, variables)
    with pytest.raises(AssignmentError, match="--secrets-folder"):
        job_inputs.resolve({"A": "file:key"}, None, variables)


def test_files_of_secrets_may_be_links_within_their_folder(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: NAME is a link to a folder that is replaced as a whole."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "key").write_text("mounted")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "key").symlink_to("..data/key")
    assert job_inputs.resolve({"A": "file:key"}, tmp_path, {}) == {"A": "mounted"}


def test_values_of_secrets_are_not_shown_and_not_printed() -> None:
    processes = JobProcesses(secrets={"KEY": "planted-value"})
    assert "planted-value" not in repr(processes) and "planted-value" not in str(processes)
    assert processes.environment["KEY"] == "planted-value"
    assert processes != JobProcesses(secrets={"KEY": "another"})
    assert processes.redact("no planted-value here") == "no [secret KEY] here"
    assert (
        Redactor({"A": "long-secret", "B": "long"})("long-secret long") == "[secret A] [secret B]"
    )
    code = (
        "import os, sys, traceback\n"
        "from megascale_common.node.output import redact_streams\n"
        "redact_streams()\n"
        "print(os.environ['KEY'], dict(os.environ))\n"
        "sys.stderr.writelines(['x ' + os.environ['KEY'] + '\\n'])\n"
        "raise ValueError('refused: ' + os.environ['KEY'])\n"
    )
    environment = {**os.environ, "KEY": "planted-value", NAMES_VARIABLE: "KEY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "planted-value" not in done.stdout + done.stderr
    assert "ValueError: refused: [secret KEY]" in done.stderr and "x [secret KEY]" in done.stderr


def output(command: list[str], processes: JobProcesses = DEFAULT) -> str:
    """What a command of a job's processes prints."""
    environment = {**os.environ, **processes.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_an_interpreter_that_the_node_does_not_have_is_refused(tmp_path: Path) -> None:
    preparation = Preparation(NodeSetup(tmp_path / "cache"), tmp_path)
    assert (await preparation.processes(job())).python == sys.executable
    absent = tmp_path / "python"
    with pytest.raises(AssignmentError, match="is not a program"):
        await preparation.processes(job(python=str(absent)))


async def test_a_stored_job_with_locked_requirements_is_not_started(tmp_path: Path) -> None:
    """An earlier build stored it; without its packages it would train something else."""
    preparation = Preparation(NodeSetup(tmp_path / "cache"), tmp_path)
    with pytest.raises(AssignmentError, match=r"requirements lock\.txt: .* container image"):
        await preparation.processes(job(requirements="lock.txt"))


async def test_an_artifact_is_fetched_once_and_checked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "acme").mkdir(parents=True)
    (source / "acme" / "__init__.py").write_text("VERSION = 7\n")
    store = tmp_path / "store"
    for pushed in (source, one_module_wheel(tmp_path, "acme_wheel", "1.0")):
        uri, digest = artifacts.push(pushed, str(store))
        assert artifacts.push(pushed, str(store)) == (uri, digest)
        code = CodeConfig(uri=uri, sha256=digest)
        preparation = Preparation(NodeSetup(tmp_path / "cache"), tmp_path)
        found = await preparation.processes(job(code))
        assert Path(found.code.path) == tmp_path / "cache" / "code" / digest
        assert found == await preparation.processes(job(code))
        module = "acme" if pushed is source else "acme_wheel"
        code_of_it = f"import {module}; print({module}.VERSION)"
        assert output(found.command("-c", code_of_it), found) in ("7\n", "1.0\n")
        damaged = replace(code, sha256="0" * 64)
        with pytest.raises(AssignmentError, match=f"has the digest {digest}"):
            await preparation.processes(job(damaged))
        assert not (tmp_path / "cache" / "code" / ("0" * 64)).exists()
    absent = CodeConfig(uri=f"{store}/absent.whl", sha256="1" * 64)
    with pytest.raises(AssignmentError, match="no such file"):
        await preparation.processes(job(absent))


def packed(path: Path, entry: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return path


def test_artifacts_that_leave_their_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    bad = {
        "up.tar.gz": packed(tmp_path / "1", tarfile.TarInfo("../outside"), b"x"),
        "link.tar.gz": packed(tmp_path / "2", link),
        "up.whl": one_module_wheel(tmp_path, "up", "1", **{"../outside.py": "x"}),
        "data.whl": one_module_wheel(tmp_path, "data", "1", **{"data-1.data/scripts/x": "x"}),
        "text.whl": tmp_path / "3",
        "text.tar.gz": tmp_path / "3",
    }
    (tmp_path / "3").write_text("no archive")
    for number, (name, file) in enumerate(bad.items()):
        with pytest.raises(RequestError):
            artifacts.unpack(file, tmp_path / f"to-{number}", name)
    assert not list(tmp_path.glob("outside*")) and not list(tmp_path.glob("to-*/link"))
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(RequestError, match="no files"):
        artifacts.pack(source, tmp_path / "packed")
    (source / "a.py").symlink_to("/etc/passwd")
    with pytest.raises(RequestError, match="no plain file"):
        artifacts.pack(source, tmp_path / "packed")
    (source / "a.py").unlink()
    (source / "a.py").write_text("x" * 100)
    monkeypatch.setattr(artifacts, "MAX_BYTES", 99)
    with pytest.raises(RequestError, match="code alone"):
        artifacts.pack(source, tmp_path / "packed")


def test_an_account_must_reach_what_its_processes_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "inside").touch()
    account = replace(NOBODY, uid=os.getuid() + 1, groups=())
    first = account.closed_folder(closed / "inside")
    assert first is not None and first in (closed, *closed.parents)
    mine = Account("me", os.getuid(), os.getgid(), (os.getgid(),), "/")
    assert mine.closed_folder(closed / "inside") is None or os.geteuid() == 0
    with pytest.raises(OptionError, match="no such account"):
        offered_accounts(("no-such-account",), ())
    with pytest.raises(OptionError, match="it is root"):
        offered_accounts(("root",), ())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(OptionError, match="runs as root"):
        offered_accounts(("nobody",), ())


async def test_a_job_runs_only_under_an_account_of_the_node(tmp_path: Path) -> None:
    setup = NodeSetup(tmp_path / "cache", accounts=(NOBODY, replace(NOBODY, name="other")))
    preparation = Preparation(setup, tmp_path)
    assert (await preparation.processes(job())).account == NOBODY
    assert (await preparation.processes(job(run_as="other"))).account == setup.accounts[1]
    with pytest.raises(AssignmentError, match="--run-as has acme, other"):
        await preparation.processes(job(run_as="daemon"))
    with pytest.raises(AssignmentError, match="--run-as has no account"):
        await Preparation(NodeSetup(tmp_path), tmp_path).processes(job(run_as="daemon"))


async def test_what_is_fetched_can_be_read_by_the_accounts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "acme").mkdir(parents=True)
    (source / "acme" / "__init__.py").write_text("VERSION = 7\n")
    (source / "acme" / "tool").write_text("#!/bin/sh\n")
    (source / "acme" / "tool").chmod(0o700)
    uri, digest = artifacts.push(source, str(tmp_path / "store"))
    setup = NodeSetup(tmp_path / "cache", accounts=(NOBODY,))
    before = os.umask(0o077)
    try:
        found = await Preparation(setup, tmp_path).processes(
            job(CodeConfig(uri=uri, sha256=digest))
        )
    finally:
        os.umask(before)
    assert found.account == NOBODY
    kept = Path(found.code.path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (kept, *kept.rglob("*"))}
    assert modes["acme"] == modes[digest] == 0o755 and modes["__init__.py"] == 0o644
    assert modes["tool"] == 0o755 and kept.parent.stat().st_mode & 0o777 == 0o755


@ROOT_ONLY
def test_a_process_becomes_the_account_and_cannot_go_back(tmp_path: Path) -> None:
    # Not Python, whose interpreter may lie where the account cannot go.
    shell = "id -u; id -g; id -G; grep -c ^CapEff:.0*$ /proc/self/status"
    done = subprocess.run(
        NOBODY.command(["/bin/sh", "-c", shell]), capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["65534", "65534", "65534", "1"], done.stderr
    # What a job puts first where modules are looked up is not loaded as root.
    (tmp_path / "sitecustomize.py").write_text("import os; print('loaded by', os.geteuid())\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        NOBODY.command(["/bin/true"]), env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    lost = subprocess.run(
        NOBODY.command(["/root/absent"]), capture_output=True, text=True, check=False
    )
    assert lost.returncode == 1 and "cannot run /root/absent as user 65534" in lost.stderr
