"""Ranks of a job in one process, one at a time, over communicators that a test can hold.

Each rank is a thread that runs until it blocks: in an operation whose peers have not come, or at a
point where the test holds it. Then the next one runs. When none can go on, the job stands still, at
once and the same way each time, and the test looks at it; nothing here waits for the clock. After
that the test lets the rank go on, and the job with it.

The communicators behave as gloo's: in order, untagged, a send ends when its receive was posted.
They compute what torch's do. :func:`installed` puts them in the place of ``torch.distributed`` in
the trainer's modules; the groups, their counts on the status page and all above are the trainer's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale_trainer import compat
from megascale_trainer.parallel import groups
from megascale_trainer.parallel.tensor import sharding
from megascale_trainer.process import bootstrap

GUARD_S = 120.0  # a rank that never blocks: a defect of the test


class Ended(BaseException):
    """The test is over: a rank that is blocked ends. No handler of the trainer may take it."""


@dataclass(eq=False)
class Rank:
    """A rank's thread. ``blocked`` says whether it can go on; None while it runs or has ended."""

    number: int
    program: Callable[[], None]
    blocked: Callable[[], bool] | None = None
    error: BaseException | None = None
    ended: bool = False
    groups_made: int = 0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass(eq=False)
class Operation:
    """A collective, or a transfer over an edge: over when all have joined, unless it is held."""

    size: int
    finish: Callable[[dict[int, Any]], None]
    parts: dict[int, Any] = field(default_factory=dict)
    held: bool = False
    finished: bool = False

    def over(self) -> bool:
        """Whether it has ended; the first who asks after the last has joined moves the data."""
        if not self.finished and not self.held and len(self.parts) == self.size:
            self.finish(self.parts)
            self.finished = True
        return self.finished


@dataclass(eq=False)
class Work:
    """What torch's operations return; ``held_for`` are ranks for which it does not end."""

    ranks: Ranks
    operation: Operation
    rank: int
    name: str

    def is_completed(self) -> bool:
        """As of torch's."""
        return self.operation.over() and (self.rank, self.name) not in self.ranks.stuck

    def wait(self) -> None:
        """Let others run until it has ended."""
        self.ranks.block(self.is_completed)


@dataclass(eq=False)
class Handle:
    """A process group: its operations in order, by (kind, number of it on that rank)."""

    members: tuple[int, ...]
    operations: dict[tuple[str, int], Operation] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def join(
        self, rank: int, kind: str, size: int, part: Any, finish: Callable[..., None]
    ) -> Operation:
        """Take part in the rank's next operation of this kind."""
        number = self.counts.get((kind, rank), 0)
        self.counts[kind, rank] = number + 1
        operation = self.operations.setdefault((kind, number), Operation(size, finish))
        operation.parts[rank] = part
        return operation


class Ranks:
    """All ranks. ``lost(src, dst)`` says of a transfer that is posted whether it never arrives."""

    def __init__(self, count: int) -> None:
        self.ranks = [Rank(number, lambda: None) for number in range(count)]
        self.handles: dict[tuple[tuple[int, ...], int], Handle] = {}
        self.world = Handle(tuple(range(count)))
        self.stuck: set[tuple[int, str]] = set()  # (rank, operation) that never ends for it
        self.lost: Callable[[int, int], bool] = lambda source, target: False
        self._held: list[Operation] = []
        self._counts: dict[str, int] = {}
        self._here = threading.local()
        self._control = threading.Semaphore(0)
        self._ending = False

    @property
    def here(self) -> Rank:
        """The rank that runs."""
        rank: Rank = self._here.rank
        return rank

    def start(self, program: Callable[[int], None]) -> None:
        """Give each rank its thread, which waits for its turn."""
        for rank in self.ranks:
            rank.blocked = lambda: True
            threading.Thread(target=self._run, args=(rank, program), daemon=True).start()

    def until_still(self) -> None:
        """Let the ranks run until none can go on.

        Raises:
            BaseException: what a rank has raised.
        """
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                if rank.ended or rank.blocked is None or not rank.blocked():
                    continue
                rank.blocked, moved = None, True
                rank.turn.release()
                assert self._control.acquire(timeout=GUARD_S), f"rank {rank.number} never blocks"
                if rank.error is not None:
                    raise rank.error

    def add(self, key: str, amount: int) -> int:
        """Of the store in which ranks meet: what torch's does."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def set(self, key: str, value: str) -> None:
        """As :meth:`add`; no value is read."""
        self._counts[key] = 1

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Let others run until all the keys are there; the clock stands."""
        self.block(lambda: all(key in self._counts for key in keys))

    def block(self, ready: Callable[[], bool]) -> None:
        """Of the rank that runs: let others run until ``ready``."""
        if self._ending:
            raise Ended
        if ready():
            return
        rank = self.here
        rank.blocked = ready
        self._control.release()
        rank.turn.acquire()
        if self._ending:
            raise Ended

    def deliver(self) -> None:
        """Transfers that were lost arrive after all."""
        self.lost = lambda source, target: False
        for operation in self._held:
            operation.held = False
        self._held.clear()

    def end(self) -> None:
        """End the threads that are left, wherever they are."""
        self._ending = True
        for rank in self.ranks:
            if not rank.ended:
                rank.turn.release()
                assert self._control.acquire(timeout=GUARD_S)

    def _run(self, rank: Rank, program: Callable[[int], None]) -> None:
        self._here.rank = rank
        rank.turn.acquire()
        try:
            if not self._ending:
                program(rank.number)
        except Ended:
            pass
        except BaseException as error:
            rank.error = error
        rank.ended = True
        self._control.release()

    # In the place of torch.distributed, for the rank that runs.

    def new_group(self, members: Sequence[int], **_: Any) -> Handle:
        """Members meet under their ranks and the number of groups that each has, as in torch."""
        self.here.groups_made += 1
        key = (tuple(members), self.here.groups_made)
        return self.handles.setdefault(key, Handle(tuple(members)))

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        """In place."""

        def finish(parts: dict[int, torch.Tensor]) -> None:
            values = torch.stack([parts[rank] for rank in sorted(parts)])
            total = values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0)
            for part in parts.values():
                part.copy_(total)

        self._collective("all_reduce", group, tensor.detach(), finish).wait()

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, group: Any, async_op: bool = False
    ) -> Work | None:
        """Of sources along dimension 0."""

        def finish(parts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
            whole = torch.cat([parts[rank][1] for rank in sorted(parts)])
            for target, _ in parts.values():
                target.copy_(whole)

        part = (output.detach(), source.detach())
        return self._maybe(self._collective("all_gather", group, part, finish), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, group: Any, async_op: bool = False
    ) -> Work | None:
        """Sum of the sources, cut along dimension 0."""

        def finish(parts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
            order = sorted(parts)
            total = torch.stack([parts[rank][1] for rank in order]).sum(0)
            for rank, cut in zip(order, total.chunk(len(order)), strict=True):
                parts[rank][0].copy_(cut)

        part = (output.detach(), source.detach())
        return self._maybe(self._collective("reduce_scatter", group, part, finish), async_op)

    def isend(self, tensor: torch.Tensor, dst: int, group: Handle) -> Work:
        """To the other rank of an edge."""
        return self._transfer(tensor, self.here.number, dst, group)

    def irecv(self, tensor: torch.Tensor, src: int, group: Handle) -> Work:
        """From the other rank of an edge."""
        return self._transfer(tensor, src, self.here.number, group)

    def _transfer(self, tensor: torch.Tensor, source: int, target: int, group: Handle) -> Work:
        def finish(parts: dict[int, torch.Tensor]) -> None:
            parts[target].copy_(parts[source])

        operation = group.join(self.here.number, "transfer", 2, tensor.detach(), finish)
        if self.lost(source, target):
            operation.held = True
            self._held.append(operation)
        return Work(self, operation, self.here.number, "transfer")

    def _collective(self, kind: str, group: Handle, part: Any, finish: Callable[..., None]) -> Work:
        number = self.here.number
        operation = group.join(number, "collective", len(group.members), part, finish)
        return Work(self, operation, number, f"world {kind}" if group is self.world else kind)

    @staticmethod
    def _maybe(work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None


@contextmanager
def installed(ranks: Ranks) -> Iterator[None]:
    """The trainer's groups communicate over ``ranks`` in the body; its threads end with it."""
    stand_in = SimpleNamespace(
        group=SimpleNamespace(WORLD=ranks.world),
        ReduceOp=dist.ReduceOp,
        init_process_group=lambda *_, **__: None,
        new_group=ranks.new_group,
        all_reduce=ranks.all_reduce,
        isend=ranks.isend,
        irecv=ranks.irecv,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "dist", stand_in)
        patch.setattr(bootstrap, "dist", stand_in)
        patch.setattr(compat, "_all_gather", ranks.all_gather)
        patch.setattr(compat, "_reduce_scatter", ranks.reduce_scatter)
        reason = "the ranks are threads of one process"
        patch.setattr(sharding, "why_unreachable", lambda *_: reason)
        try:
            yield
        finally:
            ranks.end()
