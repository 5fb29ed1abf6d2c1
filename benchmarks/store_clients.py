"""Clients of a rendezvous store for `group_start.py`: many ranks in one process.

Each has its own TCP connection and does what a rank does at a start (`start_operations.py`), in the
protocol of torch's TCPStore (torch/csrc/distributed/c10d/TCPStore.cpp): numbers are little-endian,
a text or value follows its length in 8 bytes. Like torch's client it asks one thing at a time, and
waits for a key before it gets it. The parent gives the options as one JSON object on stdin, then a
line to begin; the answer is one JSON object on stdout.
"""

from __future__ import annotations

import functools
import hashlib
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megascale_common.node.process import arm_parent_death
from megascale_job.layout import RankLayout
from megascale_trainer.process.bootstrap import ALL_READY_KEY, RANK_TABLE_KEY, READY_RANKS_KEY
from megascale_trainer.process.group_plan import group_plan

VALIDATE, SET, GET, ADD, WAIT, MULTI_GET, PING = b"\0", b"\1", b"\3", b"\4", b"\6", b"\n", b"\r"
MAGIC = 0x3C85F7CE
EVENTS = 512  # taken from the kernel at once
HOSTS_PER_PORT_RANGE = 4096  # connections from one loopback address


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and the bytes of its answer; ``adds``: the answer is the count of the barrier."""

    request: bytes
    answer: int
    adds: bool = False
    ends: str = ""  # the phase that it ends


def exchanges(prefix: str, steps: Iterator[Operation]) -> Iterator[Exchange]:
    """The operations as exchanges; what has no answer goes with the next request."""
    pending, world = b"", True
    yield Exchange(VALIDATE + _u32(MAGIC) + PING + _u32(1), 4, ends="connected")
    for step in steps:
        keys = tuple(f"/{prefix}/{key}" for key in step.keys)
        if step.name == "set":
            pending += SET + _text(keys[0]) + _u64(step.size) + bytes(step.size)
            continue
        awaited = WAIT + _keys(keys)
        if step.name == "add":
            yield Exchange(pending + ADD + _text(keys[0]) + struct.pack("<q", 1), 8, adds=True,
                           ends="groups")  # fmt: skip
        elif step.name == "wait":
            ends = "all ranks" if step.keys == (ALL_READY_KEY,) else ""
            yield Exchange(pending + awaited, 1, ends=ends)
        else:
            get = MULTI_GET + _keys(keys) if step.name == "multi_get" else GET + _text(keys[0])
            yield Exchange(pending + awaited, 1)
            first = world and step.name == "multi_get"
            world = world and not first
            yield Exchange(get, len(keys) * (8 + step.size), ends="world" if first else "")
        pending = b""


class Client:
    """One rank."""

    def __init__(self, index: int, address: tuple[str, int], steps: Iterator[Exchange]) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Ports of one pair of addresses are few.
        self.socket.bind((f"127.0.0.{2 + index // HOSTS_PER_PORT_RANGE}", 0))
        self._address, self._steps = address, steps
        self._now = next(steps)
        self._left, self._got = 0, b""

    def connect(self) -> None:
        """Begin; the first request leaves when the connection is open."""
        self.socket.connect_ex(self._address)

    def send(self) -> None:
        """Send the present request. It is small: a socket that is idle takes it at once."""
        self._left, self._got = self._now.answer, b""
        self.socket.sendall(self._now.request)

    def take(self, world_size: int, last: bytes) -> str | None:
        """Read; what has ended with it, "" for no phase, None while the answer is not whole."""
        data = self.socket.recv(65_536)
        if not data:
            raise ConnectionError("the store has closed a connection")
        self._left -= len(data)
        if self._left > 0:
            self._got += data if self._now.adds else b""
            return None
        ended = self._now
        if ended.adds and struct.unpack("<q", self._got + data)[0] == world_size:
            self.socket.sendall(last)
        step = next(self._steps, None)
        if step is not None:
            self._now = step
            self.send()
        return ended.ends


def run(options: dict[str, Any], ranks: list[int]) -> dict[str, Any]:
    """Start all clients, and let them do their operations; seconds until the last had each."""
    layout = RankLayout(**options["layout"])
    clients = {}
    for index, rank in enumerate(ranks):
        steps = operations(layout, rank, ring=options["ring"], tied=options["tied"])
        # Made before the clock starts: a rank has its own processor for it.
        made = Client(
            index, tuple(options["address"]), iter(list(exchanges(options["prefix"], steps)))
        )
        clients[made.socket.fileno()] = made
    last = SET + _text(f"/{options['prefix']}/{ALL_READY_KEY}") + _u64(0)
    print(json.dumps({"clients": len(clients)}), flush=True)
    sys.stdin.readline()
    poll = select.epoll()
    began_s, cpu_s = time.monotonic(), time.process_time()
    ended_s: dict[str, float] = {}
    requests = 0
    for number, client in clients.items():
        client.connect()
        poll.register(number, select.EPOLLOUT)
    left = len(clients)
    deadline_s = began_s + options["limit_s"]
    while left:
        events = poll.poll(1.0, EVENTS)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{left} of {len(clients)} clients are not done")
        for number, event in events:
            client = clients[number]
            if event & select.EPOLLOUT:
                poll.modify(number, select.EPOLLIN)
                client.send()
                continue
            phase = client.take(layout.world_size, last)
            if phase is None:
                continue
            requests += 1
            if phase:
                ended_s[phase] = time.monotonic()
                left -= phase == "all ranks"
    for client in clients.values():
        client.socket.close()
    spent_s = time.process_time() - cpu_s
    return {"began_s": began_s, "ended_s": ended_s, "requests": requests, "cpu_s": spent_s}


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _text(text: str) -> bytes:
    return _u64(len(text)) + text.encode()


@functools.lru_cache(maxsize=64)  # those of the world are the same for all
def _keys(keys: tuple[str, ...]) -> bytes:
    return _u64(len(keys)) + b"".join(map(_text, keys))


def main() -> None:
    """One run for the parent."""
    arm_parent_death()
    options = json.loads(sys.stdin.readline())
    try:
        print(json.dumps(run(options, options["ranks"])), flush=True)
    except OSError as error:  # TimeoutError and ConnectionError as well
        print(json.dumps({"error": str(error)}), flush=True)


UNIQUE_ID_BYTES = 128  # of ncclUniqueId
RANKS_PER_ROOT = 128  # TORCH_NCCL_RANKS_PER_ROOT
TABLE_BYTES = 32  # digits of the rank table's digest
ADDRESS_BYTES = 162  # of gloo's address of a rank
WORLD = "0"  # torch's name of it

Name = Literal["set", "get", "multi_get", "add", "wait"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of torch's store. ``size``: bytes of each value that is set or gotten."""

    name: Name
    keys: tuple[str, ...]
    size: int = 0


def operations(
    layout: RankLayout, rank: int, *, ring: bool = False, tied: bool = False, device: str = "cuda"
) -> Iterator[Operation]:
    """All operations of ``rank``, in order, except the set that ends the barrier.

    The rank that adds the last one to ``READY_RANKS_KEY`` also sets ``ALL_READY_KEY``.
    """
    yield Operation("set" if rank == 0 else "get", (RANK_TABLE_KEY,), TABLE_BYTES)
    everyone = range(layout.world_size)
    yield from _unique_ids(f"{WORLD}//{device}/", rank, len(everyone))
    for created, planned in enumerate(group_plan(layout, rank, ring=ring, tied=tied), start=1):
        name = _hashed_name(planned.ranks, created)
        if planned.kind == "alone":
            yield from _alone(f"{WORLD}//{name}//cpu//0/0")
            continue
        index = planned.ranks.index(rank)
        yield from _unique_ids(f"{WORLD}//{name}//{device}/", index, len(planned.ranks))
    yield Operation("add", (READY_RANKS_KEY,))
    yield Operation("wait", (ALL_READY_KEY,))


def operation_count(
    layout: RankLayout, rank: int, *, ring: bool = False, tied: bool = False
) -> int:
    """The number of operations of a rank, without their keys: for all ranks of a large job."""
    found = 3 + _exchanged(rank, layout.world_size)  # the table of ranks, and the barrier's two
    for planned in group_plan(layout, rank, ring=ring, tied=tied):
        ranks = planned.ranks
        alone = planned.kind == "alone"
        found += _ALONE if alone else _exchanged(ranks.index(rank), len(ranks))
    return found


@functools.lru_cache(maxsize=1 << 16)
def _exchanged(index: int, size: int) -> int:
    return sum(1 for _ in _unique_ids("", index, size))


def _unique_ids(prefix: str, index: int, size: int) -> Iterator[Operation]:
    if size <= RANKS_PER_ROOT:
        yield Operation("get" if index else "set", (f"{prefix}/0",), UNIQUE_ID_BYTES)
        return
    roots = _root_keys(prefix, size)
    if index % RANKS_PER_ROOT == 0:
        yield Operation("set", (roots[index // RANKS_PER_ROOT],), UNIQUE_ID_BYTES)
    yield Operation("multi_get", roots, UNIQUE_ID_BYTES)


@functools.lru_cache(maxsize=256)  # a group's ranks ask for it one after the other
def _root_keys(prefix: str, size: int) -> tuple[str, ...]:
    return tuple(f"{prefix}/UniqueNCCLID:{n}" for n in range(-(-size // RANKS_PER_ROOT)))


def _alone(key: str) -> Iterator[Operation]:
    """A group of one of gloo, which publishes the rank's address and waits for all of them."""
    yield Operation("set", (key,), ADDRESS_BYTES)
    yield Operation("wait", (key,))
    yield Operation("get", (key,), ADDRESS_BYTES)


_ALONE = sum(1 for _ in _alone(""))


@functools.lru_cache(maxsize=256)
def _hashed_name(ranks: tuple[int, ...], created: int) -> str:
    """torch's name of a group (``_hash_ranks_to_str``) of a rank that has ``created`` of them."""
    text = "_".join(map(str, (*ranks, created)))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    main()
