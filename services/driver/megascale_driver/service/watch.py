"""DriverService calls that follow and list: job updates, audit log, rank logs, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable

import grpc

from megascale.v1 import driver_pb2, executor_pb2
from megascale_common.etcd.errors import EtcdError
from megascale_common.service.errors import (
    ExpiredError,
    LimitError,
    NotFoundError,
    UnavailableError,
    invalid,
)
from megascale_common.service.identity.gate import caller
from megascale_common.service.status import answers, streams
from megascale_driver.core.values.attempt import NodeSlot
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job
from megascale_driver.journal import audit_log, timeline
from megascale_driver.nodes.streams import TermNotes, until_set
from megascale_driver.service.driver import (
    Calls,
    Context,
    expired,
    from_node,
    page_size,
)
from megascale_driver.wire import messages as wire
from megascale_job.visible import counted

MAX_LOG_LINES = 100_000
MAX_OFFSET_DIGITS = 9
CLUSTER = "cluster"  # subject of the audit log that belongs to no job


class WatchCalls(Calls):
    """Streams, which end when this driver loses the leadership, and lists in pages."""

    @streams
    async def WatchJob(
        self, request: driver_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[driver_pb2.WatchJobResponse]:
        """The job's current state, then its updates after the resume token until the job ends."""
        job = self._driver.job(request.name)
        feed = self._engine.feeds.of(job.name)
        # This message is not part of the feed. It carries the watcher's own token, so that a stream
        # that breaks right after it resumes at the same position.
        yield driver_pb2.WatchJobResponse(
            resume_token=request.resume_token, job=self._driver.message(job)
        )
        term = TermNotes(lambda: self._driver.note)

        def news() -> driver_pb2.WatchJobResponse | None:
            note = term.news()
            return driver_pb2.WatchJobResponse(note=note) if note else None

        try:
            async for update in until_set(
                self._leader.superseded, feed.follow(request.resume_token), news
            ):
                yield update
        except ExpiredError as error:
            raise expired(error) from error
        except ValueError as error:
            raise invalid("resume_token", str(error), "start over without it") from error
        if not feed.ended:
            raise self._leader.not_leading()

    @answers
    async def ListEvents(
        self, request: driver_pb2.ListEventsRequest, context: Context
    ) -> driver_pb2.ListEventsResponse:
        """Audit log of a job, a node or the cluster, oldest first; without a subject all lines."""
        self._driver.require_state()
        about, size = _about(request.subject), page_size(request.page_size)
        if timeline.is_token(request.page_token):
            return await self._by_time(request, about, size)
        try:
            behind = self._engine.audit.behind(request.page_token)
        except ExpiredError as error:
            behind = await self._older(request.subject, request.page_token, size + 1, error)
        except ValueError as error:
            raise invalid("page_token", str(error), "start over without it") from error
        lines = list(itertools.islice(filter(about, behind), size + 1))
        token = audit_log.token_of(lines[size - 1]) if len(lines) > size else ""
        events = [wire.event_message(line, self._driver.epoch()) for line in lines[:size]]
        return driver_pb2.ListEventsResponse(events=events, next_page_token=token)

    async def _by_time(
        self, request: driver_pb2.ListEventsRequest, about: Callable[[Audit], bool], size: int
    ) -> driver_pb2.ListEventsResponse:
        """A page of all readable lines in the order of their times."""
        state, (kind, _, name) = self._engine.state, request.subject.partition("/")
        logs = [timeline.Log(j.name, j.created_at_s, j.log_seq) for j in state.jobs.values()]
        logs.append(timeline.Log("", 0.0, state.log_seq))
        if request.subject == CLUSTER or kind == "jobs":
            logs = [log for log in logs if log.name == name]
        try:
            page = await self._leader.timeline.page(logs, request.page_token, about, size)
        except ValueError as error:
            raise invalid("page_token", str(error), "start over with t0") from error
        except EtcdError as failure:
            raise _silent(failure) from failure
        events = [wire.event_message(line, self._driver.epoch()) for line in page.lines]
        return driver_pb2.ListEventsResponse(events=events, next_page_token=page.token)

    async def _older(
        self, subject: str, token: str, count: int, error: ExpiredError
    ) -> list[Audit]:
        """Lines of one log that are no longer in memory, read from etcd or the export."""
        log, seq = audit_log.place_of(token)
        if subject != (f"jobs/{log}" if log else CLUSTER):
            raise ExpiredError(
                f"{error}: start over without a token, or with t0 for all lines that can be read, "
                "in the order of time (tSECONDS: from that time on)"
            ) from error
        try:
            return await self._leader.older.behind(log, seq, count)
        except EtcdError as failure:
            raise _silent(failure) from failure

    @streams
    async def WatchEvents(
        self, request: driver_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[driver_pb2.WatchEventsResponse]:
        """Lines of the audit log after the resume token, as they are committed, without end."""
        self._driver.require_state()
        about, term = _about(request.subject), TermNotes(lambda: self._driver.note)
        try:
            lines: AsyncIterator[Audit | str] = self._engine.audit.follow(
                request.resume_token, about
            )
            # Send the headers first: once they arrive, the watcher misses no committed line.
            await context.send_initial_metadata(())
            async for line in until_set(self._leader.superseded, lines, term.news):
                if isinstance(line, str):
                    yield driver_pb2.WatchEventsResponse(note=line)
                    continue
                event = wire.event_message(line, self._driver.epoch())
                yield driver_pb2.WatchEventsResponse(
                    resume_token=audit_log.token_of(line), event=event
                )
        except ExpiredError as error:
            raise expired(error) from error
        except ValueError as error:
            raise invalid("resume_token", str(error), "start over without it") from error
        raise self._leader.not_leading()

    @streams
    async def TailLogs(
        self, request: driver_pb2.TailLogsRequest, context: Context
    ) -> AsyncIterator[driver_pb2.TailLogsResponse]:
        """A rank's log, read on the node that runs or ran the rank."""
        job = self._driver.job(request.job)
        if not 0 <= request.lines <= MAX_LOG_LINES:
            problem = f"{request.lines} is out of range"
            raise invalid("lines", problem, f"give 0 (the default) to {MAX_LOG_LINES}")
        attempt = request.attempt or job.attempt
        slot = _slot_of_rank(job, attempt, request.rank)
        tail = executor_pb2.TailWorkerLogsRequest(
            job=job.name,
            rank=request.rank,
            attempt=attempt,
            lines=request.lines,
            follow=request.follow,
        )
        if problem := self._driver.log_streams.problem(caller()):
            raise LimitError(problem, reason="TOO_MANY_STREAMS")
        try:
            with self._driver.log_streams.one_more(caller()):
                async for line in self._engine.node_calls.tail(self._driver.node(slot.node), tail):
                    yield driver_pb2.TailLogsResponse(line=line)
        except grpc.aio.AioRpcError as error:
            raise from_node(slot.node, error) from error

    @answers
    async def ListCheckpoints(
        self, request: driver_pb2.ListCheckpointsRequest, context: Context
    ) -> driver_pb2.ListCheckpointsResponse:
        """Complete checkpoints, newest first, read from storage by a node's daemon."""
        job = self._driver.job(request.job)
        found = await self._driver.commits(job) if job.config.checkpoint.uri else []
        token = request.page_token
        if token and not (token.isdecimal() and len(token) <= MAX_OFFSET_DIGITS):
            problem = f"{token!r} is not a token that ListCheckpoints returned"
            raise invalid("page_token", problem, "start over without it")
        first = int(token or 0)
        size = page_size(request.page_size)
        token = str(first + size) if first + size < len(found) else ""
        return driver_pb2.ListCheckpointsResponse(
            checkpoints=found[first : first + size], next_page_token=token
        )


def _silent(failure: EtcdError) -> UnavailableError:
    return UnavailableError(
        f"older lines are in etcd, which does not answer: {failure}", reason="ETCD_SILENT"
    )


def _slot_of_rank(job: Job, attempt: int, rank: int) -> NodeSlot:
    slots = next((record.slots for record in job.attempts if record.number == attempt), ())
    if not slots:
        message = f"job {job.name} has no attempt {attempt}"
        raise NotFoundError(message, reason="ATTEMPT_NOT_FOUND")
    slot = next((slot for slot in slots if rank in slot.ranks), None)
    if slot is None:
        size = job.config.layout.world_size
        problem = f"{rank} is not one of the job's {counted(size, 'rank')}"
        raise invalid("rank", problem, f"give 0 to {size - 1}")
    return slot


def _about(subject: str) -> Callable[[Audit], bool]:
    """A filter for the lines about ``subject``: a job, a node, the cluster, or "" for all."""
    kind, _, name = subject.partition("/")
    if not subject:
        return lambda line: True
    if subject == CLUSTER:
        return lambda line: not line.log
    if kind not in ("jobs", "nodes") or not name:
        raise invalid(
            "subject",
            f"{subject!r} is no subject",
            f"give jobs/NAME, nodes/NAME or {CLUSTER!r}, or leave it out for everything",
        )
    return lambda line: line.log == name if kind == "jobs" else line.subject == subject
