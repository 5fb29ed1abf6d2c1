"""The agent asks a rank for NCCL's flight recorder; what comes is bounded in time and size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from tests.harness.waiting import CALL_TIMEOUT_S, until
from tests.unit.test_flight_recorder import inside

from megascale_common.node.files import AttemptFolder
from megascale_driver.analysis import flight_recorder
from megascale_executor.agent.workers import evidence
from megascale_executor.agent.workers.evidence import stack_since
from megascale_trainer.process import flight_dump

CPU = torch.device("cpu")


async def test_ranks_that_are_asked_write_what_the_analysis_reads(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path)
    for rank, last in ((0, 4), (1, 4), (2, 4), (3, 3)):
        data = inside(last)
        flight_dump.answer(folder.flight_request(rank), folder.flight_dump(rank), lambda d=data: d)  # type: ignore[misc]
    for _ in range(2):  # a second request replaces the first answer
        asked = evidence.request_dumps(folder, range(5))  # rank 4 has no recorder
        assert asked == {rank: folder.flight_dump(rank) for rank in range(4)}
        assert await evidence.written_dumps(asked, wait_s=60.0) == asked
    found = flight_recorder.verdict(flight_recorder.read_folder(tmp_path))
    assert found.culprits == (3,)
    records = await evidence.read_dumps(asked, limit_s=CALL_TIMEOUT_S)
    assert flight_recorder.verdict(list(records.values())) == found


async def test_nobody_waits_for_a_rank_that_cannot_answer(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path)
    assert evidence.request_dumps(folder, [0]) == {}  # on a CPU there is no pipe
    os.mkfifo(folder.flight_request(1))
    assert evidence.request_dumps(folder, [1]) == {}  # its rank has ended: nobody reads the pipe
    reader = os.open(folder.flight_request(1), os.O_RDWR)  # it hangs with the interpreter lock
    folder.flight_dump(1).write_text("of an earlier hang")
    began_s = time.monotonic()
    asked = evidence.request_dumps(folder, [1])
    assert await evidence.written_dumps(asked, wait_s=0.2) == {} and len(asked) == 1
    assert time.monotonic() - began_s >= 0.2
    os.close(reader)
    assert evidence.WAIT_S <= 2.0  # it delays the restart


def test_a_record_that_is_too_long_or_fails_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flight_dump, "MAX_DUMP_BYTES", 10)
    answers = [b"x" * 11, RuntimeError("no communicator"), b"short"]

    def dump() -> bytes:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    pipe, out = tmp_path / "request", tmp_path / "out"
    flight_dump.answer(pipe, out, dump)
    seen = []
    for left in (2, 1, 0):
        with pipe.open("wb") as request:
            request.write(b"1")
        until(lambda left=left: len(answers) == left, "it is answered")  # type: ignore[misc]
        seen.append(out.exists())
    until(out.exists, "the third is written")
    assert seen[:2] == [False, False] and out.read_bytes() == b"short"
    assert "no communicator" in capfd.readouterr().out


def test_the_training_threads_stack_comes_with_the_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the agent reads it from the log: this test stands for the thread that trains."""
    pipe, out = tmp_path / "request", tmp_path / "out"
    flight_dump.answer(pipe, out, lambda: b"{}")
    with pipe.open("wb") as request:
        request.write(b"1")
    until(out.exists, "it is answered")
    log = tmp_path / "log"
    log.write_text(capfd.readouterr().err)
    stack = stack_since(log, 0)
    inner, caller, _ = stack.partition(" < pytest_pyfunc_call (")
    assert caller, "innermost first"
    assert "test_the_training_threads_stack_comes_with_the_record (unit/test_flight_dumps" in inner


def test_only_a_device_with_nccl_has_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_dump.recorder(CPU) is None
    cuda = torch.device("cuda", 0)
    monkeypatch.delattr(torch._C._distributed_c10d, flight_dump.NAME, raising=False)
    assert flight_dump.recorder(cuda) is None  # a torch without one
    monkeypatch.setattr(torch._C._distributed_c10d, flight_dump.NAME, lambda: b"{}", raising=False)
    found = flight_dump.recorder(cuda)
    assert found is not None and found() == b"{}"


async def test_what_cannot_be_read_is_left_out_and_the_time_is_bounded(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(inside(4))
    bad.write_bytes(b"{}")
    dumps = {0: bad, 1: good, 2: tmp_path / "absent"}
    found = await evidence.read_dumps(dumps, limit_s=CALL_TIMEOUT_S)
    assert list(found) == [1] and found[1].groups[0].waits_in == 4
    assert await evidence.read_dumps(dumps, limit_s=0.0) == {}
    assert evidence.READ_S <= 2.0  # it delays the restart
