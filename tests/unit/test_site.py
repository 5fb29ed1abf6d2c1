"""The documentation site: which links it keeps, and that every page is in its navigation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.site_hooks import for_site

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("path", "line", "shown"),
    [
        ("README.md", "[cli](docs/cli.md#profiles)", "[cli](cli.md#profiles)"),
        ("README.md", "[how](docs/how-to/)", "[how](how-to/README.md)"),
        ("README.md", "[a step](services/executor/trainer.py)", "a step"),
        ("docs/how-to/add-an-rpc.md", "[api](../api.md)", "[api](../api.md)"),
        ("docs/how-to/README.md", "[one](add-an-rpc.md)", "[one](add-an-rpc.md)"),
        ("docs/status.md", "[deploy](../deploy/README.md)", "deploy"),
        ("docs/status.md", "[front](../README.md)", "[front](index.md)"),
        ("docs/cli.md", "[above](#top) [away](https://a.example)", "[above](#top) "
         "[away](https://a.example)"),
        ("docs/client.md", "[example](examples/train_and_fetch.py)", "example"),
        ("docs/network.md", "![a](images/a.png)", "![a](images/a.png)"),
        ("docs/evidence.md", "![a](../benchmarks/results/a.png)", "![a](images/a.png)"),
        ("docs/how-to/README.md", "![](../../benchmarks/results/a.png)", "![](../images/a.png)"),
        ("README.md", "![a](benchmarks/results/a.png)", "![a](images/a.png)"),
        ("README.md", "![a](docs/images/a.png)", "![a](images/a.png)"),
    ],
)  # fmt: skip
def test_a_link_leads_to_a_page_of_the_site_or_becomes_text(
    path: str, line: str, shown: str
) -> None:
    assert for_site(line, path) == f"{shown}\n"


def test_code_stays_as_it_is_and_lists_begin_after_an_empty_line() -> None:
    text = "```\n[a](b.py)\n- c\n```\ntext:\n- one\n- two\n\n| a |\n|---|\n"
    shown = "```\n[a](b.py)\n- c\n```\ntext:\n\n- one\n- two\n\n| a |\n|---|\n"
    assert for_site(text, "README.md") == shown


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (REPOSITORY / "mkdocs.yml").read_text()))
    docs = REPOSITORY / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert listed == pages | {"index.md"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs mkdocs-material (make docs installs it)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "operations.html").is_file()
    shown = set(re.findall(r'<img [^>]*src="([^"]+)"', (tmp_path / "evidence.html").read_text()))
    pictures = {name for name in shown if name.startswith("images/")}
    assert "images/2026-11-27-lamb-h200.png" in pictures
    assert all((tmp_path / name).is_file() for name in pictures)
