"""The code blocks and commands of the pages, for tests that run them as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
RUNBOOK = (
    "operations.md",
    "alarms.md",
    "storage.md",
    "switches.md",
    "control-plane.md",
    "monitoring.md",
)
NAMED = (
    "by-hand.md",
    "coming-from-megatron.md",
    "coming-from-torchtitan.md",
    "cli.md",
    "client.md",
    *RUNBOOK,
    "goodput.md",
    "glossary.md",
    "kubernetes.md",
    "status.md",
)
PAGES = (
    REPOSITORY / "README.md",
    *(DOCS / name for name in NAMED),
    *sorted((DOCS / "how-to").glob("*.md")),
    *sorted((DOCS / "guide").glob("*.md")),
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
BACKUP = ("docs/control-plane.md", "snapshot save")
RESTORE = ("docs/control-plane.md", "etcd.lost")
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
LIKE_TORCHTITAN = ("docs/coming-from-torchtitan.md", "megascale_trainer titan.yaml")
LIKE_MEGATRON = ("docs/coming-from-megatron.md", "megascale_trainer megatron.yaml")
RUN_BY_HAND = (
    FIRST_BY_HAND,
    EIGHT_BY_HAND,
    README_BY_HAND,
    SAMPLE_BY_HAND,
    LIBRARY_BY_HAND,
    HOSTS_BY_HAND,
    TRUSTING_HOSTS,
    LIKE_TORCHTITAN,
    LIKE_MEGATRON,
)
# Of what tests/integration/test_guide.py runs: pages that it types whole, and single blocks.
TYPED = tuple(
    f"docs/guide/{name}.md"
    for name in (
        "first-model",
        "evaluation",
        "change-a-run",
        "failed-run",
        "hugging-face",
        "experts",
    )
)
HOUR = ("docs/cli.md", "megascale status")
HOUR_TERMINAL = ("docs/cli.md", "megascale up --nodes 2")
HOSTS_JOB = ("docs/guide/several-hosts.md", "--ranks 8 --output hosts.yaml")
HOSTS_PLAN = ("docs/guide/several-hosts.md", "megascale plan search")
HOSTS_OF_GUIDE = ("docs/guide/several-hosts.md", "--rdzv-endpoint HOST:29500")
TRUSTING_HOSTS_OF_GUIDE = ("docs/guide/several-hosts.md", "--insecure-network")
RUN_IN_THE_GUIDE = (
    HOUR,
    HOUR_TERMINAL,
    HOSTS_JOB,
    HOSTS_PLAN,
    HOSTS_OF_GUIDE,
    TRUSTING_HOSTS_OF_GUIDE,
)
# Of what tests/chaos/test_high_availability.py runs, which sets the variables of the first.
MEMBERS_OF_ETCD = ("docs/control-plane.md", "export MEMBERS=")
RESTORE_MEMBER = ("docs/control-plane.md", '--name "$NAME"')
RAISE_GENERATION = ("docs/control-plane.md", "RAISED=")
RUN_ON_THREE_MEMBERS = (MEMBERS_OF_ETCD, RESTORE_MEMBER, RAISE_GENERATION)
