"""The code blocks and commands of the pages, for tests that run them as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
NAMED = (
    "by-hand.md",
    "coming-from-megatron.md",
    "coming-from-torchtitan.md",
    "cli.md",
    "client.md",
    "operations.md",
    "goodput.md",
    "glossary.md",
    "kubernetes.md",
    "status.md",
)
PAGES = (
    REPOSITORY / "README.md",
    *(DOCS / name for name in NAMED),
    *sorted((DOCS / "how-to").glob("*.md")),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: its page, the number of its first line, its language and its code."""

    page: str
    line: int
    language: str
    code: str

    @property
    def first(self) -> str:
        """The first line of the code."""
        return self.code.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in its order."""
    name = page.relative_to(REPOSITORY).as_posix()
    language, begin, code = "", 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.fullmatch(r"\s*```(\w*)", line)
        if fence and not begin:
            language, begin, code = fence[1], number + 1, []
        elif fence:
            yield Block(name, begin, language, "\n".join(code) + "\n")
            begin = 0
        elif begin:
            code.append(line)
    assert not begin, f"{name}: a code block is not closed"


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def block(page: str, words: str) -> Block:
    """The one block of a page that has these words."""
    (found,) = (each for each in blocks(REPOSITORY / page) if words in each.code)
    return found


def commands_in_prose() -> list[tuple[str, str]]:
    """(page, command) of each `megascale ...` in backticks outside code blocks."""
    found = []
    for page in PAGES:
        text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(), flags=re.M | re.S)
        for command in re.findall(r"`(megascale [^`\n]+)`", text):
            found.append((page.relative_to(REPOSITORY).as_posix(), command))
    return list(dict.fromkeys(found))


# (page, words of the block) of what tests/integration/test_first_hour.py runs.
TERMINAL = ("README.md", "megascale up --nodes 3")
TRAIN = ("README.md", "megascale data tokenize README.md")
MEANWHILE = ("README.md", "megascale explain example")
AFTER_A_CHECKPOINT = ("README.md", "megascale evict n2")
AFTERWARDS = ("README.md", "megascale checkpoint fetch")
COMPLETION = ("docs/cli.md", "--show-completion")
BACKUP = ("docs/operations.md", "snapshot save")
RESTORE = ("docs/operations.md", "etcd.lost")
RUN_IN_A_CLUSTER = (
    TERMINAL,
    TRAIN,
    MEANWHILE,
    AFTER_A_CHECKPOINT,
    AFTERWARDS,
    COMPLETION,
    BACKUP,
    RESTORE,
)
# Of what tests/integration/test_first_hour.py runs in an empty folder, without a cluster.
FIRST_BY_HAND = ("docs/by-hand.md", "--output job.yaml")
EIGHT_BY_HAND = ("docs/by-hand.md", "--output eight.yaml")
README_BY_HAND = ("README.md", "--output eight.yaml")
SAMPLE_BY_HAND = ("docs/by-hand.md", "megascale generate job.yaml")
LIBRARY_BY_HAND = ("docs/by-hand.md", "from megascale_trainer import Trainer")
HOSTS_BY_HAND = ("docs/by-hand.md", "--rdzv-endpoint HOST:29500")
TRUSTING_HOSTS = ("docs/by-hand.md", "--insecure-network")
RUN_BY_HAND = (
    FIRST_BY_HAND,
    EIGHT_BY_HAND,
    README_BY_HAND,
    SAMPLE_BY_HAND,
    LIBRARY_BY_HAND,
    HOSTS_BY_HAND,
    TRUSTING_HOSTS,
)
# Of what tests/chaos/test_high_availability.py runs, which sets the variables of the first.
MEMBERS_OF_ETCD = ("docs/operations.md", "export MEMBERS=")
RESTORE_MEMBER = ("docs/operations.md", '--name "$NAME"')
RAISE_GENERATION = ("docs/operations.md", "RAISED=")
RUN_ON_THREE_MEMBERS = (MEMBERS_OF_ETCD, RESTORE_MEMBER, RAISE_GENERATION)
