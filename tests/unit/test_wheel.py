"""The wheel has what the packages of the tree have, and nothing else."""

from __future__ import annotations

import configparser
import subprocess
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from tests.harness.driver import here
from tests.harness.wheel import build_wheel

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((here() / "pyproject.toml").read_text())


def content(wheel: zipfile.ZipFile, end: str) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith(end))
    return wheel.read(name).decode()


def test_it_holds_every_file_of_the_packages(
    wheel: zipfile.ZipFile, project: dict[str, object]
) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=here(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git clone: what belongs to the tree is not known")
    roots = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]  # type: ignore[index]
    expected = {
        str(Path(file).relative_to(Path(root).parent))
        for file in listed.stdout.splitlines()
        for root in roots
        if Path(file).is_relative_to(root) and (here() / file).exists()
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    for needed in ("megascale/v1/job.proto", "megascale_dashboard/static/app.js"):
        assert needed in packed


def test_every_command_is_a_module_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(content(wheel, ".dist-info/entry_points.txt"))
    packed = set(wheel.namelist())
    named = [value for section in points.sections() for value in points[section].values()]
    assert len(named) > 10
    for value in named:
        module = value.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & packed, value


def test_its_metadata_offers_the_extras(wheel: zipfile.ZipFile, project: dict[str, object]) -> None:
    metadata = Parser().parsestr(content(wheel, ".dist-info/METADATA"))
    extras = project["project"]["optional-dependencies"]  # type: ignore[index]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)
    assert {"executor", "checkpoint", "dashboard"} <= set(extras)
    assert "torch" not in "".join(
        line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line
    )
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
