"""Every code block and command of the pages is run by a test, or left out for a reason given here.

Blocks that need a cluster are run by tests/integration/test_first_hour.py.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.harness.bad_jobs import good_job
from tests.harness.command_line import command
from tests.harness.snippets import (
    RUN_BY_HAND,
    RUN_IN_A_CLUSTER,
    RUN_IN_THE_GUIDE,
    RUN_ON_THREE_MEMBERS,
    TYPED,
    Block,
    all_blocks,
    commands_in_prose,
)

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = "tests/unit/test_how_to.py compares each line with the source"
APPLIED = "tests of the page train in a copy of the packages with these changes"
INSTALLED = "it installs into the environment; "
# tests/unit/test_logs_added_signature.py reads the page's lines with the page's table.
_LOG_PAGE = "docs/how-to/add-a-log-signature.md"
READ_AS_LOGS = ((_LOG_PAGE, "card 3 is halted\n"), (_LOG_PAGE, '"acme-nic-1"'))
RUN = (
    *RUN_BY_HAND,
    *RUN_IN_A_CLUSTER,
    *RUN_IN_THE_GUIDE,
    *RUN_ON_THREE_MEMBERS,
    *READ_AS_LOGS,
)
# (page, words of the block): why nothing here runs it.
LEFT_OUT = {
    ("README.md", "0.000 s  PLACED"): "tests/chaos/test_demo.py compares it with a real demo",
    ("docs/coming-from-megatron.md", "pretrain_gpt.py --num-layers"): "another trainer's command",
    ("docs/coming-from-torchtitan.md", "CONFIG_FILE=llama3_8b"): "another trainer's command",
    ("docs/goodput.md", "goodput since start"): "formulas",
    ("docs/how-to/add-a-block.md", "+from megascale_job.blocks.adapter"): APPLIED,
    ("docs/how-to/add-a-block.md", "+from megascale_trainer.model.blocks.adapter"): APPLIED,
    ("docs/how-to/add-a-block.md", "def _adapter"): APPLIED,
    ("docs/how-to/add-a-parallel-axis.md", "+GroupName ="): APPLIED,
    ("docs/how-to/add-a-parallel-axis.md", "+DENSE_GROUPS"): APPLIED,
    ("docs/how-to/add-a-parallel-axis.md", ">>> layout ="): "tests/unit/test_how_to_parallel.py "
    "runs it in a tree with the page's changes",
    ("docs/how-to/add-a-cli-command.md", "pip install ."): INSTALLED
    + "tests/unit/test_cli_added_command.py installs the package of the page elsewhere",
    ("docs/how-to/add-a-diagnostic.md", "pip install ."): INSTALLED
    + "tests/unit/test_agent_diagnostic_packages.py installs the package of the page elsewhere",
    ("docs/how-to/add-a-job-field.md", "min_ratio = 3"): EXAMPLES,
    ("docs/how-to/add-a-platform.md", "megascale platform list"): "unit/test_platform.py runs them",
    ("docs/how-to/add-an-event.md", '"SPARE_ASSIGNED",\n'): EXAMPLES,
    ("docs/how-to/add-an-rpc.md", "rpc ExplainJob"): EXAMPLES,
    ("docs/how-to/add-an-rpc.md", "#!/bin/sh"): EXAMPLES,
    ("docs/switches.md", '"block": "agg0"'): "tests/integration/test_topology_file.py reads one",
    ("docs/control-plane.md", "etcdctl alarm disarm"): "tests/integration/test_driver_service.py "
    "fills an etcd and frees it by these commands",
    ("docs/kubernetes.md", "kubectl create namespace"): "there is no cluster here; "
    "tests/unit/test_kubernetes_manifests.py has kubectl make the overlay",
    ("docs/kubernetes.md", "kubectl uncordon m17"): "tests/chaos/"
    "test_kubernetes_jobs.py has kubectl run both on an API server of its own",
}
# Commands of other packages, words that stand for a command, and the title of a process.
OTHER_COMMANDS = ("megascale idle", "megascale COMMAND", "megascale rank 5 of job")
BLOCKS = all_blocks()


def is_in(table: object, block: Block) -> bool:
    assert isinstance(table, dict | tuple)
    return any(block.page == page and words in block.code for page, words in table)


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


MAKE = [block for block in BLOCKS if block.first.startswith("make ")]
CONSOLE = [block for block in BLOCKS if block.first.startswith("$ ")]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_left_out_for_a_reason(block: Block) -> None:
    checked = block in MAKE + CONSOLE or block.language in ("python", "toml", "yaml")
    assert checked or block.page in TYPED or is_in(LEFT_OUT, block) or is_in(RUN, block), (
        f"{block}: nothing runs this block; add it to the tests, or to LEFT_OUT with the reason"
    )


def test_no_reason_is_left_over() -> None:
    for page, words in (*LEFT_OUT, *RUN):
        found = [each for each in BLOCKS if each.page == page and words in each.code]
        assert len(found) == 1, (page, words)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_a_block_of_python_is_python(block: Block) -> None:
    code = textwrap.dedent(block.code)
    ast.parse(f"async def example():\n{textwrap.indent(code, '    ')}\n    ...")


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_a_block_of_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.code)


def merged(values: dict[str, object], more: dict[str, object]) -> dict[str, object]:
    both = dict(values)
    for key, value in more.items():
        old = both.get(key)
        both[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return both


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_a_block_of_yaml_is_part_of_a_job(block: Block, tmp_path: Path) -> None:
    job = merged(good_job("good"), yaml.safe_load(block.code))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    answer = command("plan", tmp_path / "job.yaml", "--offline")
    assert answer.status == 0, answer.text


@pytest.mark.parametrize("block", MAKE, ids=str)
def test_verbs_of_make_and_the_files_they_name_exist(block: Block) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    for line in block.code.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert {word for word in words if "=" not in word} <= verbs, line
        for path in re.findall(r"[\w./-]+\.py|tests/[\w/]+", line.partition("#")[0]):
            assert (REPOSITORY / path).exists(), (line, path)


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_a_console_shows_what_the_command_prints(block: Block) -> None:
    typed, _, shown = block.code.removeprefix("$ megascale ").partition("\n")
    answer = command(*shlex.split(typed))
    assert (answer.status, answer.stdout.rstrip()) == (0, shown.rstrip())


@pytest.mark.parametrize(("page", "text"), commands_in_prose())
def test_a_command_in_prose_exists_with_its_options(page: str, text: str) -> None:
    if text.startswith(OTHER_COMMANDS):
        return
    _, *words = shlex.split(text.partition("|")[0])  # what reads its output is not ours
    names = []
    for word in words:
        if not re.fullmatch(r"[a-z-]+", word) or word.startswith("-"):
            break
        names.append(word)
    answer = command(*names, "--help")
    assert answer.status == 0, answer.text
    for option in (word for word in words if word.startswith("-")):
        assert option in answer.stdout, (page, text)
