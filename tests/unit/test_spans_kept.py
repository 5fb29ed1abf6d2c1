"""Spans of a run by hand: from the ring to files, and from the files to the analysers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_common.node.spans.ops import FORWARD, STEP
from megascale_common.node.spans.record import SPAN, Span
from megascale_common.node.spans.ring import SpanRingWriter, kept_ranks
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.__main__ import main
from megascale_job.layout import RankLayout
from megascale_trainer.launch.local_agent import SpanKeeper

LAYOUT = RankLayout(dp=4)


def keep(folder: Path, rank: int, steps: range, forward_ns: int, half_bytes: int = 1 << 20) -> int:
    """A rank that writes its steps, taken in two parts; returns what its ring dropped."""
    path = folder / f"ring-{rank}"
    keeper = SpanKeeper(path, folder, rank, f"host-{rank // 2}", LAYOUT, half_bytes)
    keeper.take()  # there is no ring yet
    ring = SpanRingWriter(path, rank=rank, attempt=1)
    for step in steps:
        begin_ns = step * 10_000_000
        ring.add(Span(begin_ns, 10_000_000, step, ring.op(STEP)))
        ring.add(Span(begin_ns, forward_ns + step % 3 * 1000, step, ring.op(FORWARD), 0))
        if step % 7 == 0:
            keeper.take()
    keeper.take()
    return ring.dropped


def test_the_spans_of_all_ranks_are_read_back_on_unix_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        assert keep(tmp_path, rank, range(1, 81), 3_000_000 if rank == 2 else 1_000_000) == 0
    found = recorded.of_folder(tmp_path)
    table = found.table
    assert len(table) == 4 * 80 * 2 and table.layout == LAYOUT
    assert table.nodes == ("host-0", "host-0", "host-1", "host-1")
    assert table.start_ns.min() > 1_600_000_000 * 10**9, "Unix time"
    assert main(["heat", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["median_ms"]["forward"] == pytest.approx([1.0, 1.0, 3.0, 1.0], abs=0.01)
    assert [slow["rank"] for slow in answer["slow_nodes"]] == [2]
    assert main(["why", str(tmp_path)]) in (0, 1)
    trace = tmp_path / "trace.json"
    assert main(["timeline", str(tmp_path), "--out", str(trace)]) == 0
    assert len(json.loads(trace.read_text())["traceEvents"]) > 640


def test_the_command_reads_the_newest_attempt_of_a_job(tmp_path: Path) -> None:
    for number, slow in ((1, 3), (2, 1)):
        attempt = tmp_path / f"attempt-{number:06d}"
        attempt.mkdir()
        for rank in range(4):
            keep(attempt, rank, range(1, 81), 3_000_000 if rank == slow else 1_000_000)
    runner = CliRunner()
    found = runner.invoke(build_app(), ["spans", "heat", str(tmp_path)])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout.splitlines()[-1])
    assert [slow["rank"] for slow in answer["slow_nodes"]] == [1]
    first = str(tmp_path / "attempt-000001")
    answer = json.loads(
        runner.invoke(build_app(), ["spans", "heat", first]).stdout.splitlines()[-1]
    )
    assert [slow["rank"] for slow in answer["slow_nodes"]] == [3]
    trace = tmp_path / "trace.json.gz"
    wrote = runner.invoke(build_app(), ["spans", "timeline", str(tmp_path), "--out", str(trace)])
    assert wrote.exit_code == 0 and trace.stat().st_size > 0
    assert runner.invoke(build_app(), ["spans", "why", str(tmp_path / "none")]).exit_code == 2


def test_room_is_bounded_and_the_newest_spans_stay(tmp_path: Path) -> None:
    half = 100 * SPAN.size
    keep(tmp_path, 0, range(1, 2001), 1_000_000, half_bytes=half)
    sizes = [path.stat().st_size for path in tmp_path.glob("spans-*.[re]*")]
    # One part may be larger by what is taken at once.
    assert sum(sizes) <= 2 * (half + 14 * SPAN.size)
    (kept,) = kept_ranks(tmp_path)
    steps = np.frombuffer(kept.records, np.dtype((np.void, SPAN.size)))
    assert len(steps) >= 100
    newest = [SPAN.unpack_from(kept.records, at)[2] for at in range(0, len(kept.records), 32)]
    assert newest == sorted(newest) and newest[-1] == 2000


def test_a_folder_without_them_or_with_some_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(tmp_path)]) == 2
    assert "give one of an attempt by hand" in capsys.readouterr().err
    keep(tmp_path, 1, range(1, 20), 1_000_000)
    assert main(["heat", str(tmp_path)]) == 2
    assert "ranks 0, 2, 3 are missing" in capsys.readouterr().err
    (tmp_path / "spans-00001.json").write_text("{}")
    assert main(["heat", str(tmp_path)]) == 2
    assert "no spans of a rank" in capsys.readouterr().err
