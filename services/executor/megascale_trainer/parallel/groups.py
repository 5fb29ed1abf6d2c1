"""Communication groups of one rank, and the record of what each of them is doing.

Pipeline edges are groups of two ranks, one per directed edge and payload, so that a rank only sends
or only receives on each: NCCL runs the operations of a communicator in order and without tags.
:mod:`megascale_trainer.process.bootstrap` creates the groups. Messages of an edge inside a host can
bypass its communicator (:mod:`megascale_trainer.parallel.pipeline.peer_edges`); they count too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megascale_common.node.spans.ops import Op
from megascale_common.node.status_page import StatusPageWriter
from megascale_job.layout import GROUP_NAMES, GroupName
from megascale_kernels.overlap.peer_messages import Transfer
from megascale_kernels.torch_calls import cuda_event, is_reached
from megascale_trainer import compat
from megascale_trainer.telemetry.timer import StepTimer

# Note [Entered and completed]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A row of the status page counts the operations that a group has entered and completed. The
# diagnosis of a hang reads it: a rank inside an operation waits for others, and the rank for which
# they wait is inside none. So the counts must say where a *device* is, not how far its host has
# enqueued:
#
# - On CUDA an operation is only enqueued when the call returns, and a host can be thousands of
# operations ahead. Each operation is followed by an event, which the next call and ``poll`` query.
# - A send counts as completed once it is posted: the partner's row shows whether it has arrived. A
#   host that waits for the send is inside the operation again until then.
# - A receive counts as entered only when the rank begins to wait for it. It is posted early, and a
#   rank that hangs in its own computation must not look as if it waited for others.


class Pending:
    """A collective in progress: until :meth:`wait`, do not write its source or use its output."""

    def __init__(self, work: dist.Work, group: Group, name: str, *, cuda: bool) -> None:
        self._work = work
        self._group = group
        self._name = name
        self._cuda = cuda
        self._ended = False

    def wait(self) -> None:
        """Make the current stream wait for the end, without the host (CPU: the caller waits)."""
        with self._group.timed(self._name):
            self._work.wait()
        # gloo's reduce-scatter never reports its end, but on a CPU it has ended after this wait. On
        # CUDA only the device waits, and the work itself reports its end.
        self._ended = not self._cuda
        self._group.poll()

    def ended(self) -> bool:
        """True once it is known to have ended; never waits."""
        return self._ended or self._work.is_completed()


class _Mark:
    """A point of the current CUDA stream, after an operation."""

    def __init__(self) -> None:
        self._event = cuda_event()
        self._event.record()

    def ended(self) -> bool:
        """Whether the device has reached it; never waits."""
        return is_reached(self._event)


class Messages(Protocol):
    """A way for messages to pass over an edge, in the order of their sends."""

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Send ``tensor``, which must not be written until the transfer has ended."""
        ...

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """The next message, into ``tensor``."""
        ...


class Group:
    """Some ranks that communicate, in ascending order; a group of one does nothing.

    A row of the status page counts its operations: see Note [Entered and completed].
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        handle: dist.ProcessGroup | None,
        status: StatusPageWriter | None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self._handle = handle
        self._status = status if handle is not None else None
        self._row = self._status.row(name) if self._status is not None else -1
        self._in_progress: deque[Pending | _Mark] = deque()
        self._sent = 0
        # The way of an edge's messages; None: through its communicator.
        self.messages: Messages | None = None
        self.timer = StepTimer()

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """torch's group; None in a group of one."""
        return self._handle

    @contextlib.contextmanager
    def operation(self, tensor: torch.Tensor) -> Iterator[None]:
        """Count the body, which communicates by other means, as one operation of the group.

        The operation is over when the device of ``tensor`` has reached its end.
        """
        self._enter()
        yield  # after an error the operation stays entered: the rank ends in it
        self._leave(tensor)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the operations of the body: they are captured, and run in each replay."""
        status = self._status
        self._status = None
        try:
            yield
        finally:
            self._status = status

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Maximum of ``tensor`` over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Concatenate every rank's ``source`` along dimension 0 into ``output``.

        ``source`` may be a view of ``output``.
        """
        if self._handle is None:
            if output.data_ptr() != source.data_ptr():
                output.copy_(source)
            return
        self._enter()
        with self.timed("all_gather"):
            compat.all_gather(output, source, self._handle)
        self._leave(source)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Sum ``source`` over the ranks; ``output`` gets this rank's part of dimension 0.

        ``output`` may be a view of ``source``.
        """
        if self._handle is None:
            if output.data_ptr() != source.data_ptr():
                output.copy_(source)
            return
        self._enter()
        with self.timed("reduce_scatter"):
            compat.reduce_scatter(output, source, self._handle)
        self._leave(source)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
    ) -> None:
        """Send ``send_sizes[i]`` values of ``source`` to rank i, ``receive_sizes[i]`` come from it.

        Both 1-D; the parts lie in the order of the ranks.
        """
        if self._handle is None:
            output.copy_(source)
            return
        self._enter()
        dist.all_to_all_single(output, source, receive_sizes, send_sizes, group=self._handle)
        self._leave(source)

    def start_all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        """:meth:`all_gather` in place that returns at once; None in a group of one.

        On CUDA it runs on the communicator's own stream, after everything that the current stream
        holds now; ``source`` and ``output`` must outlive it. All ranks of a group start its
        operations in the same order.
        """
        if self._handle is None:
            return None
        self._enter()
        work = compat.start_all_gather(output, source, self._handle)
        return self._post(work, source, "all_gather_wait")

    def start_reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        """:meth:`reduce_scatter` in place that returns at once, like :meth:`start_all_gather`."""
        if self._handle is None:
            return None
        self._enter()
        work = compat.start_reduce_scatter(output, source, self._handle)
        return self._post(work, source, "reduce_scatter_wait")

    def send(self, tensor: torch.Tensor) -> Send:
        """Post a send to the other rank of an edge.

        It counts as completed once it is posted: see Note [Entered and completed].
        """
        self._enter()
        work: Transfer | None
        if self.messages is not None:
            work = self.messages.send(tensor)
        else:
            work = dist.isend(tensor, self._other, group=self._handle)
        assert work is not None
        self._leave(tensor)
        self._sent += 1
        return Send(self, work, tensor, self._sent)

    def post_receive(self, tensor: torch.Tensor) -> Receive:
        """Post a receive into ``tensor`` from the other rank of an edge, and return at once.

        On CUDA the transfer starts on the communicator's stream when the current stream has done
        everything enqueued so far; work enqueued from now on runs in parallel with it. A message
        through peer memory arrives without a receive.
        """
        work: Transfer | None
        if self.messages is not None:
            work = self.messages.receive(tensor)
        else:
            work = dist.irecv(tensor, self._other, group=self._handle)
        assert work is not None
        return Receive(self, work, tensor)

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure the body as a span of this group if its timer is on."""
        return self.timer.span(Op(name, "collective", self.name))

    def poll(self) -> None:
        """Show on the status page which operations the device has ended; never waits."""
        if self._status is None:
            return
        # A communicator runs its operations in order, so none after the first that has not ended
        # can have ended.
        before = len(self._in_progress)
        while self._in_progress and self._in_progress[0].ended():
            self._in_progress.popleft()
        if len(self._in_progress) < before:
            self._status.complete(self._row, unfinished=len(self._in_progress))

    @property
    def _other(self) -> int:
        return self.ranks[1 - self.index]

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self._handle is None:
            return
        self._enter()
        with self.timed("all_reduce"):
            dist.all_reduce(tensor, operation, group=self._handle)
        self._leave(tensor)

    def _reopen(self, number: int) -> None:
        """Note that the host waits for the send ``number`` and those after it."""
        if self._status is not None:
            self._status.reopen(self._row, unfinished=self._sent - number + 1)

    def _enter(self) -> None:
        if self._status is not None:
            self.poll()  # ended operations leave the page before the next one is entered
            self._status.enter(self._row)

    def _post(self, work: dist.Work, tensor: torch.Tensor, name: str) -> Pending:
        pending = Pending(work, self, name, cuda=tensor.is_cuda)
        if self._status is not None:
            self._in_progress.append(pending)
        return pending

    def _leave(self, tensor: torch.Tensor) -> None:
        if self._status is None:
            return
        # On CUDA the call has only enqueued it; the mark after it shows when the device is done.
        if tensor.is_cuda:
            self._in_progress.append(_Mark())
        else:
            self._status.complete(self._row, unfinished=len(self._in_progress))


@dataclass(frozen=True, slots=True)
class Send:
    """A posted send, to be waited for once; its tensor must not be written before it has ended."""

    _group: Group
    _work: Transfer
    _tensor: torch.Tensor
    _number: int  # of the sends on its edge, from 1

    def ended(self) -> bool:
        """Whether it has ended; never waits."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Make the current stream wait for the end (CPU: the caller waits).

        A host that waits here counts as inside the operation again: see Note [Entered and
        completed].
        """
        waits = not self._tensor.is_cuda and not self._work.is_completed()
        if waits:
            self._group._reopen(self._number)
        self._work.wait()
        if waits:
            self._group._leave(self._tensor)


@dataclass(frozen=True, slots=True)
class Receive:
    """A posted receive, to be waited for once; until then its tensor belongs to the communicator.

    The tensor is safe with CUDA's caching allocator without being recorded on the communicator's
    stream. Its memory comes from the stream that is current at the post, so its earlier user is
    done when the transfer starts. It stays referenced here until the wait, and its next user after
    the release runs after that wait, on the same stream. So post and wait must run under the same
    current stream.
    """

    _group: Group
    _work: Transfer
    _tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The received tensor; the current stream (CPU: the caller) waits for the data.

        Only now does the receive count as entered: see Note [Entered and completed].
        """
        self._group._enter()
        self._work.wait()
        self._group._leave(self._tensor)
        return self._tensor


@dataclass(frozen=True)
class Edges:
    """A rank's pipeline edges: "in" from the stage before, "out" to the stage after.

    For gradients "in" is from the stage after. None at the ends of a pipeline that is not a ring.
    """

    activation_in: Group | None
    activation_out: Group | None
    gradient_in: Group | None
    gradient_out: Group | None


@dataclass(frozen=True)
class InnerGroups:
    """The groups with which a layer communicates; a CUDA graph holds what they do."""

    groups: tuple[Group, ...]

    @contextlib.contextmanager
    def operation(self, tensor: torch.Tensor) -> Iterator[None]:
        """:meth:`Group.operation` of each: a replay counts as one operation."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.operation(tensor))
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """:meth:`Group.uncounted` of each."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.uncounted())
            yield


@dataclass(frozen=True)
class Groups:
    """All groups of one rank, by the names of :class:`megascale_job.layout.RankLayout`.

    Two names can be one group, if it has the same ranks. ``ends``: the first and the last pipeline
    stage, on their ranks, if embeddings are tied.
    """

    named: Mapping[GroupName, Group]
    edges: Edges
    ends: Group | None = None

    def __getitem__(self, name: GroupName) -> Group:
        return self.named[name]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self["world"]

    @property
    def tp(self) -> Group:
        """The ranks of tensor parallelism."""
        return self["tp"]

    @property
    def dp(self) -> Group:
        """The ranks of data parallelism; only without cp, which shares their gradients."""
        return self["dp"]

    def time_with(self, timer: StepTimer) -> None:
        """Measure the collectives of all groups but tp, cp and edges by ``timer``.

        Those of tp and cp are part of the spans of forward and backward. The pipeline measures the
        transfers of edges, because it knows their micro-batches.
        """
        named = (group for name, group in self.named.items() if name not in ("tp", "cp"))
        for group in (*named, self.ends):
            if group is not None:
                group.timer = timer

    def poll(self) -> None:
        """Show on the status page all operations that have ended on the device; never waits."""
        edges = (
            self.edges.activation_in,
            self.edges.activation_out,
            self.edges.gradient_in,
            self.edges.gradient_out,
        )
        for group in dict.fromkeys((*self.named.values(), *edges, self.ends)):
            if group is not None:
                group.poll()


def single_process_groups() -> Groups:
    """The groups of a job of one rank; needs no process group."""
    alone = Group("world", (0,), 0, None, None)
    return Groups(dict.fromkeys(GROUP_NAMES, alone), Edges(None, None, None, None))
