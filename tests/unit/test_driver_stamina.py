"""What keeps the control plane up when its parts fail: campaigns, restarts, the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.harness.fake_etcd import Connection, FakeEtcd, FakeEtcdClient
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale_common.etcd import rpc_pb2
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable, ResourceExhausted
from megascale_common.service.clock import SystemClock
from megascale_common.service.errors import ClusterError
from megascale_common.service.identity.peers import read_or_create_token
from megascale_common.service.server import RpcServer
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal.store import LEADER_KEY
from megascale_driver.platform.local import cluster as local_cluster
from megascale_driver.platform.local.cluster import LocalCluster, LocalOptions
from megascale_driver.shell import leadership
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader


class FailingEtcd:
    """An etcd of which every call ends with one error."""

    def __init__(self, error: EtcdError) -> None:
        self.error = error
        self.calls = 0
        self.many = asyncio.Event()
        self.members = self

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def refuse(*arguments: object, **options: object) -> None:
            self.calls += 1
            if self.calls >= 10:
                self.many.set()
            raise self.error

        return refuse


async def test_a_driver_waits_while_etcd_refuses_its_campaign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "RETRY_S", 0.01)
    etcd: Any = FailingEtcd(ResourceExhausted("etcdserver: mvcc: database space exceeded"))
    leader = Leader(etcd, Engine(Policy(), SystemClock(), "t", "127.0.0.1:1"))
    running = asyncio.create_task(leader.run())
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await etcd.many.wait()
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EtcdUnavailable("get 'k': no answer within 5 s: UNAVAILABLE: etcdserver: no leader"),
         "etcd has no leader"),
        (EtcdUnavailable("get: no answer within 5 s: UNAVAILABLE: etcdserver: request timed out"),
         "etcd does not answer in time (etcdserver: request timed out)"),
        (EtcdUnavailable("get 'k': no answer within 5 s: DEADLINE_EXCEEDED"),
         "etcd has not answered for 40 s (no answer within 5 s: DEADLINE_EXCEEDED)"),
        (EtcdUnavailable("no etcd endpoint of m0:2379 could be reached in 5 s"),
         "etcd has not answered for 40 s (no etcd endpoint of m0:2379 could be reached in 5 s)"),
        (ResourceExhausted("get 'k': RESOURCE_EXHAUSTED: etcdserver: too many requests"),
         "etcd refuses reads: too many requests"),
    ],
)  # fmt: skip
async def test_a_driver_without_a_term_names_what_etcd_does(error: EtcdError, words: str) -> None:
    etcd: Any = FailingEtcd(error)
    now_s = 1000.0
    engine = Engine(Policy(), SystemClock(), "t", "127.0.0.1:1")
    leader = Leader(etcd, engine, clock=lambda: now_s)
    now_s += 40.0
    running = asyncio.create_task(leader.run())
    await eventually(lambda: not leader.etcd_answers, "a look-up")
    expected = f"this driver does not lead: {words}, so no driver can change anything now"
    assert str(leader.not_leading()) == expected
    running.cancel()
    await asyncio.wait({running})


async def test_a_leader_whose_key_is_deleted_by_hand_ends_its_term_without_a_write() -> None:
    """Its lease lives on: else it would hold its nodes for ever, and the next leader miss them."""
    etcd = FakeEtcd()
    engines = [Engine(Policy(), SystemClock(), "t", f"127.0.0.1:{port}") for port in (1, 2)]
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for engine in engines:
            client = FakeEtcdClient([Connection(etcd)], prefix="/megascale/test/v1/")
            await stack.enter_async_context(client)
            tasks.append(asyncio.create_task(Leader(client, engine).run()))
        await eventually(lambda: any(engine.term for engine in engines), "the first term")
        first = next(engine for engine in engines if engine.term)
        (second,) = (engine for engine in engines if engine is not first)
        key = f"/megascale/test/v1/{LEADER_KEY}".encode()
        etcd.store.delete(rpc_pb2.DeleteRangeRequest(key=key))
        await eventually(lambda: second.term and not first.term, "the next term, and one alone")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_up_continues_without_a_driver_that_never_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_cluster, "RESTART_DELAYS_S", (0.0,))
    reported: list[str] = []
    cluster = LocalCluster(
        LocalOptions(run_folder=tmp_path), lambda event, fields: reported.append(event)
    )
    starts = 0

    async def start() -> None:
        nonlocal starts
        starts += 1
        raise ClusterError("etcd refuses")

    for _ in range(local_cluster.MAX_RESTARTS + 5):
        await cluster._restart("driver", start)
    assert starts == local_cluster.MAX_RESTARTS
    assert reported == ["driver_exited", "driver_failed"] * local_cluster.MAX_RESTARTS + [
        "driver_given_up"
    ]


async def test_a_restarted_driver_is_in_the_up_file_when_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_cluster, "RESTART_DELAYS_S", (0.0,))
    in_file: dict[str, str] = {}

    def report(event: str, fields: dict[str, Any]) -> None:
        if event == "driver_ready":
            state = json.loads((tmp_path / "up.json").read_text())
            in_file[fields["address"]] = state["driver"]["address"]

    cluster = LocalCluster(LocalOptions(run_folder=tmp_path), report)

    async def start() -> None:
        (tmp_path / "driver.address").write_text("127.0.0.1:7\n")

    await cluster._restart("driver", start)
    assert in_file == {"127.0.0.1:7": "127.0.0.1:7"}


def test_the_token_is_made_once_whole_and_never_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(read_or_create_token(path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and os.listdir(tmp_path) == ["token"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("\n")
    with pytest.raises(ValueError, match="delete it and restart the cluster"):
        read_or_create_token(path)
    with pytest.raises(ValueError, match="empty or damaged"):
        RpcServer("")
