"""The status page shows another process how far a rank is, even when the writer was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import cast

from megascale_common.node.status_page import Phase, StatusPageWriter, read_status_page


def test_a_reader_sees_what_was_written(tmp_path: Path) -> None:
    writer = StatusPageWriter(tmp_path / "page", rank=5, attempt=3)
    row = writer.row("tp")
    writer.row("edge 0-1 activation")
    under_way = writer.row("dp")
    writer.update(step=17, phase=Phase.STEP, micro_batch=2)
    writer.enter(row)
    writer.enter(row)
    writer.complete(row)
    writer.enter(row)
    for _ in range(3):
        writer.enter(under_way)
    writer.complete(under_way, unfinished=2)
    status = read_status_page(tmp_path / "page")
    assert status is not None
    assert (status.rank, status.attempt, status.step, status.phase, status.micro_batch) == (
        5,
        3,
        17,
        Phase.STEP,
        2,
    )
    rows = [(row.name, row.entered, row.completed) for row in status.rows]
    assert rows == [("tp", 3, 2), ("edge 0-1 activation", 0, 0), ("dp", 3, 1)]
    assert 0 <= time.monotonic_ns() - status.updated_ns < 5_000_000_000
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


def test_since_when_the_oldest_operation_is_under_way(tmp_path: Path) -> None:
    writer = StatusPageWriter(tmp_path / "page", rank=0, attempt=1)
    row = writer.row("tp")
    writer.row("dp")

    def since_ns() -> int:
        status = read_status_page(tmp_path / "page")
        assert status is not None and status.rows[1].since_ns == 0
        return status.rows[0].since_ns

    assert since_ns() == 0
    entered_ns = []
    for _ in range(3):
        entered_ns.append(time.monotonic_ns())
        writer.enter(row)
    assert entered_ns[0] <= since_ns() <= entered_ns[1]
    writer.complete(row, unfinished=1)
    assert since_ns() >= entered_ns[2]
    writer.complete(row)
    assert since_ns() == 0
    begun_ns = time.monotonic_ns()
    writer.reopen(row, unfinished=2)  # a wait for two that had counted as completed
    assert since_ns() >= begun_ns
    status = read_status_page(tmp_path / "page")
    assert status is not None and (status.rows[0].entered, status.rows[0].completed) == (3, 1)
    writer.complete(row)
    assert since_ns() == 0
    writer.complete(row)
    assert since_ns() == 0


def test_no_page_and_a_foreign_page_give_none(tmp_path: Path) -> None:
    assert read_status_page(tmp_path / "absent") is None
    (tmp_path / "foreign").write_bytes(b"\1" * 4096)
    assert read_status_page(tmp_path / "foreign") is None
    writer = StatusPageWriter(tmp_path / "damaged", rank=0, attempt=1)
    writer.update(phase=cast(Phase, 99))
    assert read_status_page(tmp_path / "damaged") is None
    (tmp_path / "folder").mkdir()
    assert read_status_page(tmp_path / "folder") is None
    (tmp_path / "empty").write_bytes(b"")
    assert read_status_page(tmp_path / "empty") is None


def _read_often(path: Path, readings: int) -> None:
    for _ in range(readings):
        read_status_page(path)


def test_a_page_that_is_cut_short_under_its_reader_ends_nobody(tmp_path: Path) -> None:
    """A mapping of it would be: SIGBUS, at the first of some thousand readings."""
    path = tmp_path / "page"
    writer = StatusPageWriter(path, rank=0, attempt=1)
    process = multiprocessing.get_context("fork").Process(target=_read_often, args=(path, 20_000))
    process.start()
    try:
        while process.is_alive():
            os.truncate(path, 0)
            os.truncate(path, 4096)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    os.truncate(path, 100)
    assert read_status_page(path) is None
    os.truncate(path, 4096)
    writer.update(step=7)
    status = read_status_page(path)
    assert status is not None and status.step == 7, "it is read again once it is whole"


def test_a_pipe_in_place_of_a_page_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page")
    assert read_status_page(tmp_path / "page") is None


def _write_for_ever(path: Path) -> None:
    writer = StatusPageWriter(path, rank=0, attempt=1)
    row = writer.row("g")
    step = 0
    while True:
        step += 1
        writer.update(step=step, phase=Phase.STEP)
        writer.enter(row)


def test_readings_are_consistent_while_a_writer_runs_and_after_it_was_stopped(
    tmp_path: Path,
) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_write_for_ever, args=(tmp_path / "page",)
    )
    process.start()
    try:
        readings = []
        # A sequence number that is zero for a moment was seen in 1 of 1,700 readings.
        while len(readings) < 5000:
            status = read_status_page(tmp_path / "page")
            if status is not None and status.rows:
                # Each round writes the step first and the row second.
                assert status.rows[0].entered in (status.step - 1, status.step)
                readings.append(status.step)
        assert readings == sorted(readings)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stopped = [read_status_page(tmp_path / "page") for _ in range(2)]
        assert stopped[0] == stopped[1]
    finally:
        process.kill()
        process.join()
