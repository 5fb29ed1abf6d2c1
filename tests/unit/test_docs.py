"""The pages for people: their links and paths exist, and their lines are short."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs import pages

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
TREES = ("benchmarks", "clients", "deploy", "docs", "kernels", "proto", "services", "tests")
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        REPOSITORY / "clients" / "grpcurl" / "README.md",
        REPOSITORY / "deploy" / "README.md",
        *(REPOSITORY / "benchmarks").glob("**/README.md"),
    ]
)
PROSE = [page for page in PAGES if page.name != "CHANGELOG.md"]
MAX_COLUMNS = 140
SUFFIXES = {".md", ".proto", ".py", ".sh", ".toml", ".yaml"}
# Every file and folder, from the repository's root, such as services/common/megascale_common.
PATHS = [
    path.relative_to(REPOSITORY).as_posix()
    for tree in TREES
    for path in [REPOSITORY / tree, *(REPOSITORY / tree).rglob("*")]
    if "__pycache__" not in path.parts
] + [path.name for path in REPOSITORY.iterdir()]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY))
)


def by_hand(page: Path) -> str:
    """The text of a page without its generated part."""
    head, _, rest = page.read_text().partition(pages.BEGIN)
    return head + rest.partition(pages.END)[2]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside code blocks, with their numbers."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for _, line in prose(page.read_text()):
        if heading := re.match(r"#+ (.+)", line):
            name = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            assert name not in found, f"{page}: two headings {heading[1]}"
            found.add(name)
    return found


def expanded(path: str) -> Iterator[str]:
    """``a/{b,c}.py`` as a/b.py and a/c.py."""
    group = re.search(r"\{([^{}]*)\}", path)
    if group is None:
        yield path
        return
    for choice in group[1].split(","):
        yield from expanded(path[: group.start()] + choice + path[group.end() :])


def exists(path: str) -> bool:
    """Whether a path is that of a file or folder, or its end, from a folder on.

    ``trainer/data/`` may stand for services/executor/megascale_trainer/data.
    """
    name = path.rstrip("/")
    ends = (name, f"*/{name}", f"*/megascale_{name}")
    return any(fnmatch.fnmatch(known, end) for end in ends for known in PATHS)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for number, line in prose(page.read_text()):
        for target in re.findall(r"\]\(([^()]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.exists(), f"{page.name}:{number}: {target}"
            if anchor:
                assert anchor in anchors(linked), f"{page.name}:{number}: {target}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_path_in_backticks_exists(page: Path) -> None:
    # A line that ends with a colon may name the file of the code block below it.
    shown = set(re.findall(r"`([^`\s]+)`[^`\n]*:\n+```", page.read_text()))
    for number, line in prose(page.read_text()):
        for token in re.findall(r"`([^`\s]+)`", line):
            # Capitals stand for a name of the reader's, and a job's own files are not ours.
            is_path = re.fullmatch(r"[a-z0-9_./*{},-]+", token) and not token.startswith((".", "/"))
            first = token.partition("/")[0]
            is_ours = token.endswith("/") or Path(token).suffix in SUFFIXES or first in TREES
            if is_path and is_ours and token not in shown:
                for path in expanded(token):
                    assert exists(path), f"{page.name}:{number}: {token}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_lines_of_prose_are_short(page: Path) -> None:
    for number, line in prose(by_hand(page)):
        if not line.lstrip().startswith("|") and "](" not in line:
            assert len(line) <= MAX_COLUMNS, f"{page.name}:{number}: {len(line)} columns"


def test_a_number_in_a_link_of_the_readme_is_on_the_page_that_it_leads_to() -> None:
    found = 0
    readme = (REPOSITORY / "README.md").read_text()
    for text, page in re.findall(r"\[([^\]]+)\]\((docs/[\w/-]+\.md)#?[^)]*\)", readme):
        for number in re.findall(r"\d[\d.,]* ?%", text):
            assert number in (REPOSITORY / page).read_text(), (text, page)
            found += 1
    assert found, "the README links numbers to their evidence"


def test_paths_are_found_by_their_end_and_not_otherwise() -> None:
    assert exists("trainer/data/") and exists("megascale_job/config.py")
    assert exists("docs/*.md") and exists("Makefile")
    assert not exists("rainer/data") and not exists("no_such_file.py")
    assert list(expanded("a/{b,c}.py")) == ["a/b.py", "a/c.py"]
