"""Rows of an earlier build, as it wrote them to a real etcd, are read and go on from there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest_asyncio
from tests.harness import etcd as etcd_harness
from tests.harness import journal
from tests.harness.journal import WatchedEtcd, leader
from tests.harness.simulated_cluster import demo_job
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.etcd.server import EtcdServer
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.journal import codec
from megascale_job import loading

etcd_server, etcd_prefix = etcd_harness.etcd_server, etcd_harness.etcd_prefix
# What the build before the journal had parts and an index left behind (commit f54aabb).
ROWS = Path(__file__).parents[1] / "harness" / "rows_of_an_earlier_build.json"


@pytest_asyncio.fixture
async def etcd(etcd_server: EtcdServer, etcd_prefix: str) -> AsyncIterator[WatchedEtcd]:
    endpoints = [etcd_server.endpoint]
    async with WatchedEtcd(endpoints, prefix=etcd_prefix, timeout_s=CALL_TIMEOUT_S) as client:
        yield client


async def test_a_leader_takes_over_from_an_earlier_build(etcd: WatchedEtcd) -> None:
    stored = json.loads(ROWS.read_text())
    for key, row in stored["rows"].items():
        await etcd.put(key, json.dumps(row).encode())
    store, found, audit = await leader(etcd)
    assert not found.unreadable
    assert shown(found, audit) == stored["expected"]
    # It goes on: the next line has the next number, and the next leader reads all of it.
    job = replace(found.jobs["a"], log_seq=found.jobs["a"].log_seq + 1, reason="later")
    line = Audit("a", job.log_seq, 2e9, "driver", "jobs/a", "PLACED", "placed")
    later = replace(found, jobs={"a": job})
    await store.commit(found, later, (line,), deadline_s=journal.DEADLINE_S)
    _, again, audit = await leader(etcd)
    assert (again.jobs["a"].reason, audit[-1].message) == ("later", "placed")


async def test_an_earlier_build_can_read_what_this_one_writes(etcd: WatchedEtcd) -> None:
    """As long as no decision needs a newer form: its keys and fields are all still there."""
    stored = json.loads(ROWS.read_text())
    for key, row in stored["rows"].items():
        await etcd.put(key, json.dumps(row).encode())
    store, found, _ = await leader(etcd)
    fresh = replace(found, jobs={"a": replace(found.jobs["a"], reason="later")})
    nodes = {name: replace(node, disposition_reason="later") for name, node in found.nodes.items()}
    fresh = replace(fresh, nodes=nodes)
    await store.commit(found, fresh, (), deadline_s=journal.DEADLINE_S)
    meta = await etcd.get("meta")
    assert meta is not None and json.loads(meta.value)["schema_version"] == codec.BASIC_VERSION
    for key in ("jobs/a/head", "nodes/n0"):
        item = await etcd.get(key)
        assert item is not None
        written, before = json.loads(item.value), stored["rows"][key]
        assert set(before) - {"txn"} <= set(written), "an earlier build misses a field"
        for name in set(before) - {"txn", "reason", "disposition_reason"}:
            assert type(written[name]) is type(before[name]), name


def test_an_earlier_build_can_read_a_job_that_uses_nothing_newer() -> None:
    """It refuses a specification with a field that it does not know, and led no more."""
    stored = json.loads(ROWS.read_text())["rows"]["jobs/a/specs/1"]
    known = set(paths({name: value for name, value in stored.items() if name != "txn"}))
    job = demo_job("a")
    assert set(paths(json.loads(loading.to_json(job)))) == known, (
        "a new field of a job is ADDED (job/stored.py)"
    )
    auto = replace(job, checkpoint=replace(job.checkpoint, interval="auto"))
    written = json.loads(loading.to_json(auto))
    assert set(paths(written)) - known == {"checkpoint.interval"}
    assert loading.from_accepted(written) == auto


def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The names of all fields, with those of sections behind a dot."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in ("labels", "options"):
            yield from paths(value, f"{before}{name}.")
        else:
            yield before + name


def shown(state: Cluster, audit: tuple[Audit, ...]) -> dict[str, Any]:
    """The state in a few values."""
    job = state.jobs["a"]
    return {
        "phase": job.phase,
        "attempt": job.attempt,
        "slots": [slot.node for slot in job.slots],
        "faults": [fault.kind for fault in job.current.faults],
        "log_seq": job.log_seq,
        "cluster_log_seq": state.log_seq,
        "lines": len(audit),
        "nodes": sorted(state.nodes),
        "committed_step": job.committed_step,
        "attempts": [record.number for record in job.attempts],
    }
