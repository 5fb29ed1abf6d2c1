"""The verdict on logs: the labelled corpus, findings of several nodes, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_common.node.logs.categories import DOMAINS
from megascale_common.node.logs.matcher import Matcher
from megascale_driver.analysis.logs.__main__ import main
from megascale_driver.analysis.logs.corpus import answers, is_held_out, read, score
from megascale_driver.analysis.logs.correlation import BENIGN, Observation, classify, verdict

CORPUS = Path(__file__).resolve().parents[1] / "data" / "logs" / "excerpts.jsonl"
EXCERPTS = [read(line) for line in CORPUS.read_text().split("\n") if line]

TIMEOUT = (
    "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds"
)
CLOSED = "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>"
OFF_BUS = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB."
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
NO_FABRIC = "RuntimeError: Error 802: system not yet initialized"


def seen(node: str, at: float, *lines: str) -> list[Observation]:
    matcher = Matcher()
    matcher.feed("\n".join(lines).encode())
    matcher.close()
    return [Observation(node, one, at) for one in matcher.take()]


def test_the_corpus_is_whole() -> None:
    assert len(EXCERPTS) >= 150
    assert len({one.id for one in EXCERPTS}) == len({one.log for one in EXCERPTS}) == len(EXCERPTS)
    assert {one.labels["category"] for one in EXCERPTS} <= set(DOMAINS)
    sources = [json.loads(line)["source"] for line in CORPUS.read_text().split("\n") if line]
    assert all(source.startswith("https://") for source in sources)


@pytest.mark.parametrize("held_out", [False, True])
def test_the_corpus_is_classified(held_out: bool) -> None:
    result = score(one for one in EXCERPTS if is_held_out(one.id) == held_out)
    assert result.wrong_evictions == 0
    assert result.precision >= 0.95, "" if held_out else result.wrong
    assert result.recall >= 0.9, "" if held_out else result.wrong


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("later", 25),
        ("newer", 65),
        ("newest", 20),
        ("unseen", 51),
        ("stratified", 101),
        ("elsewhere", 57),
        ("afterwards", 77),
        ("mixed", 18),
        ("last", 20),
        ("causes", 17),
        ("ordinary", 19),
        ("vocabulary", 48),
        ("wordings", 55),
        ("assorted", 61),
        ("usual", 59),
        ("rarer", 26),
        ("kinds", 16),
        ("likely", 61),
        ("further", 61),
    ],
)
def test_excerpts_gathered_after_the_rules_are_classified(name: str, count: int) -> None:
    lines = (CORPUS.parent / f"{name}.jsonl").read_text().split("\n")
    result = score(read(line) for line in lines if line)
    assert result.excerpts == count and result.wrong_evictions == 0
    assert result.precision >= 0.95 and result.recall >= 0.9, result.wrong


def test_the_score_counts_what_is_wrong() -> None:
    label = {"category": "cuda_oom", "role": "root", "action": "stop"}
    lines = [
        {"id": 1, "log": OOM, **label},
        {"id": 2, "log": "all is well", **label},  # not found
        {"id": 3, "log": OFF_BUS, **label},  # found as another, which would evict
        {"id": 4, "log": ILLEGAL, "category": "benign", "role": "benign", "action": "none"},
    ]
    result = score(read(json.dumps(line)) for line in lines)
    assert result.as_json() == {
        "excerpts": 4, "precision": 0.3333, "recall": 0.3333, "wrong_evictions": 1,
    }  # fmt: skip
    assert [line.split(":")[0] for line in result.wrong] == ["2", "3", "4"]


def test_wrapped_lines_are_read_together_and_evict_nobody() -> None:
    wrapped = "RuntimeError: the server socket has failed (errno: 98 - Address\nalready in use)"
    assert classify(wrapped).category == "port_in_use"
    broken = "fatal error: NVRM: GPU at PCI:0000:01:00 has fallen\noff the bus"
    assert classify(broken).action != "evict_restart"


def test_a_cause_that_is_known_outranks_an_unknown_one_before_it() -> None:
    assert classify(f"ValueError: odd\n{OOM}").category == "cuda_oom"
    assert classify(f"ValueError: odd\n{TIMEOUT}").category == "unknown"


def test_a_root_wins_over_what_followed_from_it_on_other_nodes() -> None:
    found = verdict(
        [*seen("b", 1.0, CLOSED, TIMEOUT), *seen("c", 2.0, TIMEOUT), *seen("a", 30.0, OFF_BUS)]
    )
    assert (found.category, found.action, found.nodes) == (
        "gpu_fallen_off_bus", "evict_restart", ("a",),
    )  # fmt: skip
    assert found.evidence == OFF_BUS


@pytest.mark.parametrize("line", [TIMEOUT, CLOSED, OOM, ILLEGAL, "Killed"])
def test_what_follows_from_faults_elsewhere_never_evicts(line: str) -> None:
    assert verdict(seen("a", 0.0, line)).action != "evict_restart"


def test_the_earliest_of_two_roots_is_the_cause() -> None:
    found = verdict([*seen("a", 9.0, OOM), *seen("b", 3.0, ILLEGAL)])
    assert (found.category, found.nodes) == ("cuda_illegal_access", ("b",))


def test_kernel_evidence_outranks_text_within_a_minute_and_not_later() -> None:
    near = verdict([*seen("a", 100.0, ILLEGAL), *seen("a", 130.0, OFF_BUS)])
    late = verdict([*seen("a", 100.0, OOM), *seen("a", 300.0, OFF_BUS)])
    assert (near.category, near.action) == ("gpu_fallen_off_bus", "evict_restart")
    assert (late.category, late.action) == ("cuda_oom", "stop")


def test_one_root_on_several_nodes_evicts_none() -> None:
    one = verdict(seen("a", 0.0, NO_FABRIC))
    many = verdict([*seen("a", 0.0, NO_FABRIC), *seen("b", 0.0, NO_FABRIC)])
    assert (one.action, one.nodes) == ("evict_restart", ("a",))
    assert (many.action, many.nodes) == ("restart", ("a", "b"))


def test_logs_without_trouble_are_benign() -> None:
    assert verdict([]) == classify("step 1\nstep 2 loss 2.0\n") == BENIGN


def test_the_command_answers_every_line_in_order(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"id": "one", "log": f"step 1\n{OFF_BUS}\n{CLOSED}"}).encode(),
        b"",
        b'{"id": 2, "log": 3}',
        b"not json \xff",
        json.dumps({"id": 4, "log": "fine\u2028still fine"}, ensure_ascii=False).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    run = subprocess.run(
        [sys.executable, "-m", "megascale_driver.analysis.logs", "classify", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    printed = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 1, run.stderr
    assert printed[0] == {
        "id": "one", "category": "gpu_fallen_off_bus", "role": "root",
        "action": "evict_restart", "evidence": OFF_BUS,
    }  # fmt: skip
    assert [one["id"] for one in printed] == ["one", None, None, 4]
    assert printed[1] == {"id": None, "error": "log: not a text; join the lines with \\n"}
    assert printed[2]["error"].startswith("not JSON")
    assert printed[3]["category"] == "benign"


def test_an_id_that_no_encoding_has_is_answered() -> None:
    lines = [r'{"id": "\ud800", "log": "\ud800 Killed"}']
    printed = [line for line, _ in answers(lines)]
    assert printed[0].encode() and json.loads(printed[0])["id"] == "\ud800"


def test_a_corpus_of_good_lines_exits_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": "a", "log": ""}) + "\n")
    assert main(["classify", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["category"] == "benign"
    assert main(["score", str(path)]) == 1
    assert "category, role or action missing" in capsys.readouterr().err
    assert main(["classify", str(tmp_path / "none")]) == 2
    assert "give a file that can be read" in capsys.readouterr().err


def test_the_score_is_printed_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(CORPUS)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["excerpts"] == len(EXCERPTS)
    assert list(printed) == ["excerpts", "precision", "recall", "wrong_evictions", "held_out"]
