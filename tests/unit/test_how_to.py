"""docs/how-to/ and the ten questions of docs/architecture.md agree with the source."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from docs import generate_client, generate_grpcurl, pages

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
HOW_TO = REPOSITORY / "docs" / "how-to"
PAGES = sorted(path for path in HOW_TO.glob("*.md") if path.name != "README.md")
MAX_FILES = 4
WRITTEN_BY_HAND = ("proto", "services", "clients", "kernels", "deploy")
ROOTS = (*WRITTEN_BY_HAND, "benchmarks", "docs", "tests")
GENERATED = re.compile(r"(Begin of the generated part).*?(End of the generated part)", re.DOTALL)


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in ``text``, without its head."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def section(page: Path, heading: str) -> str:
    return page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def files(text: str) -> list[str]:
    """Paths in backticks that begin at the repository's root."""
    return re.findall(rf"`((?:{'|'.join(ROOTS)})/[\w./-]+\.\w+)`", text)


def listed(page: Path) -> list[str]:
    """The files that an extension takes by its page: those of the first table."""
    return [path for cells in rows(page.read_text()) for path in files(cells[0])]


def naming(word: str) -> set[str]:
    """Files that name ``word``, without generated ones."""
    found = set()
    for folder in WRITTEN_BY_HAND:
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "_pb2" not in path.name and "__pycache__" not in path.parts:
                text = GENERATED.sub("", path.read_text(errors="ignore"))
                if re.search(rf"\b{word}\b", text):
                    found.add(path.relative_to(REPOSITORY).as_posix())
    return found


def blocks(page: Path) -> list[tuple[str, str]]:
    """(file, code) of every code block below a line that begins or ends with the file's name."""
    return re.findall(r"`([^`\s]+)`[^\n]*:\n```\w*\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    ("page", "word", "beside"),
    [
        ("add-a-job-field.md", "min_ratio", set()),
        # The page of a job tells apart what answers a fault.
        (
            "add-an-event.md",
            "SPARE_ASSIGNED",
            {"clients/dashboard/megascale_dashboard/job_view.py"},
        ),
        # The module of the sentence itself names the call that it serves.
        (
            "add-an-rpc.md",
            "ExplainJob",
            {
                "services/driver/megascale_driver/core/queue/explain.py",
                "clients/dashboard/megascale_dashboard/job_view.py",
            },
        ),
    ],
)
def test_a_page_lists_every_file_that_its_example_takes(
    page: str, word: str, beside: set[str]
) -> None:
    files = listed(HOW_TO / page)
    assert len(files) == len(set(files)) <= MAX_FILES
    assert naming(word) ^ set(files) == beside


@pytest.mark.parametrize("name", ["GetMfuDecline", "ListCheckpoints", "ListEvents"])
def test_other_calls_that_read_take_four_files_too(name: str) -> None:
    assert len(naming(name)) == MAX_FILES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for path in files(page.read_text()):
        assert (REPOSITORY / path).is_file(), path


@pytest.mark.parametrize("page", ["add-a-job-field.md", "add-an-event.md", "add-an-rpc.md"])
def test_every_line_of_an_example_is_in_its_file(page: str) -> None:
    shown = blocks(HOW_TO / page)
    assert {path for path, _ in shown} == set(listed(HOW_TO / page))
    for path, code in shown:
        source = (REPOSITORY / path).read_text().splitlines()
        for line in filter(None, code.splitlines()):
            assert line in source, f"{page}: {path}: {line}"


def test_the_index_names_every_page_with_its_number_of_files() -> None:
    index = rows((HOW_TO / "README.md").read_text())
    linked = [match[1] for cells in index if (match := re.search(r"\]\((.+)\)", cells[0]))]
    assert sorted(linked) == [page.name for page in PAGES]
    for name, cells in zip(linked, index, strict=True):
        title = (HOW_TO / name).read_text().splitlines()[0].removeprefix("# ")
        assert cells[0].startswith(f"[{title}]")
        assert int(cells[1].partition(" ")[0].strip(":")) <= MAX_FILES
    for name in ("add-a-job-field.md", "add-an-event.md", "add-an-rpc.md", "add-a-fused-kernel.md"):
        (cells,) = (each for each in index if f"({name})" in each[0])
        assert int(cells[1].partition(":")[0]) == len(rows((HOW_TO / name).read_text()))


def test_ten_questions_are_answered_in_at_most_two_folders_each() -> None:
    table = rows(section(REPOSITORY / "docs" / "architecture.md", "Ten questions"))
    assert len(table) == 10
    for question, where, answer in table:
        found = files(where)
        assert found and len({Path(path).parent for path in found}) <= 2, question
        source = "\n".join((REPOSITORY / path).read_text() for path in found)
        names = re.findall(r"`(\w+)`", answer)
        assert names, question
        for name in names:
            defined = rf"(?:def|class) {name}\b|^{name} = "
            assert re.search(defined, source, re.MULTILINE), f"{question} {name}"


@pytest.mark.parametrize("page", [generate_client, generate_grpcurl])
def test_what_the_pages_call_generated_is_fresh(page: ModuleType) -> None:
    assert pages.run(page.PAGE, page.text, ["--check"]) == 0
