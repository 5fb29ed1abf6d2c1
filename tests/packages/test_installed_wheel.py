"""The built wheel in empty environments: what each extra unlocks, and a job outside of the tree.

Needs a package index, or the folder of wheels that pip is configured with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.harness.wheel import Environment, build_wheel

pytestmark = pytest.mark.wheel
TORCH = os.environ.get("MEGASCALE_TEST_TORCH", "torch==2.13.0")
# Imports every module of the named packages; prints those that cannot be, with the reason.
_IMPORT_ALL = """
import importlib, pkgutil, sys
packages, allowed = sys.argv[1].split(","), set(sys.argv[2].split(","))
failed, count = [], 0
for package in packages:
    root = importlib.import_module(package)
    names = [m.name for m in pkgutil.walk_packages(root.__path__, package + ".")]
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
            count += 1
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in allowed:
                failed.append(f"{name}: {error}")
print("\\n".join(failed))
sys.exit(1 if failed or not count else 0)
"""
# By extra: the packages whose modules import then, and what further extras may still be lacking.
UNLOCKED = {
    "": (
        "megascale.v1,megascale_client,megascale_cli,megascale_common,megascale_driver",
        "numpy,pyarrow,duckdb,cryptography,jwt,matplotlib,aiohttp,kubernetes_asyncio",
    ),
    "plan": ("megascale_common,megascale_planner", ""),
    "tls,oidc": ("megascale_common.service.identity", ""),
    "dashboard": ("megascale_dashboard", ""),
    "kubernetes": ("megascale_driver.platform.kubernetes", ""),
    "observability": ("megascale_driver", "matplotlib"),
    "checkpoint": ("megascale_checkpoint", "torch,boto3,botocore,hdfs_native"),
    "s3": ("megascale_checkpoint.storage", "hdfs_native"),
    f"executor {TORCH}": (
        "megascale_executor,megascale_trainer",
        "triton,pynvml,cudnn,wandb,mlflow,tensorboard",
    ),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("empty") / "venv")


@pytest.mark.parametrize("extra", UNLOCKED)
def test_each_extra_brings_what_its_modules_import(
    wheel: Path, environment: Environment, extra: str
) -> None:
    """In the order of the table: one environment gets one extra after the other."""
    names, _, further = extra.partition(" ")
    environment.install(*further.split(), f"{wheel}[{names}]" if names else str(wheel))
    packages, allowed = UNLOCKED[extra]
    done = environment.run("-c", _IMPORT_ALL, packages, allowed)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_install_answers_without_any_extra(wheel: Path, tmp_path: Path) -> None:
    base = Environment(tmp_path / "venv")
    base.install(str(wheel))
    for missing in ("torch", "numpy"):
        assert base.run("-c", f"import {missing}").returncode == 1
    assert base.run("-m", "megascale_driver", "--help").returncode == 0
    written = base.megascale("init", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    plan = base.megascale("plan", "job.yaml", "--json", "--offline", cwd=tmp_path)
    assert json.loads(plan.stdout)["parameters"] > 100_000, plan.stdout + plan.stderr
    lacking = base.megascale("dashboard", cwd=tmp_path)
    assert lacking.returncode != 0 and "megascale[dashboard]" in lacking.stderr


def test_it_trains_outside_of_the_tree_and_survives_the_loss_of_a_node(
    wheel: Path, tmp_path: Path
) -> None:
    """`megascale demo` of the installed wheel: a cluster, a job, a killed node, an equal twin."""
    installed = Environment(tmp_path / "venv")
    installed.install(TORCH, f"{wheel}[executor,checkpoint]")
    where = installed.run("-c", "import megascale_driver as d; print(d.__file__)")
    assert str(installed.folder) in where.stdout
    done = installed.megascale(
        "demo", "--device", "cpu", "--devices-per-node", "2", "--tp", "1", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["attempts"] == 2 and report["loss_after_resume_matches"] is True, report
    assert (tmp_path / "runs" / "demo" / "report.json").exists()
