"""deploy/Containerfile: its install steps in Debian roots, and what its processes may do there.

No image is built: that needs a builder of images. Needs root, mmdebstrap, a mirror of Debian and a
package index.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.containerfile import Builder, scratch
from tests.harness.driver import here

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
    pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="no mmdebstrap"),
]
TEXT = (here() / "deploy" / "Containerfile").read_text()
TORCH = os.environ.get("MEGASCALE_TEST_TORCH", "torch==2.13.0")
PROGRAMS = {
    "driver": "megascale_driver",
    "checkpoint": "megascale_checkpoint",
    "node": "megascale_executor.agent",
}


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with scratch(tmp_path_factory.mktemp("roots") / "stages") as folder:
        # Passed through by root alone; a container's user meets the root itself.
        yield Builder(folder, here(), TEXT, {"TORCH": TORCH})


@pytest.mark.parametrize("target", PROGRAMS)
def test_a_target_starts_its_program_without_rights(builder: Builder, target: str) -> None:
    built = builder.build(target)
    assert built.entry == ("python", "-m", PROGRAMS[target]) and built.user == "10001:10001"
    done = builder.run(built, [*built.entry, "--help"])
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    shell = "id -u; touch /opt/megascale/x 2>/dev/null || echo closed; touch x && echo own"
    assert builder.run(built, ["/bin/sh", "-c", shell]).stdout.split() == ["10001", "closed", "own"]
    left = [name for name in ("src", "wheels") if (built.root / name).exists()]
    assert left == [], "an image needs neither sources nor wheels"
    torch = builder.run(built, ["python", "-c", "import torch"]).returncode
    assert (torch == 0) == (target == "node")


def test_a_node_trains_and_recovers_as_its_user(builder: Builder) -> None:
    """`megascale demo` in the root of a node: etcd, driver, three nodes, one killed."""
    built = builder.build("node")
    command = ["megascale", "demo", "--device", "cpu", "--devices-per-node", "2", "--tp", "1"]
    done = builder.run(built, [*command, "--json"])
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["attempts"] == 2 and report["loss_after_resume_matches"] is True, report


def test_every_path_that_is_copied_is_in_the_tree() -> None:
    copied = [line.split()[1:-1] for line in TEXT.splitlines() if line.startswith("COPY ")]
    names = [name for words in copied for name in words if not name.startswith(("--", "/"))]
    assert len(names) > 5 and all(Path(here() / name).exists() for name in names)
