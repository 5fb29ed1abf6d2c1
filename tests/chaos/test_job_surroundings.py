"""Code, packages, secrets and account of a job on a cluster; no secret in a file that it leaves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster
from tests.harness.installed_package import install
from tests.harness.job_follower import JobFollower
from tests.harness.wheel import one_module_wheel, unpack

from megascale.v1 import job_pb2
from megascale_checkpoint import artifacts
from megascale_client import AsyncClient, InvalidJob
from megascale_common.node.account import Account

STEPS = 20_000
FROM_FILE, FROM_VARIABLE = "planted-in-a-file-5c1f", "planted-in-a-variable-77ab"
# In the environment of everybody who starts the cluster, and none of the cluster's business.
AMBIENT = "planted-in-the-shell-09de"

# It prints what it should not, and digests that show what it was given.
CODE = """
import hashlib, os, sys, time

import acme_extra
from megascale_trainer.optimizer.adamw import AdamW

GIVEN = [os.environ["API_KEY"], os.environ["HUB_TOKEN"]]
print("at import", GIVEN, flush=True)


class Careless(AdamW):
    def __init__(self, setup):
        super().__init__(setup)
        shown = " ".join(hashlib.sha256(value.encode()).hexdigest()[:12] for value in GIVEN)
        print("digests", shown, "extra", acme_extra.VERSION, "user", os.getuid(), flush=True)
        print("interpreter", sys.executable, flush=True)
        print({name: os.environ[name] for name in ("API_KEY", "HUB_TOKEN")}, file=sys.stderr)
        self._steps = 0

    def update(self, *values):
        time.sleep(0.02)
        self._steps += 1
        if self._steps == FAILS_AT:
            raise RuntimeError("the hub refused " + GIVEN[1])
        super().update(*values)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("surroundings")
    with pytest.MonkeyPatch.context() as environment:
        plant(folder, environment)
        with chaos_cluster(folder, "--nodes", "2", "--tls") as ready:
            yield ready


def plant(folder: Path, environment: pytest.MonkeyPatch) -> None:
    secrets = folder.with_name(folder.name + ".secrets")
    secrets.mkdir(mode=0o700)
    (secrets / "api-key").write_text(FROM_FILE + "\n")
    environment.setenv("MEGASCALE_SECRETS_FOLDER", str(secrets))
    environment.setenv("MEGASCALE_SECRET_HUB", FROM_VARIABLE)
    environment.setenv("AWS_SECRET_ACCESS_KEY", AMBIENT)


def careless(cluster: ChaosCluster, name: str, fails_at: int) -> job_pb2.JobSpec:
    """A job with code from storage, another package in it, and two secrets."""
    source = cluster.folder / f"source-{name}"
    source.mkdir()
    code = CODE.replace("FAILS_AT", str(fails_at))
    install(source, f"acme-{name}", code, {"careless": "Careless"}, group="megascale.optimizers")
    unpack(one_module_wheel(cluster.folder, "acme_extra", "1.2"), source)
    spec = cluster.job(name, steps=STEPS, interval_steps=10)
    spec.trainer.optimizer.name = "careless"
    spec.trainer.optimizer.ClearField("options")
    spec.trainer.telemetry.tensorboard = False
    spec.code.uri, spec.code.sha256 = artifacts.push(source, str(cluster.folder / "store"))
    spec.environment.secrets.update(API_KEY="file:api-key", HUB_TOKEN="env:HUB")
    spec.recovery.max_restarts = 0
    return spec


def another_interpreter(folder: Path) -> str:
    """An environment that an operator made: one more package, and what is installed here."""
    made = folder / "of-the-operator"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    unpack(one_module_wheel(folder, "acme_extra", "1.2"), packages)
    own = sysconfig.get_path("purelib")
    (packages / "zz_here.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    return str(made / "bin" / "python")


def digests() -> str:
    values = (FROM_FILE, FROM_VARIABLE)
    return " ".join(hashlib.sha256(value.encode()).hexdigest()[:12] for value in values)


def files_below(folder: Path) -> Iterator[Path]:
    """Files below ``folder``; not by Path.rglob, which fails where a folder goes meanwhile."""
    for below, _, names in os.walk(folder):
        for name in names:
            if (path := Path(below, name)).is_file() and not path.is_symlink():
                yield path


def files_with(folder: Path, text: str) -> list[str]:
    """Files below ``folder`` in which ``text`` stands; the cluster may be replacing some."""
    found = []
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):
            if text.encode() in path.read_bytes():
                found.append(str(path.relative_to(folder)))
    return found


async def test_no_secret_is_in_any_file_that_a_run_leaves(cluster: ChaosCluster) -> None:
    async with cluster.client() as client:
        trained = await until_trained(client, cluster, careless(cluster, "armed", fails_at=-1))
        job = trained.job
        for rank in (0, 1):
            log = cluster.rank_log(job, rank)
            assert f"digests {digests()} extra 1.2" in log, "the processes have the values"
            assert "[secret API_KEY]" in log and "[secret HUB_TOKEN]" in log
        shown = str(await client.get("armed"))
        assert "file:api-key" in shown and "env:HUB" in shown
        spec = careless(cluster, "broken", fails_at=5)
        spec.environment.python = another_interpreter(cluster.folder)
        spec.trainer.parallelism.pp = 1  # one rank: this interpreter imports torch for it alone
        spec.trainer.parallelism.ClearField("overlap")
        async with JobFollower(client, spec, cluster.up.folder) as broken:
            await broken.until_ended()
        assert f"interpreter {spec.environment.python}\n" in cluster.rank_log(broken.job, 0)
        why = str(await client.explain("broken"))
        assert "the hub refused" in f"{broken.story()} {why}"
        told = [shown, why, broken.story(), str([event async for event in client.events()])]
    assert not [each for each in (FROM_FILE, FROM_VARIABLE, AMBIENT) if each in str(told)]
    kept = cluster.up.folder / "cache"
    assert len([path for path in (kept / "code").iterdir() if path.is_dir()]) == 2
    token = (cluster.up.folder / "token").read_text().strip()
    assert files_with(cluster.folder, "armed"), "the search finds what is there"
    for planted in (FROM_FILE, FROM_VARIABLE, AMBIENT):
        assert files_with(cluster.folder, planted) == []
    assert files_with(cluster.folder, token) == ["run/token"]
    keys = [path for path in files_below(cluster.up.folder) if path.name.endswith("key")]
    closed = [cluster.up.folder / "token", *keys]
    assert len(closed) > 3
    for path in closed:
        assert path.stat().st_mode & 0o077 == 0, path
    for path in keys:
        secret = path.read_text().splitlines()[2]
        assert files_with(cluster.folder, secret) == [str(path.relative_to(cluster.folder))]


async def test_a_value_in_a_job_file_is_refused_and_not_repeated(cluster: ChaosCluster) -> None:
    spec = cluster.job("told", steps=1, interval_steps=1)
    spec.environment.secrets["API_KEY"] = "hunter2-in-a-job-file"
    async with cluster.client() as client:
        with pytest.raises(InvalidJob, match="never the value") as refused:
            await client.submit(spec)
    assert "hunter2" not in str(refused.value)
    assert files_with(cluster.folder, "hunter2-in-a-job-file") == []


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("code", "uri", "/absent/a.whl"),
        ("code", "path", "/absent/folder"),
        ("environment", "python", "/absent/python"),
    ],
)
async def test_what_is_certainly_not_there_is_refused_at_submit(
    cluster: ChaosCluster, section: str, field: str, value: str
) -> None:
    spec = cluster.job("absent", steps=1, interval_steps=1)
    setattr(getattr(spec, section), field, value)
    if field == "uri":
        spec.code.sha256 = "0" * 64
    async with cluster.client() as client:
        with pytest.raises(InvalidJob, match=f"{section}.{field}: there is no {value}"):
            await client.submit(spec)


async def until_trained(
    client: AsyncClient, cluster: ChaosCluster, spec: job_pb2.JobSpec
) -> JobFollower:
    """Follow a job until it has trained and committed; then cancel it."""
    async with JobFollower(client, spec, cluster.up.folder) as followed:
        await followed.until(lambda: len(followed.losses.get(1, {})) > 15, "it trains")
        await followed.until_committed()
        await client.cancel(spec.name, "enough")
        await followed.until_ended()
    assert cluster.commit_log(spec.name).commits(), followed.story()
    return followed


def log_users(cluster: ChaosCluster, spec: job_pb2.JobSpec, file: Path) -> None:
    """Have every Python process that looks up modules in the job's code write its user first."""
    source = cluster.folder / f"source-{spec.name}"
    code = f"import os; print(os.geteuid(), file=open({str(file)!r}, 'a'))\n"
    (source / "sitecustomize.py").write_text(code)
    spec.code.uri, spec.code.sha256 = artifacts.push(source, str(cluster.folder / "store"))


def nobody() -> Account:
    """An account that can run this interpreter; skips the test where there is none."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another account")
    account = Account.of("nobody")
    for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__)):
        if closed := account.closed_folder(path):
            pytest.skip(f"other accounts cannot enter {closed}, and so not run {path}")
    return account


@pytest.mark.slow
async def test_processes_of_a_job_run_under_their_own_account() -> None:
    account = nobody()
    folder = Path(tempfile.mkdtemp(prefix="megascale-run-as-", dir="/tmp"))
    folder.chmod(0o711)
    with pytest.MonkeyPatch.context() as environment:
        plant(folder, environment)
        environment.setenv("MEGASCALE_RUN_AS", account.name)
        # `megascale up` makes it for its owner alone; whoever offers accounts opens the way.
        for opened in (folder / "run", folder / "run" / "nodes"):
            opened.mkdir()
            opened.chmod(0o711)
        try:
            with chaos_cluster(folder, "--nodes", "1") as cluster:
                async with cluster.client() as client:
                    spec = careless(cluster, "apart", fails_at=-1)
                    spec.trainer.telemetry.tensorboard = True
                    spec.trainer.parallelism.pp = 1
                    spec.trainer.parallelism.ClearField("overlap")
                    as_whom = folder / "as-whom"
                    as_whom.touch()
                    as_whom.chmod(0o666)
                    log_users(cluster, spec, as_whom)
                    followed = JobFollower(client, spec, cluster.up.folder)
                    async with followed:
                        await followed.until(
                            lambda: len(followed.losses.get(1, {})) > 15, "it trains"
                        )
                        pids = cluster.worker_pids(followed.job)
                        for node, pid in zip(followed.job.nodes, pids.values(), strict=True):
                            roles = cluster.up.node_pids(node)
                            owners = {role: os.stat(f"/proc/{pid}").st_uid
                                      for role, pid in roles.items()}  # fmt: skip
                            assert os.stat(f"/proc/{pid}").st_uid == account.uid
                            assert owners["loader"] == owners["template"] == account.uid
                            assert owners["agent"] == owners["checkpoint"] == 0
                        await followed.until_committed()
                        await client.cancel(spec.name, "enough")
                        await followed.until_ended()
                assert cluster.commit_log("apart").commits(), followed.story()
                log = cluster.status_page(followed.job, 0).with_name("rank-00000.log")
                assert f"user {account.uid}" in log.read_text()
                assert set(as_whom.read_text().split()) == {str(account.uid)}
                assert (log.stat().st_uid, log.parent.stat().st_uid) == (0, 0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder.with_name(folder.name + ".secrets"), ignore_errors=True)
