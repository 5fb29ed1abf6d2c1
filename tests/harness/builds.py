"""Another build of the project: the wheel of a commit, built and unpacked beside this tree."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.harness.driver import here
from tests.harness.wheel import build_wheel, unpack

# A commit or tag; without it the newest tag, and without tags the commit before this one.
PREVIOUS_VARIABLE = "MEGASCALE_PREVIOUS_BUILD"


def previous_build(folder: Path) -> str:
    """The wheel of the build before this one, unpacked in ``folder``: the form of ``PYTHONPATH``.

    Skips the test where there is no git history, or no hatchling to build the wheel with.
    """
    if not (here() / ".git").exists():
        pytest.skip("not a git clone: there is no build before this one")
    revision = os.environ.get(PREVIOUS_VARIABLE) or _newest_tag() or "HEAD^"
    archive = _git("archive", "--format=tar", revision)
    if archive is None:
        pytest.skip(f"git has no tree of {revision} (a shallow clone?)")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        # `filter` of extractall came with 3.11.4; Debian 12 has 3.11.2.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda entry, _: entry)
        packed.extractall(folder / "tree")
    return unpack(build_wheel(folder, folder / "tree"), folder / "installed")


def _newest_tag() -> str:
    return (_git("describe", "--tags", "--abbrev=0") or b"").decode().strip()


def _git(*arguments: str) -> bytes | None:
    """What git prints; None if it fails."""
    found = subprocess.run(["git", *arguments], cwd=here(), capture_output=True, check=False)
    return found.stdout if found.returncode == 0 else None
