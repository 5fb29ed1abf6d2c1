"""Which ends of a worker show only that a peer did not come, by its status page and its log."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_common.node.status_page import (
    GroupRow,
    Phase,
    Status,
    StatusPageWriter,
    read_status_page,
)
from megascale_executor.agent.workers.evidence import STOPPED, is_still, overdue, victim_evidence

ABORTED = -int(signal.SIGABRT)
CAUGHT = (
    "[rank1]:[E] [PG ID 2 Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7) ran for 4 s"
)
FOUND = (
    "[rank1]:[E ProcessGroupNCCL.cpp:1895] [PG ID 2] "
    "Process group watchdog thread terminated with exception:"
)
WARNED = (
    "[rank1]:[W ProcessGroupNCCL.cpp:4561] "
    "using GPU 1 to perform barrier as devices are currently unknown"
)


def status(*rows: GroupRow) -> Status:
    """A page with these rows."""
    return Status(1, 0, 1, 9, Phase.STEP, 0, 0, rows)


@given(
    st.lists(st.sampled_from([0, 5, 40, 60, 61, 90]), max_size=4),
    st.sampled_from([1.0, 30.0, 100.0]),
)
def test_an_operation_is_overdue_when_it_is_in_progress_for_the_timeout(
    began_s: list[int], timeout_s: float
) -> None:
    """Of all rows the oldest counts; 0: nothing is in progress."""
    rows = [GroupRow(f"g{n}", 8, 8 - (at_s > 0), at_s * 10**9) for n, at_s in enumerate(began_s)]
    found = overdue(status(*rows), timeout_s, 100 * 10**9)
    oldest_s = min((at_s for at_s in began_s if at_s), default=None)
    assert bool(found) == (oldest_s is not None and 100 - oldest_s >= timeout_s)
    if found and oldest_s:
        group = f"g{began_s.index(oldest_s)}"
        assert found.startswith(
            f"its operation 8 in group {group} was in progress for {100 - oldest_s}.0 s"
        )


def test_without_a_page_nothing_is_overdue() -> None:
    assert overdue(None, 1.0, time.monotonic_ns()) == ""


def test_a_rank_stands_still_when_its_page_is_old(tmp_path: Path) -> None:
    page = tmp_path / "page"
    assert not is_still(page, time.monotonic_ns()), "it has not begun"
    writer = StatusPageWriter(page, rank=0, attempt=1)
    found = read_status_page(page)
    assert found is not None
    written_ns = found.updated_ns
    assert not is_still(page, written_ns)
    assert is_still(page, written_ns + 3 * 10**9)
    writer.close()


@pytest.mark.parametrize(
    ("exit_status", "kind", "victim"),
    [
        (1, "OTHER", True),  # some library's error of a lost context
        (-9, "OTHER", True),  # it had reported it before the agent stopped all
        (ABORTED, "", True),  # in a destructor
        (ABORTED, STOPPED, True),  # and was still writing its core
        (-9, "", False),  # by an operator who saw it hang
        (-11, "", False),
        (0, "", False),
        (1, "DATA", False),
        (1, "OUT_OF_MEMORY", False),
    ],
)
def test_who_ends_inside_an_overdue_operation_is_a_victim(
    exit_status: int, kind: str, victim: bool, tmp_path: Path
) -> None:
    writer = StatusPageWriter(tmp_path / "page", rank=0, attempt=1)
    row = writer.row("tp")
    writer.enter(row)
    for timeout_s, expected in ((0.0, victim), (60.0, False)):
        found = victim_evidence(exit_status, kind, tmp_path / "log", tmp_path / "page", timeout_s)
        assert bool(found) == expected
    writer.complete(row)
    assert victim_evidence(exit_status, kind, tmp_path / "log", tmp_path / "page", 0.0) == ""


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([CAUGHT], CAUGHT),
        ([WARNED, CAUGHT, f"{FOUND} [Rank 1] Watchdog caught collective operation timeout"], FOUND),
        (
            [
                f"{FOUND} NCCL error: remote process exited",
                "frame #3: c10d::ProcessGroupNCCL::WorkNCCL",
            ],
            FOUND,
        ),
        (
            [
                f"{FOUND} CUDA error: an illegal memory access",
                "frame #3: c10d::ProcessGroupNCCL::WorkNCCL",
            ],
            "",
        ),
        ([WARNED, "free(): invalid pointer"], ""),
    ],
    ids=["timeout", "timeout and end", "a peer is gone", "its own device", "its own fault"],
)
def test_an_abort_by_the_watchdog_is_told_by_the_log(
    lines: list[str], why: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("\n".join(lines))
    found = victim_evidence(ABORTED, "", tmp_path / "log", tmp_path / "page", 60.0)
    assert found.startswith(why) and bool(found) == bool(why)
    assert victim_evidence(1, "OTHER", tmp_path / "log", tmp_path / "page", 60.0) == ""
