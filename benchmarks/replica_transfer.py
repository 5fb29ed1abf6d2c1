"""What a copy of a state to a peer's memory, and its way back, reach by number of streams.

    python benchmarks/replica_transfer.py --gigabytes 8 --streams 1,2,4,8
    python benchmarks/replica_transfer.py --gigabytes 0.5 --rounds 1
    python benchmarks/replica_transfer.py --gigabytes 1 --streams 1,4 --rounds 5 --tls

Two checkpoint daemons' own sender, server, store and reader, in two processes of this machine, over
loopback: no GPU. The sender's slots get their pages first, by one thread and by several. With --tls
each round is run without encryption and with mutual TLS, in turn, to two peers.

The last line of stdout is one JSON object: GB/s of the pages, of each copy (all its bytes verified
by the receiver) and of each fetch, the best of --rounds and all of them, and the least processor
seconds that both processes take for a gigabyte of it. Exit status: 0, 1 where a transfer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory_restore import layout_of
from tests.harness.checkpoint_files import registration_of

from megascale_checkpoint.checksums import piece_checksums
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal
from megascale_checkpoint.memory import staging as stagings
from megascale_checkpoint.memory.slots import SlotSeal, SlotTable
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder, default_base
from megascale_checkpoint.replicas.node_replicas import fetch
from megascale_checkpoint.replicas.protocol import StateKey
from megascale_checkpoint.replicas.sender import ReplicaSender
from megascale_checkpoint.replicas.server import ReplicaServer
from megascale_checkpoint.replicas.store import ReplicaStore
from megascale_common.service import logs
from megascale_common.service.channel import present
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role

Run = tuple[float, float]  # seconds, processor seconds of both processes
TOKEN, JOB, SLOTS = "token-of-the-benchmark", "benchmark", 2


def processor_s() -> float:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def keep(pipe: Pipe, folder: StagingFolder) -> None:
    """The peer: serves until told to end; answers each message with its processor seconds."""
    pools = Pools()
    store = ReplicaStore(folder, pools, lambda _: 1, Signal())
    server = ReplicaServer(store, TOKEN)
    pipe.send(server.start("127.0.0.1"))
    try:
        while await asyncio.to_thread(pipe.recv):
            pipe.send(processor_s())
    finally:
        await server.close()
        await store.close()
        pools.close()


def run_peer(pipe: Pipe, files: Certificates | None) -> None:
    """The peer's process, which shows ``files`` and wants to see such ones; None: no TLS."""
    present(files)
    folder = StagingFolder(default_base(), "benchmark", "peer", str(os.getpid()))
    try:
        asyncio.run(keep(pipe, folder))
    finally:
        folder.remove()


class Rank:
    """The sealed slots of a rank, as the sender sees them; and the job that has it alone."""

    name, attempt = JOB, 1

    def __init__(self, memories: list[SlotMemory], size_bytes: int, endpoint: str) -> None:
        self.layout = layout_of(size_bytes)
        given = registration_of("", 0, 1, self.layout)
        self.registration = replace(given, job=JOB, replica_target=endpoint)
        self.memories, self.table = memories, SlotTable(len(memories))
        self.ranks, self.step = {0: self}, 0

    def seal(self) -> StateKey:
        """The next step, sealed and to be copied."""
        self.step += 1
        index = self.table.acquire(self.step)
        assert index is not None
        view = self.memories[index].view
        view[: 1 << 20] = os.urandom(1 << 20)
        self.table.begin_seal(index, self.step, persist=False, replicate=True)
        checksums = piece_checksums(self.layout, view)
        digest = self.registration.digest
        self.table.finish_seal(index, SlotSeal(1, self.step, digest, checksums, {}))
        return StateKey(JOB, 0, 1, self.step, digest)


async def copy(rank: Rank, streams: int) -> tuple[StateKey, float]:
    """Copy the next step; its key, and seconds. Raises RuntimeError where it fails."""
    key, changed = rank.seal(), Signal()
    sender = ReplicaSender(TOKEN, changed, streams)
    try:
        began_s = time.perf_counter()
        sender.consider([rank])
        while not sender.totals.get(JOB) or not sender.totals[JOB].count:
            await asyncio.wait_for(changed.wait(), 120.0)
            if sender.totals[JOB].failure is not None:
                raise RuntimeError(sender.totals[JOB].failure)
        return key, time.perf_counter() - began_s
    finally:
        await sender.close()


class Peer:
    """A process that keeps copies; ``own`` and ``its`` are the certificates, None: no TLS."""

    def __init__(self, own: Certificates | None, its: Certificates | None) -> None:
        self.files = own
        self.pipe, there = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=run_peer, args=(there, its), daemon=True)
        self._process.start()
        self.endpoint: str = self.pipe.recv()

    def end(self) -> None:
        """Have it remove its memory."""
        self.pipe.send(False)
        self._process.join(10.0)


def peers_of(tls: bool, folder: Path) -> list[Peer]:
    """One peer without TLS, and with ``tls`` one more, by an authority in ``folder``."""
    peers = [Peer(None, None)]
    if tls:
        authority.create(folder, "benchmark")
        own = authority.issue(folder, "benchmark", Role.CHECKPOINT, "sender")
        its = authority.issue(folder, "benchmark", Role.CHECKPOINT, "peer", ["127.0.0.1"])
        peers.append(Peer(own, its))
    return peers


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    logs.configure("benchmark", level="warning")
    with tempfile.TemporaryDirectory() as certificates:
        peers = peers_of(options.tls, Path(certificates))
        try:
            return measured(options, peers)
        finally:
            for peer in peers:
                peer.end()


def transfer(rank: Rank, peer: Peer, streams: int) -> tuple[Run, Run | None]:
    """A copy to the peer and its way back, which is None where another state was in its place."""
    present(peer.files)
    rank.registration = replace(rank.registration, replica_target=peer.endpoint)
    taken: list[StateKey] = []

    def copy_once() -> float:
        key, spent_s = asyncio.run(copy(rank, streams))
        taken.append(key)
        return spent_s

    copied = timed(copy_once, peer.pipe)
    into = rank.memories[(rank.step + 1) % SLOTS].view

    def fetch_once() -> float:
        began_s = time.perf_counter()
        fetch(peer.endpoint, TOKEN, taken[0], into, Cancellation(), streams)
        return time.perf_counter() - began_s

    if not rank.table.find(1, rank.step, rank.registration.digest):
        return copied, None
    return copied, timed(fetch_once, peer.pipe)


def measured(options: argparse.Namespace, peers: list[Peer]) -> dict[str, Any]:
    """All figures, with these peers in turn."""
    size_bytes = layout_of(int(options.gigabytes * 1e9)).slot_bytes
    folder = StagingFolder(default_base(), "benchmark", "sender", str(os.getpid()))
    try:
        pages, memories = pages_of(folder, size_bytes)
        rank, rows = Rank(memories, size_bytes, ""), []
        for streams in options.streams:
            runs: dict[bool, list[tuple[Run, Run | None]]] = {}
            for _ in range(options.rounds):
                for peer in peers:
                    runs.setdefault(peer.files is not None, []).append(
                        transfer(rank, peer, streams)
                    )
            for tls, each in runs.items():
                copies = [copied for copied, _ in each]
                fetches = [fetched for _, fetched in each if fetched is not None]
                rows.append({"streams": streams, "tls": tls, **row("copy", copies, size_bytes)})
                rows[-1] |= row("fetch", fetches, size_bytes)
                print(rows[-1], file=sys.stderr, flush=True)
        return {
            "gigabytes": round(size_bytes / 1e9, 3),
            "pages_gb_per_s": pages,
            "rows": rows,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
    finally:
        folder.remove()


def pages_of(folder: StagingFolder, size_bytes: int) -> tuple[dict[str, float], list[SlotMemory]]:
    """GB/s of clearing a slot's pages by threads, and the slots."""
    found, several = {}, stagings.POPULATING_THREADS
    memories = folder.allocate(JOB, 0, size_bytes, SLOTS, 0)
    folder.free(memories)
    memories = folder.allocate(JOB, 0, 1, 1) and []
    for threads in (1, several):
        stagings.POPULATING_THREADS = threads
        began_s = time.perf_counter()
        memories += folder.allocate(f"{JOB}-{threads}", 0, size_bytes, 1)
        found[f"{threads}_threads"] = round(size_bytes / (time.perf_counter() - began_s) / 1e9, 2)
    return found, memories


def timed(work: Callable[[], float], peer: Pipe) -> Run:
    """Seconds of ``work``, and processor seconds of both processes."""

    def both() -> float:
        peer.send(True)
        return float(peer.recv()) + processor_s()

    before = both()
    spent_s = work()
    return spent_s, both() - before


def row(what: str, runs: list[Run], size_bytes: int) -> dict[str, Any]:
    """The best of the runs, and all."""
    gigabytes = size_bytes / 1e9
    return {
        f"{what}_runs_gb_per_s": [round(gigabytes / spent_s, 2) for spent_s, _ in runs],
        f"{what}_gb_per_s": round(gigabytes / min(spent for spent, _ in runs), 2),
        f"{what}_processor_s_per_gb": round(min(used for _, used in runs) / gigabytes, 3),
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="encrypted as well, in turn")
    parser.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8]
    )
    try:
        found = measure(parser.parse_args())
    except (RuntimeError, OSError) as problem:
        print(json.dumps({"failed": str(problem)}))
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
