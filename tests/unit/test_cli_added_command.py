"""A command of another package, as docs/how-to/add-a-cli-command.md adds one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import program_start
from tests.harness.scripted_driver import TOKEN, ScriptedDriver

from megascale.v1 import driver_pb2, types_pb2
from megascale_cli.exits import FAILED, OK, UNAVAILABLE
from megascale_cli.plugins import GROUP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-cli-command.md"
FILE = re.compile(r"^`([\w.]+)`[^\n]*:\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IDLE = {
    "liveness": types_pb2.NODE_LIVENESS_ALIVE,
    "disposition": types_pb2.NODE_DISPOSITION_SCHEDULABLE,
}
NODES = [
    driver_pb2.Node(name="n1", **IDLE, devices=[types_pb2.Device()] * 2),
    driver_pb2.Node(name="n2", **IDLE, job="some-job"),
    driver_pb2.Node(name="n3", **{**IDLE, "disposition": types_pb2.NODE_DISPOSITION_CORDONED}),
]


class NodesDriver(ScriptedDriver):
    """Lists the nodes that a test puts there."""

    nodes: list[driver_pb2.Node]

    async def ListNodes(self, request: Any, context: Any) -> driver_pb2.ListNodesResponse:
        return driver_pb2.ListNodesResponse(nodes=self.nodes)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page in a folder, with the metadata that an installation would write."""
    folder = tmp_path_factory.mktemp("site")
    files = dict(FILE.findall(PAGE.read_text()))
    assert list(files) == ["pyproject.toml", "megascale_idle.py", "test_megascale_idle.py"]
    for name, text in files.items():
        (folder / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    named = f"Name: {project['name']}\nVersion: {project['version']}\n"
    summary = f"Summary: {project['description']}\n"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}{summary}")
    targets = [f"{name} = {target}" for name, target in project["entry-points"][GROUP].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *targets, ""]))
    return folder


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[NodesDriver]:
    """A driver whose run folder is ``tmp_path``."""
    scripted = NodesDriver()  # type: ignore[abstract]
    scripted.nodes = NODES
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "driver.address").write_text(await scripted.start())
    yield scripted
    await scripted.server.stop(0)


def megascale(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the CLI where the package is installed."""
    path = os.pathsep.join([*filter(None, sys.path), str(package)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
    command = [sys.executable, *arguments]
    with program_start.forked():
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


CLI = ("-m", "megascale_cli")


def test_help_lists_the_command_and_only_its_own_help_imports_it(package: Path) -> None:
    program = (
        "import sys\nfrom megascale_cli.app import build_app\n"
        "try:\n build_app()(sys.argv[1:], prog_name='megascale')\n"
        "finally:\n print('LOADED', 'megascale_idle' in sys.modules)\n"
    )
    listed = megascale(package, "-c", program, "--help").stdout
    assert " idle " in listed and "List the nodes that could take work now." in listed
    assert "LOADED False" in listed
    own = megascale(package, "-c", program, "idle", "--help").stdout
    assert "Example: megascale idle --json" in own and "--cluster" in own
    assert "LOADED True" in own


async def test_the_command_asks_the_cluster_and_prints_people_and_programs_their_form(
    package: Path, driver: NodesDriver, tmp_path: Path
) -> None:
    here = ("--cluster", str(tmp_path))
    shown = await asyncio.to_thread(megascale, package, *CLI, "idle", *here)
    assert (shown.returncode, shown.stderr) == (OK, "")
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["NAME", "DEVICES"],
        ["n1", "2"],
    ]
    printed = await asyncio.to_thread(megascale, package, *CLI, "idle", *here, "--json")
    assert [json.loads(line)["name"] for line in printed.stdout.splitlines()] == ["n1"]
    driver.nodes = NODES[1:]
    none = await asyncio.to_thread(megascale, package, *CLI, "idle", *here)
    assert (none.returncode, none.stdout) == (FAILED, "no node is idle\n")


def test_without_a_cluster_it_fails_as_every_command_does(package: Path) -> None:
    failed = megascale(package, *CLI, "idle", "--cluster", str(package / "nowhere"), "--json")
    assert (failed.returncode, failed.stdout) == (UNAVAILABLE, "")
    assert json.loads(failed.stderr)["kind"] == "ClusterNotFound"


def test_the_tests_of_the_page_pass(package: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(package))
    done = megascale(package, "-m", "pytest", *options, str(package / "test_megascale_idle.py"))
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
