"""Times the failover of a driver with a large fleet and a long history in etcd.

    python benchmarks/fleet.py --nodes 12500 --lines 1000000

A real etcd on this machine gets the state that a former leader would have left: the nodes with
eight GPUs each, a job on all of them, jobs that have ended, and an audit log. Real drivers then
lead in turn. Each stands by, with its modules loaded, while this process holds the leader key,
until that is deleted; measured is the time from that, the end of a lease, to the first decision of
the next leader in etcd. The last line of stdout is one JSON object.
Exit status: 0, 1 if a failover took longer than the limit, 2 if the environment cannot run it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.election import Leadership, campaign
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.operations import Etcd, Put
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.process import child_environment, stat_fields
from megascale_common.service.identity.peers import read_or_create_token
from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.cluster import Cluster, Device, Identity, Node
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import AttemptRecord, Job, JobPhase
from megascale_driver.journal import codec, records
from megascale_driver.journal.store import LEADER_KEY, Store
from megascale_job import loading

LIMIT_S = 5.0
PREFIX = "/megascale/fleet/v1"
RANKS = 8
ENDED_JOBS = 50
LINES_PER_TXN = 120
TXNS_AT_ONCE = 8
START_S = 60.0
FAILOVER_S = 300.0
TTL_S = 60  # of the former leader
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A measurement that could not be made."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="failover time with a large state and history")
    parser.add_argument("--nodes", type=int, default=12_500, metavar="N")
    parser.add_argument("--lines", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    if min(options.nodes, options.lines, options.rounds) < 1:
        parser.error("--nodes, --lines and --rounds are whole numbers from 1 on")
    with tempfile.TemporaryDirectory(prefix="megascale-fleet-") as folder:
        try:
            found = asyncio.run(measure(Path(folder), options.nodes, options.lines, options.rounds))
        except (Failed, EtcdError, OSError) as error:
            print(f"fleet: {error}", file=sys.stderr)
            sys.exit(2)
    print(json.dumps(found))
    sys.exit(0 if found["failover_max_s"] < LIMIT_S else 1)


async def measure(folder: Path, nodes: int, lines: int, rounds: int) -> dict[str, Any]:
    """The figures of all rounds.

    Raises:
        Failed: a driver did not start or lead.
    """
    # Without fsync the state is written in a minute; a failover writes two small transactions.
    server = EtcdServer(folder / "etcd", unsafe_no_fsync=True)
    drivers: list[subprocess.Popen[bytes]] = []
    try:
        await server.start()
        async with EtcdClient([server.endpoint], prefix=f"{PREFIX}/", timeout_s=30.0) as etcd:
            began_s = time.monotonic()
            former = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=TTL_S)
            largest = await fill(etcd, former, nodes, lines)
            size_mib = (await etcd.status()).database_size_bytes / 2**20
            report(f"stored in {time.monotonic() - began_s:.0f} s, etcd has {size_mib:.0f} MiB")
            took: list[float] = []
            memory: list[float] = []
            cpu: list[float] = []
            for number in range(rounds):
                driver = start_driver(folder, server.endpoint, number)
                drivers.append(driver)
                await standing_by(folder, driver, number)
                before_s = cpu_s(driver.pid)
                took.append(await failover(etcd, former))
                cpu.append(cpu_s(driver.pid) - before_s)
                memory.append(rss_mib(driver.pid))
                # At once: without agents it would soon find all nodes dead.
                driver.kill()
                await asyncio.to_thread(driver.wait)
                report(f"round {number + 1}: {took[-1]:.2f} s, {memory[-1]:.0f} MiB")
                await etcd.delete(LEADER_KEY)
                former = await campaign(etcd, LEADER_KEY, b"{}", ttl_s=TTL_S)
            await former.resign()
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
        server.kill()
    return {
        "nodes": nodes,
        "audit_lines": lines,
        "rounds": rounds,
        "failover_s": round(statistics.median(took), 3),
        "failover_max_s": round(max(took), 3),
        "cpu_s": round(statistics.median(cpu), 3),
        "rss_mib": round(max(memory)),
        "largest_request_bytes": largest,
        "etcd_mib": round(size_mib),
        "cores": os.cpu_count(),
    }


async def fill(etcd: EtcdClient, former: Leadership, nodes: int, lines: int) -> int:
    """Store the state as a leader does, and the log; returns the largest request in bytes."""
    store = Store(etcd, former)
    empty = (await store.load()).cluster
    # Half of the log is the cluster's, half that of the job on all nodes.
    own = lines // 2
    await put_all(etcd, log_rows(own, lines - own))
    jobs = {"all": running(nodes, lines - own)}
    jobs |= {name: finished(name) for name in (f"done-{i}" for i in range(ENDED_JOBS))}
    state = Cluster({name: node(name) for name in names(nodes)}, jobs, log_seq=own)
    await store.commit(empty, state, (), deadline_s=FAILOVER_S)
    return store.largest_request_bytes


async def put_all(etcd: Etcd, batches: Iterable[list[Put]]) -> None:
    """Store batches of rows, some at once; a batch is made when one before it is stored.

    Raises:
        EtcdError: one could not be stored.
    """
    room = asyncio.Semaphore(TXNS_AT_ONCE)

    async def put(rows: list[Put]) -> None:
        try:
            await etcd.txn(success=rows)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for rows in batches:
                # Held from here to the answer. Without a wait for it, all rows would be made before
                # the first is sent, and the loop would renew no lease meanwhile.
                await room.acquire()
                tasks.create_task(put(rows))
    except ExceptionGroup as failed:
        # (What an except* block raises comes in a group again, in some releases of Python 3.11.)
        of_etcd = failed.subgroup(EtcdError)
        raise failed if of_etcd is None else of_etcd.exceptions[0] from failed


def log_rows(own: int, of_job: int) -> Iterator[list[Put]]:
    """The rows of both logs, as many at a time as fit a transaction."""
    for log, count in (("", own), ("all", of_job)):
        for first in range(1, count + 1, LINES_PER_TXN):
            numbers = range(first, min(first + LINES_PER_TXN, count + 1))
            yield [Put(records.key(log, seq), codec.dump(line(log, seq))) for seq in numbers]


def line(log: str, seq: int) -> Audit:
    """A line of ordinary length."""
    name = f"n{seq % 10_000:05d}"
    message = f"node {name} is suspect: no heartbeat for 8.2 s, its port was not probed yet"
    return Audit(
        log, seq, time.time(), "driver", f"nodes/{name}", "NODE_SUSPECT", message, "silence"
    )


def names(count: int) -> list[str]:
    """Names of nodes."""
    return [f"n{i:05d}" for i in range(count)]


def node(name: str) -> Node:
    """A node of eight GPUs as its agent describes it."""
    devices = tuple(
        Device(i, "cuda", f"GPU-{name}-5c1d-4a1b-9d0e-0123456789{i:02d}", "NVIDIA H200", 150 << 30)
        for i in range(RANKS)
    )
    topology = {"switch": f"s{int(name[1:]) // 32}"}
    return Node(name, Identity(
        f"{name}-abcdef123456", "0f3c1b9e-1111-2222-3333-444455556666", f"{name}.example", "0.4.0",
        devices, topology, "10.100.100.100:7001", "10.100.100.100:7002", "/var/lib/megascale", "",
    ))  # fmt: skip


def running(nodes: int, log_seq: int) -> Job:
    """The job on all nodes."""
    slots = tuple(
        NodeSlot(name, tuple(range(RANKS * i, RANKS * (i + 1))), tuple(range(RANKS)),
                 f"{name}-abcdef123456")
        for i, name in enumerate(names(nodes))
    )  # fmt: skip
    job = replace(finished("all", dp=nodes), phase=JobPhase.RUNNING, log_seq=log_seq)
    return replace(job, current=Attempt(1, slots), attempts=(AttemptRecord(1, slots, 1.0),))


def finished(name: str, dp: int = 1) -> Job:
    """A job that has ended."""
    config = loading.from_accepted(
        {
            "name": name,
            "model": {"layers": 8, "hidden_size": 64, "heads": 8, "vocab_size": 257,
                      "sequence_length": 64},
            "training": {"steps": 100_000, "global_batch_size": dp},
            "parallelism": {"tp": RANKS, "dp": dp},
            "data": {"sources": [{"prefix": "/data/corpus"}]},
        }
    )  # fmt: skip
    return Job(name, config, phase=JobPhase.SUCCEEDED, created_at_s=1.0, updated_at_s=2.0)


def start_driver(folder: Path, endpoint: str, number: int) -> subprocess.Popen[bytes]:
    """A driver, which stands by as long as another leads."""
    read_or_create_token(folder / "token")
    command = [
        *(sys.executable, "-m", "megascale_driver", "--cluster", "fleet", "--etcd", endpoint),
        *("--prefix", PREFIX, "--token-file", str(folder / "token")),
        *("--address-file", str(folder / f"address-{number}")),
    ]
    with (folder / f"driver-{number}.log").open("ab") as log:
        return subprocess.Popen(command, env=child_environment(), stdout=log, stderr=log)


async def standing_by(folder: Path, driver: subprocess.Popen[bytes], number: int) -> None:
    """Wait until the driver serves, and its campaign waits for the leader's end."""
    deadline_s = time.monotonic() + START_S
    while not (folder / f"address-{number}").exists():
        if driver.poll() is not None or time.monotonic() > deadline_s:
            log = (folder / f"driver-{number}.log").read_text()
            raise Failed(f"driver {number} does not serve: {log[-500:]}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


async def failover(etcd: EtcdClient, former: Leadership) -> float:
    """Seconds from the deletion of the leader key to the next leader's first decision."""
    revision = (await etcd.get_prefix("driver/")).revision + 1
    async with (
        asyncio.timeout(FAILOVER_S),
        etcd.watch(LEADER_KEY, revision, prefix=False) as keys,
        etcd.watch("log/", revision) as log,
    ):
        await former.resign()
        while not (await anext(keys)).deleted:
            pass
        free_s = time.monotonic()
        await anext(log)
        return time.monotonic() - free_s


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(stat_fields(pid)[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def report(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
