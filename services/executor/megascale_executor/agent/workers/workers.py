"""The worker processes of one attempt on this node: started, followed, and stopped together.

The first worker that fails fails the attempt. The others are killed at once, because a collective
without one of its ranks only hangs, and their reports would be symptoms. A worker that had ended by
itself before keeps its own status, so that the driver can find the culprit.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.v1 import link_pb2
from megascale_common.node import framing
from megascale_common.node.files import AttemptFolder
from megascale_common.node.flight_record import RankRecord
from megascale_common.node.messages import (
    STACKS_SIGNAL,
    Accepted,
    Assignment,
    Failed,
    Finished,
    NotLeft,
    Profiled,
    Running,
    StepDone,
    WorkerMessage,
)
from megascale_common.service import logs
from megascale_common.service.errors import TemplateError
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.processes.template import ForkedProcess, TemplateProcess
from megascale_executor.agent.workers import evidence
from megascale_executor.agent.workers.evidence import (
    STOPPED,
    KillWatch,
    MemoryGroup,
    memory_group,
    victim_evidence,
)
from megascale_job import loading

_log = logs.get(__name__)

_FROM_WORKER: Accepted[WorkerMessage] = Accepted(
    "the agent", Running, StepDone, Profiled, NotLeft, Failed, Finished
)
_EXPLAINED = ("BAD_JOB", "CHECKPOINT_CORRUPT", "OUT_OF_MEMORY")  # their detail is sufficient

# A worker that has reported an error is killed if it has not ended by itself within this time.
_EXIT_AFTER_FAILED_S = 1.0
# An out-of-memory kill in the cgroup does not explain an end more than twice this time later.
_REFRESH_KILLS_S = 5.0
# After its exit a worker's last messages are available at once. A grandchild that keeps the socket
# open must not delay the decision.
_DRAIN_SOCKET_S = 0.5
# For all workers at once; a task takes _DRAIN_SOCKET_S and the reading of a log.
_LAST_WORDS_S = 2 * _DRAIN_SOCKET_S
# A killed process is gone in milliseconds, unless a call of a device driver holds it in the kernel.
KILL_TIMEOUT_S = 10.0
# Enough to write stacks to a log. It delays a restart only if a rank hung.
_STACKS_S = 0.2


@dataclass(slots=True)
class Worker:
    """One rank's process and its reports."""

    rank: int
    channel: MessageChannel
    log_path: Path
    page: Path
    process: ForkedProcess | None = None
    running: bool = False
    restored_step: int = 0
    passed_over: str = ""  # what is wrong with the planned step; then ``restored_step`` is another
    notes: str = ""  # about the restore
    finished: bool = False
    finished_step: int = 0
    not_saved: str = ""  # with ``finished``: why the last step is not committed
    error_kind: str = ""
    error: str = ""
    exit_status: int | None = None
    exited_at_s: float = 0.0  # wall clock; if it reported an error, the time of the report
    stack: str = ""  # if it hung when it was stopped
    record: RankRecord | None = None  # NCCL's record, if it hung
    reader: asyncio.Task[None] | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> link_pb2.WorkerState.ValueType:
        """State for the heartbeat."""
        if self.exit_status is not None:
            return link_pb2.WORKER_STATE_EXITED
        return link_pb2.WORKER_STATE_RUNNING if self.running else link_pb2.WORKER_STATE_STARTING

    @property
    def ended_well(self) -> bool:
        """Whether it completed all its steps and exited with status 0."""
        return self.finished and self.exit_status == 0

    @property
    def failed_by_itself(self) -> bool:
        """Whether it has failed, and not because the agent stopped it."""
        stopped = self.error_kind == STOPPED and self.exit_status in (-signal.SIGKILL, 0)
        return self.exit_status is not None and not self.ended_well and not stopped


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """Callbacks for events of an attempt's workers; called on the event loop."""

    all_running: Callable[[], None]
    all_finished: Callable[[], None]
    step: Callable[[dict[str, Any]], None]
    failed: Callable[[str], None]
    exited: Callable[[], None]  # for any worker, once the cause of its end is decided
    profiled: Callable[[int, Profiled], None]  # with the rank
    not_left: Callable[[NotLeft], None]


class WorkerSet:
    """All workers of one attempt on this node."""

    def __init__(
        self,
        template: TemplateProcess,
        events: WorkerEvents,
        group_of: Callable[[int], MemoryGroup] = memory_group,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._template = template
        self._events = events
        self._group_of = group_of
        self._redact = redact
        self.workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(
        self, assignments: Sequence[tuple[Assignment, Path]], store_listen_fd: int | None
    ) -> None:
        """Fork one worker per (assignment, log file); rank 0 also gets the store's socket.

        Raises:
            TemplateError: a worker could not be forked; those that run are left to :meth:`stop`.
            OSError: a log file cannot be opened.
        """
        forks = []
        for assignment, log_path in assignments:
            worker, fork = self._launch(assignment, log_path, store_listen_fd)
            self.workers.append(worker)
            forks.append(fork)
        for outcome in await asyncio.gather(*forks, return_exceptions=True):
            if outcome is not None:
                raise outcome
        for worker, (assignment, _) in zip(self.workers, assignments, strict=True):
            listen, watch = self._listen(worker), self._watch(worker, assignment)
            worker.reader = asyncio.create_task(
                self._guard(worker, listen), name=f"worker-{worker.rank}-messages"
            )
            self._tasks.append(
                asyncio.create_task(self._guard(worker, watch), name=f"worker-{worker.rank}-exit")
            )

    def _launch(
        self, assignment: Assignment, log_path: Path, store_listen_fd: int | None
    ) -> tuple[Worker, asyncio.Task[None]]:
        channel, theirs = MessageChannel.pair()
        worker = Worker(assignment.rank, channel, log_path, Path(assignment.status_page))
        descriptors = [store_listen_fd] if worker.rank == 0 and store_listen_fd is not None else []

        async def fork() -> None:
            with theirs, log_path.open("ab") as log:
                # Assigned here and not by the caller, so that a start that is cancelled half-way
                # still kills the workers that were forked.
                worker.process = await self._template.fork(
                    worker.rank, theirs.fileno(), log.fileno()
                )

        # Sent before the fork: the assignment waits in the socket's buffer until the worker's first
        # read.
        try:
            channel.send(assignment, descriptors)
        except framing.FramingError as error:
            theirs.close()
            raise TemplateError(
                f"rank {worker.rank} cannot be given its assignment: {error}"
            ) from error
        return worker, asyncio.create_task(fork())

    async def _guard(self, worker: Worker, part: Coroutine[Any, Any, None]) -> None:
        """Follow a worker; a defect of the agent aborts the attempt, which would otherwise hang."""
        try:
            await part
        except Exception as error:
            _log.exception("a worker is no longer followed", rank=worker.rank)
            self.abort(f"the agent cannot follow rank {worker.rank}: {error!r}")

    async def _listen(self, worker: Worker) -> None:
        try:
            async for message in worker.channel.messages():
                self._take(worker, _FROM_WORKER.read(message))
        except (framing.FramingError, KeyError, TypeError) as error:
            worker.error_kind = "OTHER"
            worker.error = f"bad message from the worker: {error!r}"
            worker.failed.set()

    def _take(self, worker: Worker, message: WorkerMessage) -> None:
        if isinstance(message, Running):
            worker.running = True
            worker.restored_step = message.step
            worker.passed_over = message.passed_over
            worker.notes = message.notes
            if all(each.running for each in self.workers):
                self._events.all_running()
        elif isinstance(message, StepDone):
            self._events.step(message.record)
        elif isinstance(message, Profiled):
            self._events.profiled(worker.rank, message)
        elif isinstance(message, NotLeft):
            self._events.not_left(message)
        elif isinstance(message, Failed):
            detail = message.detail
            worker.error_kind = message.error_kind
            # The detail has the damaged file's name, or field and remedy, for the driver; the
            # traceback is in the log for people.
            worker.error = self._redact(
                detail if worker.error_kind in _EXPLAINED and detail else message.error
            )
            worker.exited_at_s = worker.exited_at_s or time.time()
            worker.failed.set()
        else:
            worker.not_saved = message.not_saved
            worker.finished_step = message.step
            worker.finished = True

    async def _watch(self, worker: Worker, assignment: Assignment) -> None:
        """Wait for one worker's end and decide what it means for the attempt."""
        assert worker.process is not None and worker.reader is not None
        exited = worker.process.exited
        kills = KillWatch(worker.process.pid, self._group_of(worker.process.pid))
        failed = asyncio.ensure_future(worker.failed.wait())
        either: set[asyncio.Future[Any]] = {exited, failed}
        until = asyncio.FIRST_COMPLETED
        while not (await asyncio.wait(either, timeout=_REFRESH_KILLS_S, return_when=until))[0]:
            kills.refresh()
        failed.cancel()
        if not exited.done():
            await asyncio.wait({exited}, timeout=_EXIT_AFTER_FAILED_S)
            if not exited.done():
                worker.process.kill()
        # Taken before the last messages are read, because the driver orders faults by this time.
        status, exited_at_s = await asyncio.shield(exited), time.time()
        await asyncio.wait({worker.reader}, timeout=_DRAIN_SOCKET_S)
        worker.exit_status = status
        worker.exited_at_s = worker.exited_at_s or exited_at_s
        by_other = status == -signal.SIGKILL and not (self._stopping or worker.error_kind)
        if by_other and (why := kills.explains(worker.process.peak_bytes)):
            worker.error_kind = "OUT_OF_MEMORY"
            worker.error = why
        timeout_s = loading.from_json(assignment.config).recovery.collective_timeout_s
        if why := victim_evidence(
            status, worker.error_kind, worker.log_path, worker.page, timeout_s
        ):
            worker.error_kind = "COLLECTIVE"
            worker.error = f"{worker.error}\n{why}".lstrip()
        worker.channel.close()
        if self._stopping:
            pass  # its report is kept for the report of the stop
        elif not worker.ended_well:
            self._fail(worker)
        elif all(each.ended_well for each in self.workers):
            self._events.all_finished()
        self._events.exited()

    def abort(self, reason: str) -> None:
        """Fail the attempt for a reason outside the workers; does nothing after its end."""
        if not self._stopping and not all(worker.ended_well for worker in self.workers):
            self._kill_for(reason)
            _log.warning("workers aborted", reason=reason)
            self._events.failed(reason)

    def _kill_for(self, reason: str, culprit: Worker | None = None) -> None:
        self._stopping = True
        for worker in self.workers:
            process = worker.process
            if worker is culprit or process is None or not process.alive:
                continue
            if not worker.error_kind:
                worker.error_kind = STOPPED
                worker.error = f"stopped by the agent, because {reason}"
            process.kill()

    def _fail(self, culprit: Worker) -> None:
        how = describe_exit(culprit.exit_status or 0)
        if culprit.exit_status == 0:
            how = "ended with status 0 before its last step"
            if not culprit.error_kind:  # status 0 alone would not show that it is the culprit
                culprit.error_kind = "OTHER"
                culprit.error = how
        self._kill_for(f"rank {culprit.rank} {how}", culprit)
        reason = f"rank {culprit.rank} {how}"
        if culprit.error_kind:
            reason += f" ({culprit.error_kind})"
        _log.warning(
            "worker failed", rank=culprit.rank, status=culprit.exit_status, kind=culprit.error_kind
        )
        self._events.failed(reason)

    async def stop(self) -> bool:
        """Kill the workers and wait; False if one is left after KILL_TIMEOUT_S.

        Ranks that hang first write their stacks to their logs, because nothing else shows where a
        hang was. Ranks that had failed by themselves keep their reports.
        """
        self._stopping = True
        dumps = await self._write_stacks()
        self._kill_for("the driver ordered it")
        # Read while the processes end, because freeing their memory takes a while and reading a
        # dump takes about 0.1 s.
        reading = asyncio.create_task(evidence.read_dumps(dumps)) if dumps else None
        waits = [worker.process.exited for worker in self.workers if worker.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=KILL_TIMEOUT_S)
        if reading is not None:
            records = await reading
            for worker in self.workers:
                worker.record = records.get(worker.rank)
        gone = all(wait.done() for wait in waits)
        if gone:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
            await self._close()
        return gone

    async def _write_stacks(self) -> dict[int, Path]:
        """Have ranks that hang write their stacks to their logs; returns NCCL's dumps, by rank."""
        now_ns = time.monotonic_ns()
        still = [
            (worker, worker.process, evidence.log_end(worker.log_path))
            for worker in self.workers
            if worker.process and worker.process.alive and evidence.is_still(worker.page, now_ns)
        ]
        for _, process, _ in still:
            process.send_signal(STACKS_SIGNAL)
        asked: dict[int, Path] = {}
        for worker, _, _ in still:
            asked |= evidence.request_dumps(AttemptFolder(worker.page.parent), [worker.rank])
        if still:
            await asyncio.sleep(_STACKS_S)
        found: dict[int, Path] = {}
        if asked:
            found = await evidence.written_dumps(asked)
            _log.info("records of NCCL's operations", written=len(found), asked=len(asked))
        for worker, process, start in still:
            stack = evidence.stack_since(worker.log_path, start)
            worker.stack = stack or f"no stack: it {evidence.kernel_state(process.pid)}"
        return found

    async def _close(self) -> None:
        readers = [worker.reader for worker in self.workers if worker.reader is not None]
        for task in (*self._tasks, *readers):
            task.cancel()
        await asyncio.gather(*self._tasks, *readers, return_exceptions=True)
        for worker in self.workers:
            worker.channel.close()


def describe_exit(status: int) -> str:
    """``was killed by signal 9`` or ``exited with status 1``."""
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
