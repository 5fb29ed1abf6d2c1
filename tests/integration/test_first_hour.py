"""The first hour: the commands of the pages, as they are pasted, in a fresh folder.

Those of training by hand start in an empty one, and end before a cluster is there.

The short form forks what stands alone on a line; the slow one pastes all of it into shells.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.harness import program_start
from tests.harness.empty_folder import CUT_STEPS, Desk, command_of
from tests.harness.local_cluster import UpProcess, settle
from tests.harness.paced import paced, python_path, release
from tests.harness.snippets import (
    AFTER_A_CHECKPOINT,
    AFTERWARDS,
    BACKUP,
    COMPLETION,
    EIGHT_BY_HAND,
    FIRST_BY_HAND,
    HOSTS_BY_HAND,
    HOSTS_OF_GUIDE,
    LIBRARY_BY_HAND,
    MEANWHILE,
    README_BY_HAND,
    REPOSITORY,
    RESTORE,
    RUNBOOK,
    SAMPLE_BY_HAND,
    TERMINAL,
    TRAIN,
    TRUSTING_HOSTS,
    TRUSTING_HOSTS_OF_GUIDE,
    block,
    blocks,
    commands_in_prose,
)
from tests.harness.waiting import log_bytes, until

from megascale_client import Client

JOB = "example"  # that of docs/examples/job.yaml
COPIED = ("README.md", "docs", "clients/grpcurl")
FULL_STEPS = "steps: 100"  # of the example; on two cores 20 s
SHORTER, FEW = "steps: 26", "steps: 10"
STEPS_BEFORE_ORDERS = 3  # a profile needs the times of some steps
# From this step on the job waits until what is ordered meanwhile is ordered. The steps before are
# slow: a profile is placed at least two seconds of steps ahead, and has to end before the wait.
HELD_FROM_STEP, SLOW_STEP_S = 22, 0.4
# Of a job that is followed: the same ranks, with less to compute. Text of the example.
LIGHTER = (
    ("sequence_length: 128", "sequence_length: 32"),
    ("global_batch_size: 16", "global_batch_size: 4"),
)
# Of a job that only has to be there: four ranks of the eight.
HALVED = ("    dp: 2\n", "    dp: 1\n")
OWN_OPTIMIZER = "    learning_rate: 2e-3\n"
# What stands for a name, a number or a path in the pages.
VALUES = {
    "JOB": JOB,
    "NODE": "n2",
    "nodes/NODE": "nodes/n2",
    "R": "0",
    "N": "1",
    "S": "26",  # the last step of SHORTER
    "FOLDER": "docs/examples/checkpoints",
    "job.yaml": "docs/examples/job.yaml",
    "TENANT": "default",
    "DEVICES": "16",
}
MODEL = "megascale checkpoint export docs/examples/checkpoints --to MODEL --format hf"  # to import
MEGATRON = (
    "megascale checkpoint export docs/examples/checkpoints --to example-megatron "
    "--format megatron --tp 2 --pp 4"
)
NOT_RUN = {
    "megascale up": "the cluster of this test",
    "megascale events --follow": "it continues until Ctrl-C; test_cli_nodes.py follows one",
    "megascale COMMAND --help": "stands for any command",
    "megascale submit docs/examples/job.yaml": "README's block has one",
    "megascale submit docs/examples/job.yaml --watch": "a job after the restored backup runs so",
    "megascale profile example --steps 2 --ranks 0,3": "the job has ended; README's block has one",
    "megascale suspend example --reason REASON": "it has ended; chaos/test_suspend.py suspends one",
    "megascale resume example --reason REASON": "chaos/test_suspend.py resumes one",
    "megascale delete example --reason REASON": "other commands need it; chaos/test_suspend.py",
    "megascale restart example --reason REASON": "it has ended; chaos/test_orders.py restarts one",
    "megascale restart example --from-step STEP --reason REASON": "chaos/test_orders.py goes back",
    "megascale update JOB.YAML --reason REASON": "it has ended; chaos/test_orders.py updates one",
    "megascale update JOB.YAML --restart --reason REASON": "chaos/test_orders.py does so",
    "megascale drain": "chaos/test_orders.py drains a node",
    "megascale uncordon": "after each eviction of this test",
    MEGATRON: "the example has the parallel block; unit/test_export_megatron.py exports others",
    "megascale profile example --cancel": "the job has ended; test_cli.py cancels one",
}
# It measures for 15 s what `megascale diagnose n2`, which is run, measures in short.
LONGEST = "megascale diagnose n2 --set full"
# In this order; those that start a node stay in the foreground until Ctrl-C.
OF_NODES = ("megascale node stop n2", "megascale node start n2", "megascale up --add-node")


# Of the README's prose; its blocks have these with their options.
README_BLOCKS_HAVE = ("megascale up", "megascale submit", "megascale init")
KEPT_EXAMPLES = [f"docs/examples/{name}" for name in os.listdir(REPOSITORY / "docs" / "examples")]


def prose_of(page: str) -> list[str]:
    """The commands in the prose of a page."""
    return [text for name, text in commands_in_prose() if name == page]


def runbook() -> list[str]:
    """The commands in the runbook's prose with values for its names, each once."""
    texts = [text for page in RUNBOOK for text in prose_of(f"docs/{page}")]
    filled = (" ".join(VALUES.get(word, word) for word in text.split(" ")) for text in texts)
    return list(dict.fromkeys(filled))


LOOPBACK = "127.0.0.1"


def test_the_first_commands_by_hand_train_in_an_empty_folder(tmp_path: Path) -> None:
    desk = Desk(tmp_path, executed=True)
    shown = desk.paste(block(*FIRST_BY_HAND).code)
    assert "all 12 steps are done" in shown and "step 12/12" in shown
    assert (desk.folder / "checkpoints" / "job" / "commits").is_dir()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """One on which the first commands of the page were given."""
    here = Desk(tmp_path_factory.mktemp("by-hand"), executed=True)
    here.paste(block(*FIRST_BY_HAND).code)
    return here


@pytest.mark.slow
def test_a_sample_and_the_library_read_what_was_trained(desk: Desk) -> None:
    assert "The " in desk.paste(block(*SAMPLE_BY_HAND).code)
    (desk.folder / "notebook.py").write_text(block(*LIBRARY_BY_HAND).code)
    shown = desk.paste("python notebook.py")
    assert "restored step 12" in shown and shown.count("The ") == 2


# What `make` of the README's first block runs, in a copy, with the environment of this test. The
# demo's own test runs all of it; of all tests one file is enough.
IN_THE_ENVIRONMENT = f"PYTHON={sys.executable} INSTALL=0"
VERBS = {
    "make help": "train a small model",
    f"make -n demo {IN_THE_ENVIRONMENT}": "-m megascale_cli demo",
    f"make test {IN_THE_ENVIRONMENT} TEST_PROCESSES=0 PYTEST_ARGS=tests/unit/test_collection.py": (
        "passed"
    ),
    f"make train {IN_THE_ENVIRONMENT} 2>&1": '"resumed_equal": true',
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """The tracked files, as after a clone."""
    here = Desk(tmp_path_factory.mktemp("clone"), executed=True)
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=REPOSITORY, text=True)
    for name in filter(None, listed.split("\0")):
        copy = here.folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy)
    return here


@pytest.mark.slow
@pytest.mark.parametrize("line", VERBS)
def test_a_verb_of_make_works_in_a_clone(line: str, clone: Desk) -> None:
    first, *_ = blocks(REPOSITORY / "README.md")
    named = {words.split()[1] for words in first.code.splitlines()}
    assert (
        named == {"demo", "train", "test"} and "make help" in (REPOSITORY / "README.md").read_text()
    )
    assert VERBS[line] in clone.paste(line)


# Two hosts of several GPUs are here two torchruns of one process each, on one host.
HERE = ((r"--nproc-per-node \d", "--nproc-per-node 1"), ("HOST", LOOPBACK), ("29500", "{port}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page_block", [HOSTS_BY_HAND, TRUSTING_HOSTS, HOSTS_OF_GUIDE, TRUSTING_HOSTS_OF_GUIDE]
)
def test_two_hosts_train_with_the_commands_of_the_page(
    page_block: tuple[str, str], tmp_path: Path
) -> None:
    desk, code = Desk(tmp_path, executed=True), block(*page_block).code.strip()
    (job,) = set(re.findall(r"\w+\.yaml", code))
    desk.paste(f"megascale init --model tiny --ranks 2 --output {job}")
    desk.paste("megascale data tokenize TEXT.txt --output corpus")
    for of_page, here in HERE:
        code, found = re.subn(of_page, here, code)
        assert found
    with socket.create_server((LOOPBACK, 0)) as free:
        code = code.format(port=free.getsockname()[1])
    lines = [re.sub(r"--node-rank N\b", f"--node-rank {number}", code) for number in range(2)]
    begun = [(line, desk.begin(line)) for line in lines]
    assert "all 12 steps are done" in "".join(desk.end(*each) for each in begun)


# Commands in the prose of pages on training by hand, and what a test gives in their place: where
# nothing stands, the command as it is. Those with a cluster come last, in this order.
WITHOUT_CLUSTER = (
    "megascale init --model llama3-8b --output llama.yaml",
    "megascale init --model llama3-8b --ranks 16 --output sixteen.yaml",
    "megascale init --model tiny-experts --output experts.yaml",
    "megascale checkpoint export checkpoints/job --to MODEL --format hf",
    "megascale checkpoint import MODEL --format hf --to imported",
    "torchrun --max-restarts 3",
    "torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2",
    "--time-limit 23.5h",
)
WITH_CLUSTER = (
    "megascale submit job.yaml",
    "megascale profile job --steps 2",
    'megascale suspend job --reason "by hand again"',
    'megascale cancel job --reason "by hand again"',
)
OF_BLOCKS = {
    "megascale data tokenize TEXT.txt --output corpus": FIRST_BY_HAND,
    "torchrun --nproc-per-node 8 -m megascale_trainer eight.yaml": EIGHT_BY_HAND,
}
TRAINS = "-m megascale_trainer job.yaml"
WHOLE = {
    "torchrun --max-restarts 3": f"--standalone {TRAINS}",
    "torchrun --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2": f"--standalone {TRAINS}",
}
BY_HAND_PAGES = ("by-hand.md", "coming-from-megatron.md", "coming-from-torchtitan.md")


def test_every_command_in_the_prose_of_these_pages_is_given_by_a_test() -> None:
    text = "\n".join((REPOSITORY / "docs" / page).read_text() for page in BY_HAND_PAGES)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    ours = r"`((?:megascale|torchrun|python|make|--time-limit) [^`]+)`"
    theirs = {"torchrun --nproc-per-node 8 pretrain_gpt.py ARGUMENTS"}
    assert set(re.findall(ours, text)) - theirs == {*WITHOUT_CLUSTER, *WITH_CLUSTER, *OF_BLOCKS}
    for command, named in OF_BLOCKS.items():
        assert command in block(*named).code


@pytest.mark.slow
@pytest.mark.parametrize("command", WITHOUT_CLUSTER)
def test_a_command_in_the_prose_by_hand_works(command: str, desk: Desk) -> None:
    whole = f"{command} {WHOLE.get(command, '')}"
    if command.startswith("--"):
        whole = f"python {TRAINS} {command}"
    desk.paste(whole)


@pytest.mark.slow
def test_a_run_by_hand_continues_on_a_cluster_and_back(desk: Desk) -> None:
    """The commands of the prose that need one, with a job that has steps left."""
    job = desk.folder / "job.yaml"
    job.write_text(job.read_text().replace(CUT_STEPS, "steps: 100000"))
    folder, (submit, *rest) = desk.folder / "cluster", WITH_CLUSTER
    desk.environment["MEGASCALE_RUN_FOLDER"] = str(folder)
    with UpProcess(folder, "--nodes", "1", "--devices-per-node", "1", "--device", "cpu") as up:
        desk.paste(submit)
        with Client.from_run_folder(folder) as client:
            until(lambda: client.get("job").step > 15, "steps", lambda: log_bytes(folder))
            assert client.get("job").restored_step == 12
        desk.paste("\n".join(rest))
        settle(folder)
        up.stop()


@pytest.mark.slow
@pytest.mark.parametrize("pasted", [(FIRST_BY_HAND, EIGHT_BY_HAND), (README_BY_HAND,)])
def test_eight_ranks_train_beside_one_in_the_same_folder(
    pasted: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    desk = Desk(tmp_path, executed=True)
    shown = desk.paste("".join(block(*each).code for each in pasted))
    assert shown.count("all 12 steps are done") == 2, shown


class Hour:
    """A folder as after a clone, a home of its own, and the cluster of the README in it.

    ``executed``: shells execute every command, as for users. Else what needs no shell is forked
    by :mod:`tests.harness.program_start`.
    """

    def __init__(self, folder: Path, *, executed: bool) -> None:
        self._executed = executed
        self.folder, self.output = folder / "megascale", folder / "up.log"
        for name in COPIED:
            source, copy = REPOSITORY / name, self.folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        (folder / "home").mkdir()
        (folder / "bin").mkdir()
        program = folder / "bin" / "megascale"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megascale_cli "$@"\n')
        program.chmod(0o755)
        beside = Path(sys.executable).parent  # etcdctl, grpcurl
        self.site = folder / "site"
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "MEGASCALE_RUN_FOLDER"},
            "HOME": str(folder / "home"),
            "PATH": f"{folder / 'bin'}:{beside}:{os.environ['PATH']}",
            "COLUMNS": "200",
            "PYTHONPATH": python_path(self.site),
        }

    def shell(self, code: str) -> subprocess.CompletedProcess[str]:
        """Paste ``code`` into a shell; every line must succeed."""
        lines = [None] if self._executed else [command_of(line) for line in code.splitlines()]
        commands = [line for line in lines if line]
        if len(commands) < len(lines):
            return self._end(["bash", "-euo", "pipefail", "-c", code])
        done = [self._end(command) for command in commands]
        output, errors = "".join(d.stdout for d in done), "".join(d.stderr for d in done)
        return subprocess.CompletedProcess(code, 0, output, errors)

    def _end(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which must be a success."""
        process = program_start.start(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate()
        assert process.returncode == 0, f"{command}\n{output}\n{errors}"
        return subprocess.CompletedProcess(command, 0, output, errors)

    def _begin(self, command: str, log: BinaryIO) -> subprocess.Popen[bytes]:
        """Paste a command that stays in the foreground of a session of its own."""
        forked = None if self._executed else command_of(command)
        return program_start.start(
            forked or ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env={**self.environment, "MEGASCALE_PARENT_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def foreground(self, command: str, words: str) -> None:
        """Paste a command that stays in the foreground; Ctrl-C once it prints ``words``."""
        output = self.folder / "foreground.log"
        with output.open("wb") as log:
            process = self._begin(command, log)
        runs = self.folder / "runs"
        try:
            until(
                lambda: words in output.read_text() or process.poll() is not None,
                command,
                lambda: (output.stat().st_size, log_bytes(runs)),
            )
            assert words in output.read_text(), output.read_text()
            process.send_signal(signal.SIGINT)
            until(lambda: process.poll() is not None, f"the end of {command}", output.read_text)
            assert process.returncode == 0, output.read_text()
        finally:
            process.kill()
            process.wait()

    def example(self, steps: str, name: str = JOB, held: bool = False) -> str:
        """Write the example's job file with ``steps``; returns its path.

        A job that is ``held`` goes slowly and waits at a step, until it is released.

        A job of another name gets a file and a checkpoint folder of its own. One with fewer steps
        computes less in each, and its optimizer is that of :mod:`tests.harness.paced`.
        """
        text = (REPOSITORY / "docs/examples/job.yaml").read_text()
        assert text.count(FULL_STEPS) == 1
        text = text.replace(FULL_STEPS, steps)
        if steps != FULL_STEPS:
            for whole, light in (*LIGHTER, *([HALVED] if steps == FEW else [])):
                assert text.count(whole) == 1
                text = text.replace(whole, light)
            assert text.count(OWN_OPTIMIZER) == 1
            pace = paced(SLOW_STEP_S, held_from_step=HELD_FROM_STEP) if held else paced()
            for key, value in pace.items():
                text = text.replace(
                    OWN_OPTIMIZER, f"    {key}: {json.dumps(value)}\n{OWN_OPTIMIZER}"
                )
        file = "job" if name == JOB else name
        if name != JOB:
            text = text.replace(f"name: {JOB}", f"name: {name}")
            text = text.replace("uri: checkpoints", f"uri: checkpoints-{name}")
        path = f"docs/examples/{file}.yaml"
        (self.folder / path).write_text(text)
        return path

    def start(self) -> None:
        """The first terminal: the README's line, until it prints that the cluster is ready."""
        with self.output.open("wb") as output:
            self.up = self._begin(block(*TERMINAL).code, output)
        runs = self.folder / "runs"

        def progress() -> tuple[int, int]:
            return self.output.stat().st_size, log_bytes(runs)

        until(self._is_ready, "the cluster is ready", progress)

    def _is_ready(self) -> bool:
        shown = self.output.read_text()
        assert self.up.poll() is None, shown
        return "ready: 3 nodes" in shown

    def stop(self) -> None:
        """Ctrl-C in the first terminal."""
        self.up.send_signal(signal.SIGINT)
        until(
            lambda: self.up.poll() is not None, "the end of `megascale up`", self.output.read_text
        )

    def job(self, name: str) -> dict[str, object]:
        """A job as `megascale job NAME --json` shows it."""
        shown: dict[str, object] = json.loads(self.shell(f"megascale job {name} --json").stdout)
        return shown


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["forked", "executed"],
)
def hour(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hour]:
    here = Hour(tmp_path_factory.mktemp("hour"), executed=request.param)
    here.start()
    try:
        yield here
    finally:
        if here.up.poll() is None:
            here.up.kill()  # its children end with it
            here.up.wait()


@pytest.fixture(scope="module")
def trained(hour: Hour) -> Hour:
    """After the README's blocks up to the end of the job."""
    hour.example(SHORTER, held=True)
    hour.shell(block(*TRAIN).code)

    def steps() -> int:
        with Client.from_run_folder(hour.folder / "runs" / "current") as client:
            return client.get(JOB).step

    def moves() -> tuple[int, int]:
        return steps(), log_bytes(hour.folder / "runs")

    until(lambda: steps() >= STEPS_BEFORE_ORDERS, "the first steps", moves)
    shown = hour.shell(block(*MEANWHILE).code).stdout

    def committed() -> int:
        with Client.from_run_folder(hour.folder / "runs" / "current") as client:
            return client.get(JOB).committed_step

    until(lambda: committed() > 0, "the first checkpoint", moves)
    orders, watching = re.split("^(?=megascale watch)", block(*AFTER_A_CHECKPOINT).code, flags=re.M)
    shown += hour.shell(orders).stdout
    release(hour.site)
    shown += hour.shell(watching).stdout
    for words in (JOB, "perfetto", "quarantined", "schedulable", "JOB_SUCCEEDED", "attempt 2"):
        assert words in shown, shown
    return hour


@pytest.mark.slow
def test_the_example_trains_with_all_its_steps(hour: Hour) -> None:
    hour.shell("megascale data tokenize README.md --output docs/examples/corpus")
    path = hour.example(FULL_STEPS, "whole")
    assert "JOB_SUCCEEDED" in hour.shell(f"megascale submit {path} --watch").stdout
    for path in (hour.folder / "docs" / "examples").glob("corpus*"):  # others write it anew
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_job_trains_while_a_node_is_evicted(trained: Hour) -> None:
    assert trained.job(JOB)["phase"] == "JOB_PHASE_SUCCEEDED"
    trained.shell(block(*AFTERWARDS).code)
    assert json.loads((trained.folder / "copy" / "manifest.json").read_text())["step"] > 0
    for command in prose_of("README.md"):
        if command not in README_BLOCKS_HAVE:
            assert trained.shell(command).stdout, command
    examples = trained.folder / "docs" / "examples"
    left = {
        f"{path.relative_to(trained.folder)}{'/' if path.is_dir() else ''}"
        for path in (*trained.folder.iterdir(), *examples.iterdir())
    } - {"README.md", "docs/", "clients/", *KEPT_EXAMPLES}
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *left],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert left and left == {*done.stdout.splitlines()}, "left behind, and git sees it"


def test_a_program_in_python_watches_and_lists_too(trained: Hour) -> None:
    script = trained.folder / "watching.py"
    watching = block("docs/client.md", "async with AsyncClient").code
    script.write_text(
        "import asyncio\nfrom megascale_client import AsyncClient\nasync def main():\n"
        f"{textwrap.indent(watching, '    ')}\nasyncio.run(main())\n"
    )
    trained.shell(f"{sys.executable} watching.py")
    script.write_text(block("docs/client.md", "import Client, JobPhase").code)
    assert "SUCCEEDED: " in trained.shell(f"{sys.executable} watching.py").stdout


def test_what_is_not_run_is_on_the_page() -> None:
    assert {*NOT_RUN, *OF_NODES, LONGEST} <= set(runbook())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each == LONGEST else [])
        for each in runbook()
        if each not in {*NOT_RUN, *OF_NODES}
    ],
)
def test_a_command_of_the_runbook_works(text: str, trained: Hour) -> None:
    if "MODEL" in text and not (trained.folder / "MODEL").exists():
        trained.shell(MODEL)
    assert trained.shell(text).stdout
    if any(f"megascale {verb} n2" in text for verb in ("evict", "drain", "cordon")):
        trained.shell('megascale uncordon n2 --reason "the test is over"')


def test_completion_is_written_for_bash(hour: Hour) -> None:
    folder = Path(hour.environment["HOME"], ".local/share/bash-completion/completions")
    hour.shell(block(*COMPLETION).code)
    assert "complete" in (folder / "megascale").read_text()


def test_a_backup_of_etcd_brings_jobs_and_dispositions_back(trained: Hour) -> None:
    trained.shell('megascale cordon n3 --reason "before the backup"')
    before = trained.job(JOB)
    assert "HASH" in trained.shell(block(*BACKUP).code).stdout
    trained.shell('megascale cordon n1 --reason "after the backup"')
    trained.stop()
    trained.shell(block(*RESTORE).code)
    trained.start()
    after = trained.job(JOB)
    assert (after["spec"], after["phase"]) == (before["spec"], before["phase"])
    nodes = trained.shell("megascale nodes --json").stdout.splitlines()
    shown = {node["name"]: node["disposition"] for node in map(json.loads, nodes)}
    schedulable, cordoned = "NODE_DISPOSITION_SCHEDULABLE", "NODE_DISPOSITION_CORDONED"
    assert shown == {"n1": schedulable, "n2": schedulable, "n3": cordoned}
    trained.shell('megascale uncordon n3 --reason "the test is over"')
    path = trained.example(FEW, "restored")
    assert "JOB_SUCCEEDED" in trained.shell(f"megascale submit {path} --watch").stdout
    settle(trained.folder / "runs" / "current")


def test_nodes_of_the_runbook_end_come_back_and_are_added(trained: Hour) -> None:
    stop, start, add = OF_NODES
    assert "n2 is stopped" in trained.shell(stop).stderr
    trained.foreground(start, "node n2 is alive")
    trained.foreground(add, "node n4 is alive")
