"""Programs of two ranks that send each other messages through peer memory, on CPUs and on GPUs."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from tests.harness.tensor_products import tp_group
from tests.harness.training import GROUP_TIMEOUT_S, device_of, tiny_job
from torch._C._distributed_c10d import FileStore
from torch.distributed import _symmetric_memory

from megascale_job.loading import from_accepted
from megascale_kernels.overlap import peer_memory
from megascale_kernels.overlap.peer_memory import SignalledMemory, open_peer_memory
from megascale_kernels.overlap.peer_messages import SLOTS, PeerMessages, region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.pipeline.peer_edges import connect_edges
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups

MESSAGE_BYTES = 4096
LATE = 3  # messages beyond the slots
_CYCLES_PER_S = 1.5e9  # roughly, of torch.cuda._sleep


def exchange(rank: int, world_size: int, folder: Path, *, number: int, delay_s: float) -> list[int]:
    """Program of one rank: send all messages at once, then receive the other's with delays.

    Returns the numbers of those that came with another value than they were sent with.
    """
    group, device = tp_group(rank, world_size, folder), device_of(rank)
    messages = _open(group, device)
    sent = [_message(rank, n, device) for n in range(number)]
    # The first use of a kernel may wait for the device, which may wait for the other rank.
    _delay(0.0, device)
    torch.equal(torch.empty_like(sent[0]), sent[0])
    transfers = [messages.send(message) for message in sent]
    own, received = random.Random(rank), []
    for n in range(number):
        _delay(own.random() * delay_s, device)
        into = torch.empty_like(_message(1 - rank, n, device))
        messages.receive(into).wait()
        received.append(into)
    for transfer in transfers:
        transfer.wait()
    wrong = [
        n
        for n, found in enumerate(received)
        if not torch.equal(found, _message(1 - rank, n, device))
    ]
    _leave(group)
    return wrong


def sends_ahead(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Program of one rank: rank 0 sends more messages than there are slots, before any receive.

    Returns which of its sends had ended before the first receive, and which in the end.
    """
    group, device = tp_group(rank, world_size, folder), device_of(rank)
    messages = _open(group, device)
    values = [_message(0, n, device) for n in range(SLOTS + LATE)]
    if rank == 1:
        dist.barrier(group.handle)
        for value in values:
            messages.receive(torch.empty_like(value)).wait()
        _leave(group)
        return {}
    transfers = [messages.send(value) for value in values]
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    while not all(transfer.is_completed() for transfer in transfers[:SLOTS]):
        assert time.monotonic() < deadline, "a message waits though there is a slot for it"
        time.sleep(0.01)
    time.sleep(0.2)
    before = [transfer.is_completed() for transfer in transfers]
    dist.barrier(group.handle)
    for transfer in transfers:
        transfer.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    after = [transfer.is_completed() for transfer in transfers]
    _leave(group)
    return {"before": before, "after": after}


class _LateFirstWait:
    """Peer memory whose first wait for a signal begins late."""

    def __init__(self, memory: SignalledMemory) -> None:
        self._memory, self._waits = memory, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def await_signal(self, rank: int, channel: int) -> None:
        if self._waits == 0:
            time.sleep(0.3)
        self._waits += 1
        self._memory.await_signal(rank, channel)


def late_at_the_meeting(rank: int, world_size: int, folder: Path) -> list[float]:
    """Program of one rank: rank 0 sends before rank 1 has awaited its signal of the meeting.

    Returns what rank 1 receives.
    """
    group, device = tp_group(rank, world_size, folder), device_of(rank)
    assert group.handle is not None
    size_bytes = region_bytes(MESSAGE_BYTES)
    memory = open_peer_memory(group.handle, size_bytes, device, timeout_s=GROUP_TIMEOUT_S)
    into = torch.zeros(3)
    if rank == 0:
        PeerMessages(memory).send(torch.ones(3)).wait()
    else:
        PeerMessages(cast(SignalledMemory, _LateFirstWait(memory))).receive(into).wait()
    _leave(group)
    found: list[float] = into.tolist()
    return found


def one_is_ahead(rank: int, world_size: int, folder: Path) -> list[float]:
    """Program of one rank: rank 0 has opened two memories more when both open one together.

    Returns the message that came from the other rank.
    """
    group, device = tp_group(rank, world_size, folder), device_of(rank)
    if rank == 0:
        for _ in range(2):
            alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
            peer_memory._open(alone, 1, device)
            dist.destroy_process_group(alone)
    messages = _open(group, device)
    sent = torch.full((3,), float(rank), device=device)
    into = torch.empty_like(sent)
    transfer = messages.send(sent)
    messages.receive(into).wait()
    transfer.wait()
    found: list[float] = into.tolist()
    _leave(group)
    return found


def too_much(rank: int, world_size: int, folder: Path) -> list[str]:
    """Program of one rank: messages that no slot holds; returns the errors."""
    group, device = tp_group(rank, world_size, folder), device_of(rank)
    messages = _open(group, device)
    large, errors = torch.zeros(MESSAGE_BYTES + 1, dtype=torch.uint8, device=device), []
    for use in (messages.send, messages.receive):
        try:
            use(large)
        except RuntimeError as refusal:
            errors.append(str(refusal))
    destroy_groups()
    return errors


def choice(
    rank: int, world_size: int, folder: Path, *, sizes: dict[str, Any], one_host: bool
) -> dict[str, Any]:
    """Program of one rank of a pipeline: how messages pass on each of its edges, and the log."""
    if not one_host:
        peer_memory._host_key = lambda: rank
    config, device = from_accepted(tiny_job(parallelism=sizes)), device_of(rank)
    store = FileStore(str(folder / "store"), world_size)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    ring = config.parallelism.virtual_stages > 1
    rendezvous = Rendezvous(store, device, GROUP_TIMEOUT_S)
    edges = create_groups(config.layout, rank, rendezvous, ring=ring).edges
    with contextlib.redirect_stdout(io.StringIO()) as log:
        connect_edges(config, edges, rank, torch.float32, device)
    ways = {
        edge.name: None if edge.messages is None else type(edge.messages).__name__
        for edge in (
            edges.activation_in,
            edges.activation_out,
            edges.gradient_in,
            edges.gradient_out,
        )
        if edge is not None
    }
    destroy_groups()
    return {"ways": ways, "log": log.getvalue().splitlines()}


def openings(rank: int, world_size: int, folder: Path) -> int:
    """Program of one rank of a pipeline: open symmetric memories as edges do, then one of all.

    Ranks meet as torch has them meet, under the number of the openings of their process, without
    its memory. Returns the number of them.
    """
    config = from_accepted(tiny_job(parallelism={"pp": world_size}))
    store = FileStore(str(folder / "store"), world_size)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    device = torch.device("cpu")
    groups = create_groups(config.layout, rank, Rendezvous(store, device, GROUP_TIMEOUT_S))
    before, after = groups.edges.activation_in, groups.edges.activation_out
    pairs = sorted(
        (low % 2, low, edge)
        for low, edge in ((rank - 1, before), (rank, after))
        if edge is not None
    )
    meeting, opened = FileStore(str(folder / "openings"), world_size), itertools.count(1)

    def rendezvous(own: torch.Tensor, group: dist.ProcessGroup) -> int:
        number = next(opened)
        keys = [f"{group.group_name}/{number}/{peer}" for peer in range(group.size())]
        meeting.set(keys[group.rank()], "")
        meeting.wait(keys, timedelta(seconds=GROUP_TIMEOUT_S))
        return number

    memories = SimpleNamespace(empty_strided_p2p=lambda *_: torch.empty(0))
    with (
        mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
        mock.patch.object(peer_memory, "_SymmetricMemory", memories),
        mock.patch.object(peer_memory, "_opened", 0),
    ):
        for group in [*(edge for _, _, edge in pairs), groups.world]:
            assert group.handle is not None
            peer_memory._catch_up(group.handle, torch.device("cpu"))
            peer_memory._open(group.handle, 1, torch.device("cpu"))
        number = peer_memory._opened
    _leave(groups.world)
    return number


def _open(group: Group, device: torch.device) -> PeerMessages:
    assert group.handle is not None
    memory = open_peer_memory(
        group.handle, region_bytes(MESSAGE_BYTES), device, timeout_s=GROUP_TIMEOUT_S
    )
    return PeerMessages(memory)


def _leave(group: Group) -> None:
    """Leave together: a rank still signals that a slot is free when the other has what it wants."""
    dist.barrier(group.handle)
    destroy_groups()


def _message(rank: int, number: int, device: torch.device) -> torch.Tensor:
    """Message ``number`` of ``rank``: of random length, with values of its own."""
    length = random.Random(1000 * rank + number).randrange(1, MESSAGE_BYTES // 4 + 1)
    values = torch.arange(length, dtype=torch.float32, device=device)
    return values + (2000 * number + 1_000_000 * rank)


def _delay(seconds: float, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    else:
        time.sleep(seconds)
