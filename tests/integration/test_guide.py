"""The guide's pages, typed from the first line to the last in one empty folder.

All pages share it. Models are as on the pages, steps are fewer and shorter. The short form forks
what needs no shell; the slow one executes every line, as for users.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness.empty_folder import Desk
from tests.harness.paced import paced, python_path
from tests.harness.snippets import (
    DOCS,
    HOSTS_JOB,
    HOSTS_PLAN,
    HOUR,
    LIKE_MEGATRON,
    LIKE_TORCHTITAN,
    REPOSITORY,
    Block,
    block,
    blocks,
)
from tests.harness.waiting import log_bytes, until

from megascale_client import TERMINAL_PHASES, Client

GUIDE = DOCS / "guide"
BY_HAND = ("first-model.md", "evaluation.md", "hugging-face.md", "experts.md")
WITH_CLUSTER = ("change-a-run.md", "failed-run.md")
# Of a job file, so that a run takes seconds; a job that others change keeps its many steps.
SHORTER = {
    "steps: 300": "steps: 8",
    "steps: 600": "steps: 12",
    "steps: 1000": "steps: 4",
    "sequence_length: 128": "sequence_length: 32",
    "global_batch_size: 16": "global_batch_size: 8",
    "global_batch_size: 32": "global_batch_size: 4",
    "interval_steps: 50": "interval_steps: 4",
    "batches: 8": "batches: 1",
    "warmup_steps: 20": "warmup_steps: 2",
    "warmup_steps: 100": "warmup_steps: 1",
}
# Of the job that trains while others are ordered: it only has to be there.
OWN_OPTIMIZER = "optimizer: {learning_rate"
PACED = f"optimizer: {{{json.dumps(paced(0.05))[1:-1]}, learning_rate"


def shorter(text: str) -> str:
    for page, here in SHORTER.items():
        if "interval" in page and text.startswith("name: run"):
            continue  # the run that diverges on a page does so before its first checkpoint
        text = re.sub(rf"\b{page}\b", here, text)
    return text.replace(OWN_OPTIMIZER, PACED) if text.startswith("name: run") else text


def file_of(one: Block) -> str:
    """The file that the sentence before a block of YAML names."""
    lines = (REPOSITORY / one.page).read_text().splitlines()
    above = "\n".join(lines[one.line - 4 : one.line - 1])
    (name,) = set(re.findall(r"`([\w-]+\.yaml)`", above))
    return str(name)


class Guide(Desk):
    """An empty folder but for texts of two kinds, in which pages of the guide are typed."""

    def __init__(self, folder: Path, *, executed: bool) -> None:
        super().__init__(folder, executed=executed)
        self.environment["PYTHONPATH"] = python_path(folder / "site")
        words = (REPOSITORY / "docs/glossary.md").read_text().split()
        draws = random.Random(1)
        for name in ("train/one.txt", "train/two.txt", "held/three.txt"):
            text = self.folder / "texts" / name
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text(" ".join(draws.choice(words) for _ in range(3000)))

    def type(self, page: str, after: Callable[[Block], None] = lambda typed: None) -> str:
        """Type every block of a page that has no terminal of its own; what was printed."""
        shown = ""
        for one in blocks(GUIDE / page):
            if one.language == "yaml":
                self.write(file_of(one), one.code)
            elif "megascale up --nodes" not in one.code:
                shown += self.paste(one.code)
            for job in self.folder.glob("*.yaml"):  # one that a command has written
                job.write_text(shorter(job.read_text()))
            after(one)
        return shown

    def write(self, name: str, code: str) -> None:
        """Write a job file, or put part of one into the file that is there."""
        job, path = yaml.safe_load(code), self.folder / name
        if "name" in job:
            path.write_text(shorter(code))
        else:
            merged = with_values(yaml.safe_load(path.read_text()), yaml.safe_load(shorter(code)))
            path.write_text(yaml.safe_dump(merged))


def with_values(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = dict(values)
    for key, value in more.items():
        inner = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = with_values(both[key], value) if inner else value
    return both


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["forked", "executed"],
)
def guide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """A folder before the first page."""
    return Guide(tmp_path_factory.mktemp("guide"), executed=request.param)


@pytest.fixture(scope="module")
def first(guide: Guide) -> tuple[Guide, str]:
    """A folder after the first page, and what that printed."""
    return guide, guide.type("first-model.md")


def test_a_model_is_made_from_text(first: tuple[Guide, str]) -> None:
    guide, shown = first
    assert "all 8 steps are done" in shown and "The " in shown
    assert (guide.folder / "checkpoints" / "first" / "commits").is_dir()


def test_it_is_evaluated_on_text_that_was_held_out(first: tuple[Guide, str]) -> None:
    shown = first[0].type("evaluation.md")
    assert "step 12/12" in shown and "held-out loss " in shown
    page = (GUIDE / "evaluation.md").read_text()
    (value,) = re.findall(r"`held-out loss ([\d.]+)`", page)
    assert re.search(rf"held-out loss \d\.\d{{{len(value.partition('.')[2])}}}\b", shown)


def test_it_becomes_a_hugging_face_model_and_comes_back(first: tuple[Guide, str]) -> None:
    guide, _ = first
    shown = guide.type("hugging-face.md")
    assert shown.count("LlamaForCausalLM") == 2 and "all 4 steps are done" in shown
    for name in ("model", "tuned-model"):
        assert (guide.folder / name / "tokenizer.json").is_file()


def test_experts_are_trained_split_otherwise_and_exported(first: tuple[Guide, str]) -> None:
    guide, _ = first
    shown = guide.type("experts.md")
    lines = re.findall(r"^step (\d+)/\d+ .*largest expert load ([\d.]+)", shown, re.M)
    loads = {int(step): float(load) for step, load in lines if step != "1"}
    assert list(loads) == list(range(2, 13)), "each shows the loads of the step before"
    assert all(1 <= load <= 4 for load in loads.values())
    assert "continues from step 8" in shown and "MixtralForCausalLM" in shown
    assert (guide.folder / "experts-model" / "config.json").is_file()


# What makes the models of other trainers' pages small; the layout stays.
SMALL_MODEL = {
    "layers: 32": "layers: 4",
    "hidden_size: 4096": "hidden_size: 64",
    "heads: 32": "heads: 8",
    "ffn_size: (?:14336|11008)": "ffn_size: 128",
    "vocab_size: (?:128256|32000)": "vocab_size: 512",
    "sequence_length: (?:8192|2048)": "sequence_length: 32",
    "steps: 1000": "steps: 4",
    "warmup_steps: 100": "warmup_steps: 1",
    "global_batch_size: (?:64|256)": "global_batch_size: 8",
}


@pytest.mark.slow
@pytest.mark.parametrize("started", [LIKE_TORCHTITAN, LIKE_MEGATRON])
def test_a_whole_job_of_a_page_for_other_trainers_trains(
    started: tuple[str, str], tmp_path: Path
) -> None:
    guide, (page, _) = Guide(tmp_path, executed=False), started
    guide.paste("megascale data tokenize texts --tokenizer bpe --vocab-size 512 --output corpus")
    guide.paste("cp corpus.tokenizer.json tokenizer.json")
    job = block(page, "name: ")
    text = job.code
    for large, small in SMALL_MODEL.items():
        text = re.sub(rf"\b{large}\b", small, text)
    (guide.folder / file_of(job)).write_text(text)
    assert "all 4 steps are done" in guide.paste(block(*started).code)


def test_blocks_of_the_page_on_several_hosts_plan_and_tokenise(tmp_path: Path) -> None:
    guide = Guide(tmp_path, executed=False)
    shown = guide.paste(block(*HOSTS_JOB).code) + guide.paste(block(*HOSTS_PLAN).code)
    assert "8 ranks" in shown and "gemm" in shown


@pytest.fixture(scope="module")
def cluster(first: tuple[Guide, str]) -> Iterator[Guide]:
    """The folder after the first page, and the cluster of a page in it."""
    guide, _ = first
    (line,) = block("docs/guide/change-a-run.md", "megascale up --nodes").code.splitlines()
    log = guide.folder / "up.log"
    with log.open("w") as output:
        up = guide.begin(line, output)
    try:
        until(lambda: "ready: 2 nodes" in log.read_text(), "the cluster", log.read_text)
        yield guide
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=60) == 0, log.read_text()
    finally:
        up.kill()
        up.communicate()


def phase(guide: Guide, name: str, wanted: str, attempt: int = 1) -> None:
    """Wait until a job is in a phase, and if it runs has completed steps of this attempt."""
    runs = guide.folder / "runs" / "current"
    with Client.from_run_folder(runs) as client:

        def there() -> bool:
            job = client.get(name)
            assert job.phase not in TERMINAL_PHASES or str(job.phase) == wanted, job.phase_reason
            return str(job.phase) == wanted and (
                wanted != "RUNNING" or (job.attempt >= attempt and job.step > job.restored_step + 3)
            )

        until(there, f"{name} is {wanted}", lambda: log_bytes(runs))


@pytest.fixture(scope="module")
def changed(cluster: Guide) -> tuple[Guide, str, list[str]]:
    """After the page that changes a run: what it printed, and the events of three jobs."""
    seen = []

    def after(typed: Block) -> None:
        attempts = {"submit run": 1, "update run": 2, "resume run": 3}
        if attempt := next((n for line, n in attempts.items() if line in typed.code), 0):
            phase(cluster, "run", "RUNNING", attempt)
        elif "suspend run" in typed.code:
            phase(cluster, "run", "SUSPENDED")
            seen.append(cluster.paste("megascale events run"))
        elif "clone run --name run-dp2" in typed.code:
            phase(cluster, "run-dp2", "RUNNING")
            seen.append(cluster.paste("megascale events run-dp2"))
        elif "clone run --name fresh" in typed.code:
            phase(cluster, "fresh", "RUNNING")
            seen.append(cluster.paste("megascale events fresh"))

    return cluster, cluster.type("change-a-run.md", after), seen


def test_a_run_is_changed_and_started_over(changed: tuple[Guide, str, list[str]]) -> None:
    _, shown, (updated, cloned, fresh) = changed
    # Not from `explain`, which tells what the job does just then: it may still wait for nodes.
    assert "attempt 1 starts from step 0" in fresh
    assert "RESUME_DIFFERS" in updated and "learning_rate 0.001 in the checkpoint" in updated
    assert (
        re.search(r"attempt 1 starts from .*step \d+ of job run\b", cloned) or "restores" in cloned
    )
    assert "trainer.parallelism.dp" in shown


EXECUTED = pytest.mark.parametrize("guide", [True], indirect=True, ids=["executed"], scope="module")


@pytest.mark.slow
@EXECUTED
def test_a_typical_hour(cluster: Guide, tmp_path: Path) -> None:
    hour = Guide(tmp_path, executed=True)
    hour.environment["MEGASCALE_RUN_FOLDER"] = str(cluster.folder / "runs" / "current")
    shown = hour.paste(block(*HOUR).code)
    assert "JOB_SUCCEEDED" in shown and "2 nodes alive" in shown
    assert (hour.folder / "hour-copy" / "manifest.json").is_file()


@pytest.mark.slow
@EXECUTED
def test_a_failed_run_is_read_fixed_and_continued(changed: tuple[Guide, str, list[str]]) -> None:
    cluster, *_ = changed

    def after(typed: Block) -> None:
        if "clone run" in typed.code:
            phase(cluster, "broken", "FAILED")
        elif "restart broken" in typed.code:
            phase(cluster, "broken", "RUNNING", 2)

    phase(cluster, "run", "RUNNING", 3)  # the last line of the page before
    shown = cluster.type("failed-run.md", after)
    assert "was not finite in 10 steps in a row" in shown and "skipped: not_finite" in shown
    assert "there is no checkpoint" in shown
    for command in re.findall(
        r"\| `(megascale [^`]+ broken[^`]*)`", (GUIDE / "failed-run.md").read_text()
    ):
        if not command.startswith(("megascale heat", "megascale why")):  # they need many steps
            assert cluster.paste(command) or "--root" in command, command
    cluster.paste('megascale cancel broken --reason "the page ends"')
    cluster.paste('megascale cancel run --reason "the page ends"')
