"""One rank of four is slow in a real cluster: its node is named, by the spans of all ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.harness import paced
from tests.harness.chaos_cluster import chaos_cluster, measured
from tests.harness.local_cluster import megascale

from megascale_driver.analysis.spans.timeline import PATH_PROCESS

RANKS, SLOW, SLOW_S = 4, 2, 0.024


@pytest.mark.slow
async def test_a_rank_that_is_slow_is_named_and_keeps_its_work(tmp_path: Path) -> None:
    with chaos_cluster(tmp_path, "--nodes", str(RANKS)) as cluster:
        async with cluster.client() as client:
            optimizer = paced.slow(SLOW, SLOW_S)
            spec = cluster.job(
                "uneven", steps=10_000, interval_steps=0, dp=RANKS, optimizer=optimizer
            )
            async with cluster.follow(client, spec) as run:
                found = await run.until_event("STRAGGLER")
                node = run.job.nodes[SLOW]
                shown = megascale("heat", "uneven", "--cluster", str(cluster.up.folder), "--json")
                people = megascale("heat", "uneven", "--cluster", str(cluster.up.folder))
                why = await client.explain("uneven")
                trace_path = tmp_path / "trace.json.gz"
                where = ("--cluster", str(cluster.up.folder))
                traced = megascale("timeline", "uneven", "--out", str(trace_path), *where)
                slower = megascale("why", "uneven", "--json", *where)
                others = [each for each in run.events if each.reason == "STRAGGLER"]
                await client.cancel("uneven", reason="the test is over")
    assert found.subject == f"nodes/{node}" and found.mode == "OBSERVE", found
    assert "optimizer" in found.message and f"rank {SLOW}" in found.message, found
    assert len(others) == 1 and run.job.attempt == 1, run.story()
    assert shown.returncode == 0, shown
    heat = json.loads(shown.stdout)
    assert heat["rank_nodes"] == list(run.job.nodes), shown
    row = next(row for row in heat["rows"] if row["operation"] == "optimizer")
    assert row["ratio"][SLOW] > 1.5 and max(row["ratio"]) == row["ratio"][SLOW], row
    assert [slow["node"] for slow in heat["slow_nodes"]] == [node]
    assert f"node {node} is slow" in people.stdout and "optimizer" in people.stdout
    assert "STRAGGLER" in {event.reason for event in why.events}
    assert traced.returncode == slower.returncode == 0, (traced, slower)
    events = json.loads(gzip.decompress(trace_path.read_bytes()))["traceEvents"]
    ranks = {event["pid"] for event in events if event["ph"] == "X"}
    assert ranks == {*range(RANKS), PATH_PROCESS}
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name"
    }
    assert "critical path" in names.pop(PATH_PROCESS)
    assert all("clock within" in name for name in names.values()), names
    # Ranks wait for the slow one in the collective that follows its optimizer.
    waits_us = waited_for(events)
    assert waits_us and max(waits_us, key=lambda rank: waits_us[rank]) == SLOW, waits_us
    assert json.loads(slower.stdout)["sentence"]
    measured("slow rank", ratio=row["ratio"][SLOW])


def waited_for(events: list[dict[str, Any]]) -> dict[int, float]:
    """How long, in microseconds, others had been in a collective when each rank entered it."""
    entered: dict[tuple[int, int], list[float]] = {}
    for event in events:
        if event["ph"] == "X":
            entered.setdefault((event["pid"], event["tid"]), []).append(event["ts"])
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    waits_us: dict[int, float] = {}
    for end in (event for event in events if event["ph"] == "f"):
        last = starts[end["id"]]
        begin_us = max(ts for ts in entered[end["pid"], end["tid"]] if ts <= end["ts"])
        waits_us[last["pid"]] = waits_us.get(last["pid"], 0.0) + max(last["ts"] - begin_us, 0.0)
    return waits_us
