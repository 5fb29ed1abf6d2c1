"""Another build of the project: the tree of a commit, unpacked beside this one."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.harness.driver import here

# A commit or tag; without it the newest tag, and without tags the commit before this one.
PREVIOUS_VARIABLE = "MEGASCALE_PREVIOUS_BUILD"
ROOTS = (
    "proto", "services/common", "services/driver", "services/executor", "services/checkpoint",
    "kernels", "clients/python", "clients/cli",
)  # fmt: skip


def previous_build(folder: Path) -> str:
    """The code of the build before this one, in the form of ``PYTHONPATH``, unpacked in ``folder``.

    Skips the test where there is no git history.
    """
    if not (here() / ".git").exists():
        pytest.skip("not a git clone: there is no build before this one")
    revision = os.environ.get(PREVIOUS_VARIABLE) or _newest_tag() or "HEAD^"
    archive = _git("archive", "--format=tar", revision, *ROOTS)
    if archive is None:
        pytest.skip(f"git has no tree of {revision} (a shallow clone?)")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    return os.pathsep.join(str(folder / root) for root in ROOTS)


def _newest_tag() -> str:
    return (_git("describe", "--tags", "--abbrev=0") or b"").decode().strip()


def _git(*arguments: str) -> bytes | None:
    """What git prints; None if it fails."""
    found = subprocess.run(["git", *arguments], cwd=here(), capture_output=True, check=False)
    return found.stdout if found.returncode == 0 else None
