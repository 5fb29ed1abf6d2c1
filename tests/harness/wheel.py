"""The project's wheel: built from a tree, read, and installed into an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.harness.driver import here

BUILD_TIMEOUT_S, INSTALL_TIMEOUT_S = 120, 540
# Variables that would let an installed build find the source tree, or another environment.
_OF_THE_TREE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def build_wheel(folder: Path, tree: Path | None = None) -> Path:
    """The wheel of ``tree`` (this one if None), written into ``folder``.

    Skips the test where hatchling, the project's build tool, is not installed.
    """
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=tree or here(),
        check=True,
        capture_output=True,
        timeout=BUILD_TIMEOUT_S,
    )
    (wheel,) = folder.glob("megascale-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> str:
    """The wheel's content in ``folder``, in the form of ``PYTHONPATH``, entry points included."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return str(folder)


def one_module_wheel(folder: Path, name: str, version: str, **files: str) -> Path:
    """A wheel of one module, as a build tool writes it."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    content = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        **files,
    }
    with zipfile.ZipFile(path, "w") as packed:
        for member, text in content.items():
            packed.writestr(zipfile.ZipInfo(member), text)
    return path


class Environment:
    """A virtual environment in ``folder`` that sees neither the source tree nor this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    @property
    def variables(self) -> Mapping[str, str]:
        """What its processes get."""
        kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_TREE}
        return kept | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def install(self, *requirements: str) -> None:
        """Install ``requirements`` in the pinned versions."""
        constraints = str(here() / "constraints.txt")
        done = self.run(
            "-m", "pip", "install", "--quiet", "--constraint", constraints, *requirements
        )
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Its interpreter with ``arguments``, until it ends."""
        return subprocess.run(
            [str(self.folder / "bin" / "python"), *arguments],
            env=self.variables,
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
        )

    def megascale(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """The installed command `megascale`, until it ends."""
        return subprocess.run(
            [str(self.folder / "bin" / "megascale"), *arguments],
            env={**self.variables, "COLUMNS": "200"},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
        )
