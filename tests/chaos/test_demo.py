"""The demo proves something only because it can fail: it succeeds, and fails when sabotaged."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.harness.local_cluster import megascale
from tests.harness.snippets import block

# Of 48: a checkpoint every 4 steps, the fault halfway between two of them, after step 10 or later.
FEWER_STEPS = "24"
# Two ranks on two nodes instead of eight: the same path in a fraction of the time. Two stages
# compute half of what two replicas would.
SMALL = (
    "--device",
    "cpu",
    "--tp",
    "1",
    "--pp",
    "2",
    "--dp",
    "1",
    "--devices-per-node",
    "1",
    "--steps",
    FEWER_STEPS,
)
SUSPECT_S = 8.0  # without a heartbeat; a broken link shows earlier, however slow the machine


def run_demo(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, all output, and the report (empty if there is none)."""
    done = megascale("demo", "--run-folder", str(folder), *options)
    report = folder / "report.json"
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(report.read_text()) if report.exists() else {},
    )


def shape(line: str) -> str:
    """A line without its figures and columns; the times of the timeline are one of their own."""
    timed = re.sub(r"^ *\d+\.\d{3} s  ", "TIME ", line)
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?", "0", timed))


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(SMALL, 2, id="two ranks", marks=pytest.mark.slow),
        pytest.param(
            ("--device", "cpu", "--steps", FEWER_STEPS), 8, id="as it is", marks=pytest.mark.slow
        ),
    ],
)
def test_the_demo_shows_a_lost_node_and_a_run_that_resumes(
    options: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    status, output, report = run_demo(tmp_path / "demo", *options)
    assert status == 0, output
    assert (report["device"], report["world_size"], report["attempts"]) == ("cpu", ranks, 2)
    assert report["loss_after_resume_matches"] is True
    assert report["max_loss_abs_diff"] == 0.0
    assert report["restore_source"] == "storage"
    assert 0 < report["resumed_from_step"] < report["steps"]
    # Hardly ever none: a machine that stands still between the demo's look and its kill may
    # complete one more checkpoint. When to kill: tests/unit/test_cli_demo.py.
    killed_after = re.search(r"x killed after step (\d+)", output)
    assert killed_after is not None, output
    assert report["steps_lost"] == max(0, int(killed_after[1]) - report["resumed_from_step"])
    assert report["final_loss"] < report["first_loss"]
    assert len(report["evicted_nodes"]) == 1
    assert 0 <= report["fault_to_detected_s"] < SUSPECT_S
    assert (
        report["fault_to_first_new_step_s"]
        >= report["fault_to_detected_s"] + report["detected_to_restarted_s"]
    )
    assert (tmp_path / "demo" / "loss.png").exists()
    assert "SIGKILL" in output
    # In any order: on a slow disk the second commit is printed after the kill.
    printed = Counter(map(shape, output.splitlines()))
    lines = block("README.md", ">>> SIGKILL   ").code.splitlines()
    missing = Counter(map(shape, lines)) - printed
    assert not missing, f"the demo no longer prints these lines of the README: {missing}\n{output}"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("sabotage", "options", "reason"),
    [
        pytest.param("no-kill", (), "no node was killed", marks=pytest.mark.slow),
        pytest.param(
            "no-spare",
            ("--recovery-timeout-s", "6"),
            "is waiting: it needs 2 nodes",
            marks=pytest.mark.slow,
        ),
        # tests/unit/test_cli_demo.py has what it shows: each claim fails, and one bit is enough.
        pytest.param(
            "loss", (), "every step's loss equals the twin's bit for bit", marks=pytest.mark.slow
        ),
    ],
)
def test_a_sabotaged_demo_fails_with_the_reason(
    tmp_path: Path, sabotage: str, options: tuple[str, ...], reason: str
) -> None:
    status, output, report = run_demo(tmp_path / "demo", *SMALL, "--sabotage", sabotage, *options)
    assert status == 1, output
    assert "the demo failed" in output
    assert reason in output.splitlines()[-1]
    # Everything else was observed, so the failure has no other cause.
    if sabotage == "loss":
        assert report["loss_after_resume_matches"] is False
        assert (report["attempts"], report["restore_source"]) == (2, "storage")
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "straggler"])
def test_a_fault_is_shown_with_its_page_and_its_sentence(tmp_path: Path, fault: str) -> None:
    done = megascale("demo", f"--show-{fault}", "--run-folder", str(tmp_path / "demo"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["fault"], report["named"]) == (fault, True)
    assert report["named_ranks"] == [report["rank"]]
    culprit = f"rank {report['rank']}"
    for text in (report["sentence"], report["page_says"]):
        assert culprit in text and report["node"] in text, report
    path = "/ranks" if fault == "hang" else "/heat"
    assert report["page"].startswith("http://127.0.0.1:") and f"/jobs/demo{path}?" in report["page"]
    assert report["page"] in done.stderr and report["sentence"] in done.stderr
    assert json.loads((tmp_path / "demo" / "report.json").read_text()) == report
    assert report["restarted"] is (fault == "hang")
    if fault == "hang":
        assert f"HANG_STACKS jobs/demo {culprit}: no stack: it is stopped (T)" in done.stderr
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "straggler"])
def test_a_demo_whose_fault_is_left_out_fails(tmp_path: Path, fault: str) -> None:
    options = ("--run-folder", str(tmp_path / "demo"), "--sabotage", "no-kill")
    done = megascale("demo", f"--show-{fault}", *options, "--recovery-timeout-s", "25")
    assert done.returncode == 1, done.stdout + done.stderr
    last = (done.stdout + done.stderr).splitlines()[-1]
    assert "the demo failed" in last and ("nothing says" in last or "no event STRAGGLER" in last)
    assert processes_of(tmp_path) == []


def test_a_folder_that_no_demo_wrote_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    status, output, _ = run_demo(tmp_path)
    assert status == 1
    assert "no demo wrote it" in output
    assert (tmp_path / "precious").read_text() == "x"
