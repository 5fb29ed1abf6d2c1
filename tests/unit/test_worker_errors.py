"""The kind of a worker's error, from which the driver decides whether another attempt may help, and
what a crash leaves in its log.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megascale_trainer.data.indexed import CorpusError, DataError
from megascale_trainer.process import worker
from megascale_trainer.process.worker import JobRefused, _classify
from megascale_trainer.save.restore import RestoreRefused

ADVICE = "GLHF! \N{BEACH WITH UMBRELLA}\ufe0f"  # of gloo in torch


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (CorpusError("trainer.data.sources[0].prefix: gone"), "BAD_JOB", "sources[0].prefix: gone"),
        (DataError("data loader has stopped"), "DATA", "has stopped"),
        (JobRefused("trainer.optimizer.name: unknown"), "BAD_JOB", "optimizer.name"),
        (RestoreRefused("BAD_JOB", "trainer.model: other", ""), "BAD_JOB", "trainer.model: other"),
        (RestoreRefused("CHECKPOINT_CORRUPT", "bad", "/c/rank-0"), "CHECKPOINT_CORRUPT", "/c/rank"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nhint"),
            "OUT_OF_MEMORY",
            "2 GiB",
        ),
        (MemoryError(), "OUT_OF_MEMORY", "no memory left"),
        (RuntimeError("Connection closed by peer [1.2.3.4]"), "COLLECTIVE", ""),
        (ValueError("a defect"), "OTHER", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_kind_of_an_error(error: Exception, kind: str, detail: str) -> None:
    found, text = _classify(error)
    assert found == kind and detail in text


def test_the_advice_of_gloo_stays_out_of_the_log_and_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = "Read error [127.0.0.1]:80: Connection reset by peer."

    def fail(*_: object) -> None:
        raise RuntimeError(f"{lost} {ADVICE}")

    monkeypatch.setattr(worker, "_Worker", fail)
    monkeypatch.setattr(worker.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(worker, "show_title", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assignment: Any = SimpleNamespace(rank=0, job="a", attempt=1)
        assert worker.run(theirs, assignment, []) == 1
        framed = ours.recv(1 << 16).decode()
    for text in (framed, capfd.readouterr().out):
        assert lost in text and "GLHF" not in text and "\N{BEACH WITH UMBRELLA}" not in text


def test_an_allocation_that_the_host_refuses_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(1 << 60, dtype=torch.uint8)
    kind, detail = _classify(refusal.value)
    assert kind == "OUT_OF_MEMORY" and "allocate" in detail


def test_a_crash_of_native_code_leaves_its_stack_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*assigned: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(worker, "_Worker", crash)
    monkeypatch.setattr(worker, "show_title", lambda *shown: None)
    _agent, ours = socket.socketpair()
    log = tmp_path / "rank.log"
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's own
        sys.stderr = log.open("w")
        assignment = SimpleNamespace(rank=3, job="crashes", attempt=1)
        worker.run(ours, cast(Any, assignment), [])
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    found = log.read_text()
    assert "Fatal Python error: Segmentation fault" in found and "in crash" in found, found
