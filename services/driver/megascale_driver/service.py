"""DriverService: thin handlers that turn requests into events of the engine and its state into
answers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from megascale.v1 import driver_pb2, driver_pb2_grpc, executor_pb2, types_pb2
from megascale_common.job import validation as job_validation
from megascale_common.job.config import ConfigError, JobConfig
from megascale_common.job.wire import spec as job_spec
from megascale_common.node import identity
from megascale_common.service.errors import RpcError
from megascale_driver import profile_request, wire
from megascale_driver.core import machine
from megascale_driver.core.events import (
    Audit,
    CancelRequested,
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    Mutation,
    Outcome,
    RequestKey,
    UncordonRequested,
)
from megascale_driver.core.explain import explain
from megascale_driver.core.state import Disposition, Job, JobPhase, Liveness, Node
from megascale_driver.engine import Engine
from megascale_driver.feeds import TokenExpired
from megascale_driver.handlers import answers, invalid, streams, until_set
from megascale_driver.journal import audit_log
from megascale_driver.journal.store import NotLeader
from megascale_driver.leadership import Leader

DEFAULT_PAGE = 100
MAX_PAGE = 1000
MAX_LOG_LINES = 100_000
MAX_REQUEST_ID = 128
MAX_REASON = 1024
MAX_SPEC_BYTES = 64 << 10  # etcd takes 1.5 MiB for a whole transaction
MAX_OFFSET_DIGITS = 9
EXPLAIN_EVENTS = 5
DAEMONS_ASKED = 3
_NOT_FOUND, _INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_REFUSALS = {
    "JOB_EXISTS": (
        grpc.StatusCode.ALREADY_EXISTS,
        "a job of that name exists; choose another name",
    ),
    "JOB_NOT_FOUND": (_NOT_FOUND, "there is no such job; `ListJobs` names them"),
    "JOB_ENDED": (_PRECONDITION, "the job has ended already"),
    **dict.fromkeys(profile_request.REFUSALS, (_PRECONDITION, "the job cannot be profiled now")),
    "NODE_NOT_FOUND": (_NOT_FOUND, "there is no such node; `ListNodes` names them"),
    "NODE_QUARANTINED": (_PRECONDITION, "the node is quarantined, which keeps work off it already"),
    "REQUEST_ID_REUSED": (_INVALID, "the request_id was used for another request; use a new one"),
}
Context = grpc.aio.ServicerContext[Any, Any]


class DriverService(driver_pb2_grpc.DriverServiceServicer):
    """Jobs, nodes, audit."""

    def __init__(self, engine: Engine, leader: Leader, cluster: str) -> None:
        self.engine = engine
        self.leader = leader
        self._cluster = cluster

    @answers
    async def SubmitJob(
        self, request: driver_pb2.SubmitJobRequest, context: Context
    ) -> driver_pb2.SubmitJobResponse:
        """Judge the spec; unless ``validate_only``, store the job."""
        self._show()
        config = _judged(request)
        if request.validate_only:
            return driver_pb2.SubmitJobResponse(job=driver_pb2.Job(spec=job_spec.to_proto(config)))
        key = _request_key(request, request.request_id)
        await self._call(JobSubmitted(self.engine.clock.now_s(), config, _actor(context), key))
        return driver_pb2.SubmitJobResponse(job=self._message(self._job(config.name)))

    @answers
    async def GetJob(
        self, request: driver_pb2.GetJobRequest, context: Context
    ) -> driver_pb2.GetJobResponse:
        """One job."""
        return driver_pb2.GetJobResponse(job=self._message(self._job(request.name)))

    @answers
    async def ListJobs(
        self, request: driver_pb2.ListJobsRequest, context: Context
    ) -> driver_pb2.ListJobsResponse:
        """All jobs by name."""
        self._show()
        names = sorted(name for name in self.engine.state.jobs if name > request.page_token)
        page, token = _page(names, request.page_size)
        jobs = [self._message(self.engine.state.jobs[name]) for name in page]
        return driver_pb2.ListJobsResponse(jobs=jobs, next_page_token=token)

    @streams
    async def WatchJob(
        self, request: driver_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[driver_pb2.WatchJobResponse]:
        """The job now, then its updates behind the resume token."""
        job = self._job(request.name)
        feed = self.engine.feeds.of(job.name)
        yield driver_pb2.WatchJobResponse(resume_token=request.resume_token, job=self._message(job))
        try:
            async for update in until_set(
                self.leader.superseded, feed.follow(request.resume_token)
            ):
                yield update
        except TokenExpired as error:
            raise _expired(error) from error
        except ValueError as error:
            raise invalid("resume_token", str(error)) from error
        if not feed.ended:
            raise self.leader.not_leading()

    @answers
    async def CancelJob(
        self, request: driver_pb2.CancelJobRequest, context: Context
    ) -> driver_pb2.CancelJobResponse:
        """Stop a job for good."""
        reason = _reason(request.reason)
        job = self._job(request.name)
        if job.phase is not JobPhase.CANCELLED:
            key = _request_key(request, request.request_id)
            await self._call(
                CancelRequested(
                    self.engine.clock.now_s(), request.name, reason, _actor(context), key
                )
            )
        return driver_pb2.CancelJobResponse(job=self._message(self._job(request.name)))

    @answers
    async def ProfileJob(
        self, request: driver_pb2.ProfileJobRequest, context: Context
    ) -> driver_pb2.ProfileJobResponse:
        """Have chosen ranks write a trace of some steps ahead."""
        job = self._job(request.job)
        key, record = (
            _request_key(request, request.request_id),
            self.engine.feeds.record_of(job.name),
        )
        now_s, actor = self.engine.clock.now_s(), _actor(context)
        await self._call(
            profile_request.parse(
                request, job, record, now_s, request.reason[:MAX_REASON], actor, key
            )
        )
        return driver_pb2.ProfileJobResponse(
            profile=profile_request.answer(self._job(request.job), request.request_id)
        )

    @answers
    async def ExplainJob(
        self, request: driver_pb2.ExplainJobRequest, context: Context
    ) -> driver_pb2.ExplainJobResponse:
        """Why the job is where it is, with the newest events."""
        job = self._job(request.name)
        lines = [line for line in reversed(self.engine.audit) if line.log == job.name][
            :EXPLAIN_EVENTS
        ]
        return driver_pb2.ExplainJobResponse(
            explanation=explain(
                self.engine.state, job.name, self.engine.clock.now_s(), self.engine.policy
            ),
            events=[wire.event_message(line, self._epoch()) for line in lines],
        )

    @answers
    async def ListNodes(
        self, request: driver_pb2.ListNodesRequest, context: Context
    ) -> driver_pb2.ListNodesResponse:
        """All nodes by name."""
        self._show()
        names = sorted(name for name in self.engine.state.nodes if name > request.page_token)
        page, token = _page(names, request.page_size)
        nodes = [
            wire.node_message(self.engine.state, self.engine.state.nodes[name]) for name in page
        ]
        return driver_pb2.ListNodesResponse(nodes=nodes, next_page_token=token)

    @answers
    async def EvictNode(
        self, request: driver_pb2.EvictNodeRequest, context: Context
    ) -> driver_pb2.EvictNodeResponse:
        """Quarantine a node; its job moves on by itself."""
        reason = _reason(request.reason)
        node = self._node(request.name)
        consequence = self._consequence(node)
        if not request.validate_only:
            key = _request_key(request, request.request_id)
            await self._call(
                EvictRequested(self.engine.clock.now_s(), node.name, reason, _actor(context), key)
            )
        return driver_pb2.EvictNodeResponse(
            node=self._node_message(request.name), consequence=consequence
        )

    @answers
    async def CordonNode(
        self, request: driver_pb2.CordonNodeRequest, context: Context
    ) -> driver_pb2.CordonNodeResponse:
        """Keep new work off a node; what runs there goes on."""
        reason, key = _reason(request.reason), _request_key(request, request.request_id)
        self._show()
        event = CordonRequested(
            self.engine.clock.now_s(), request.name, reason, _actor(context), key
        )
        consequence = self._preview(event, "NODE_CORDONED")
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.CordonNodeResponse(
            node=self._node_message(request.name), consequence=consequence
        )

    @answers
    async def UncordonNode(
        self, request: driver_pb2.UncordonNodeRequest, context: Context
    ) -> driver_pb2.UncordonNodeResponse:
        """Make a cordoned or quarantined node schedulable again."""
        reason, key = _reason(request.reason), _request_key(request, request.request_id)
        self._show()
        event = UncordonRequested(
            self.engine.clock.now_s(), request.name, reason, _actor(context), key
        )
        consequence = self._preview(event, "NODE_UNCORDONED")
        if not request.validate_only:
            await self._call(event)
        return driver_pb2.UncordonNodeResponse(
            node=self._node_message(request.name), consequence=consequence
        )

    @answers
    async def RunDiagnostics(
        self, request: driver_pb2.RunDiagnosticsRequest, context: Context
    ) -> driver_pb2.RunDiagnosticsResponse:
        """Have a node that runs nothing check itself now."""
        node = self._node(request.node)
        job = self.engine.state.holder_of(node.name)
        if job is not None:
            slot = job.slot_of(node.name)
            ranks = f"ranks {slot.ranks[0]}-{slot.ranks[-1]}" if slot is not None else "ranks"
            raise RpcError(
                _PRECONDITION,
                "NODE_BUSY",
                f"node {node.name} runs {ranks} of job {job.name}; cancel the job or evict the node first",
                metadata={"job": job.name},
            )
        try:
            checks = await self.engine.node_calls.diagnose(node, list(request.checks))
        except grpc.aio.AioRpcError as error:
            raise _from_node(node.name, error) from error
        return driver_pb2.RunDiagnosticsResponse(checks=checks)

    @answers
    async def ListEvents(
        self, request: driver_pb2.ListEventsRequest, context: Context
    ) -> driver_pb2.ListEventsResponse:
        """The audit log of a job, or the events about a node, or (no subject) the whole cluster's,
        oldest first.
        """
        self._show()
        about, size = _about(request.subject), _page_size(request.page_size)
        try:
            behind = self.engine.audit.behind(request.page_token)
        except TokenExpired as error:
            raise _expired(error) from error
        except ValueError as error:
            raise invalid("page_token", str(error)) from error
        lines = list(itertools.islice(filter(about, behind), size + 1))
        token = audit_log.token_of(lines[size - 1]) if len(lines) > size else ""
        events = [wire.event_message(line, self._epoch()) for line in lines[:size]]
        return driver_pb2.ListEventsResponse(events=events, next_page_token=token)

    @streams
    async def WatchEvents(
        self, request: driver_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[driver_pb2.WatchEventsResponse]:
        """Lines of the audit log behind the resume token as they are committed, until the watcher
        leaves.
        """
        self._show()
        about = _about(request.subject)
        try:
            lines = self.engine.audit.follow(request.resume_token, about)
            # Headers now: a watcher knows that whatever is committed from here on reaches it.
            await context.send_initial_metadata(())
            async for line in until_set(self.leader.superseded, lines):
                event = wire.event_message(line, self._epoch())
                yield driver_pb2.WatchEventsResponse(
                    resume_token=audit_log.token_of(line), event=event
                )
        except TokenExpired as error:
            raise _expired(error) from error
        except ValueError as error:
            raise invalid("resume_token", str(error)) from error
        raise self.leader.not_leading()

    @streams
    async def TailLogs(
        self, request: driver_pb2.TailLogsRequest, context: Context
    ) -> AsyncIterator[driver_pb2.TailLogsResponse]:
        """A rank's log, read on the node that runs or ran it."""
        job = self._job(request.job)
        if not 0 <= request.lines <= MAX_LOG_LINES:
            raise invalid("lines", f"{request.lines} is outside 0 to {MAX_LOG_LINES}")
        wanted = request.attempt or job.attempt
        slots = next((record.slots for record in job.attempts if record.number == wanted), ())
        if not slots:
            raise RpcError(
                _NOT_FOUND, "ATTEMPT_NOT_FOUND", f"job {job.name} has no attempt {wanted}"
            )
        slot = next((slot for slot in slots if request.rank in slot.ranks), None)
        if slot is None:
            raise invalid(
                "rank",
                f"{request.rank} is not one of the job's {job.config.layout.world_size} ranks",
            )
        tail = executor_pb2.TailWorkerLogsRequest(
            job=job.name,
            rank=request.rank,
            attempt=wanted,
            lines=request.lines,
            follow=request.follow,
        )
        try:
            async for line in self.engine.node_calls.tail(self._node(slot.node), tail):
                yield driver_pb2.TailLogsResponse(line=line)
        except grpc.aio.AioRpcError as error:
            raise _from_node(slot.node, error) from error

    @answers
    async def ListCheckpoints(
        self, request: driver_pb2.ListCheckpointsRequest, context: Context
    ) -> driver_pb2.ListCheckpointsResponse:
        """Complete checkpoints, newest first, as a node's daemon reads them from storage."""
        job = self._job(request.job)
        found = await self._commits(job) if job.config.checkpoint.uri else []
        token = request.page_token
        if token and not (token.isdecimal() and len(token) <= MAX_OFFSET_DIGITS):
            raise invalid("page_token", f"{token!r} is not one that ListCheckpoints gave out")
        first = int(token or 0)
        size = _page_size(request.page_size)
        token = str(first + size) if first + size < len(found) else ""
        return driver_pb2.ListCheckpointsResponse(
            checkpoints=found[first : first + size], next_page_token=token
        )

    @answers
    async def GetClusterInfo(
        self, request: driver_pb2.GetClusterInfoRequest, context: Context
    ) -> driver_pb2.GetClusterInfoResponse:
        """Who leads and how the cluster stands."""
        self._show()
        state, term = self.engine.state, self.engine.term
        return driver_pb2.GetClusterInfoResponse(
            cluster=self._cluster,
            leader=self.engine.address if term is not None else "",
            epoch=self._epoch(),
            leader_since=wire.timestamp(state.leader_since_s),
            build=identity.build(),
            nodes_alive=sum(node.liveness is Liveness.ALIVE for node in state.nodes.values()),
            jobs_running=sum(job.phase is JobPhase.RUNNING for job in state.jobs.values()),
        )

    def _show(self) -> None:
        if not self.leader.shows_state:
            raise self.leader.not_leading()

    def _job(self, name: str) -> Job:
        self._show()
        if name not in self.engine.state.jobs:
            raise RpcError(
                _NOT_FOUND, "JOB_NOT_FOUND", f"no job {name!r}: {_REFUSALS['JOB_NOT_FOUND'][1]}"
            )
        return self.engine.state.jobs[name]

    def _node(self, name: str) -> Node:
        self._show()
        if name not in self.engine.state.nodes:
            raise RpcError(
                _NOT_FOUND, "NODE_NOT_FOUND", f"no node {name!r}: {_REFUSALS['NODE_NOT_FOUND'][1]}"
            )
        return self.engine.state.nodes[name]

    def _message(self, job: Job) -> driver_pb2.Job:
        return wire.job_message(job, self.engine.feeds.record_of(job.name))

    def _node_message(self, name: str) -> driver_pb2.Node:
        return wire.node_message(self.engine.state, self._node(name))

    def _preview(self, event: Mutation, reason: str) -> str:
        """What the request would lead to, from the core itself; raises the refusal if it would be
        refused.
        """
        _, outcome = machine.step(self.engine.state, event, self.engine.policy)
        _raise_refusal(outcome)
        line = next((line for line in outcome.audit if line.reason == reason), None)
        return line.outcome if line is not None else "nothing changes: it is so already"

    def _epoch(self) -> types_pb2.Epoch:
        return self.engine.term.epoch if self.engine.term is not None else types_pb2.Epoch()

    def _consequence(self, node: Node) -> str:
        if node.disposition is Disposition.QUARANTINED:
            return f"node {node.name} is quarantined already: {node.disposition_reason}"
        job = self.engine.state.holder_of(node.name)
        if job is None:
            jobs = [
                other.name for other in self.engine.state.jobs.values() if node.name in other.spares
            ]
            loss = f", job {jobs[0]} loses it as a spare" if jobs else ""
            return f"it runs nothing{loss}; it gets no work from now on"
        spares = (
            f"spare {job.spares[0]} takes its place"
            if job.spares
            else "it has no spare and waits for a node"
        )
        writes = job.config.checkpoint.uri
        origin = (
            "resumes from the newest complete snapshot"
            if writes
            else "begins at step 0: it writes no checkpoints"
        )
        return f"job {job.name} stops, {spares}, and a new attempt {origin}"

    async def _commits(self, job: Job) -> list[driver_pb2.Checkpoint]:
        nodes = [n for n in self.engine.state.nodes.values() if n.liveness is Liveness.ALIVE]
        # The job's own nodes first, in the order of their ranks: the first of them writes the
        # commit log.
        slots = {node.name: job.slot_of(node.name) for node in nodes}
        nodes.sort(key=lambda node: (0, *slot.ranks) if (slot := slots[node.name]) else (1,))
        failure: RpcError | None = None
        for node in nodes[:DAEMONS_ASKED]:
            try:
                return await self.engine.node_calls.list_commits(
                    node, job.name, job.config.checkpoint.uri
                )
            except grpc.aio.AioRpcError as error:
                failure = _from_node(node.name, error)
        raise failure or RpcError(
            grpc.StatusCode.UNAVAILABLE,
            "NO_NODE",
            "no node is alive whose daemon could read the checkpoints",
        )

    async def _call(self, event: Mutation) -> None:
        try:
            outcome = await self.engine.call(event)
        except NotLeader as error:
            raise self.leader.not_leading() from error
        except TimeoutError as error:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                "ETCD_SILENT",
                "etcd has not confirmed the request yet and may still; send it again with the same request_id",
            ) from error
        _raise_refusal(outcome)


def _raise_refusal(outcome: Outcome) -> None:
    if outcome.refusal:
        code, message = _REFUSALS[outcome.refusal]
        fields = [("request_id", message)] if outcome.refusal == "REQUEST_ID_REUSED" else []
        raise RpcError(code, outcome.refusal, outcome.refusal_detail or message, fields=fields)


def _about(subject: str) -> Callable[[Audit], bool]:
    """Whether a line belongs to the log of a job, is about a node, or, without a subject, anything."""
    kind, _, name = subject.partition("/")
    if not subject:
        return lambda line: True
    if kind not in ("jobs", "nodes") or not name:
        raise invalid(
            "subject",
            f"{subject!r} is neither jobs/NAME nor nodes/NAME nor empty (the whole cluster)",
        )
    return lambda line: line.log == name if kind == "jobs" else line.subject == subject


def _expired(error: ValueError) -> RpcError:
    remedy = "watch again without a token, and list events for what was missed"
    return RpcError(grpc.StatusCode.OUT_OF_RANGE, "TOKEN_EXPIRED", f"{error}: {remedy}")


def _judged(request: driver_pb2.SubmitJobRequest) -> JobConfig:
    """The job's configuration, if nothing is wrong with it."""
    if not request.HasField("spec"):
        raise invalid("spec", "missing; a job needs a specification")
    if request.spec.ByteSize() > MAX_SPEC_BYTES:
        raise invalid("spec", f"{request.spec.ByteSize()} bytes; use at most {MAX_SPEC_BYTES}")
    try:
        config = job_spec.from_proto(request.spec)
    except ConfigError as error:
        raise invalid(error.field, error.problem) from error
    problems = job_validation.validate(config)
    if problems:
        fields = [(p.field, f"{p.problem}; {p.remedy}") for p in problems]
        raise RpcError(_INVALID, "BAD_JOB_SPEC", "; ".join(map(str, problems)), fields=fields)
    return config


def _request_key(request: Message, request_id: str) -> RequestKey | None:
    if not request_id:
        return None
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable() or "/" in request_id:
        raise invalid(
            "request_id",
            f"use at most {MAX_REQUEST_ID} printable characters without '/', best a UUID",
        )
    return RequestKey(
        request_id, hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    )


def _reason(text: str) -> str:
    if not text.strip():
        raise invalid("reason", "missing; say why, it goes to the audit log")
    return text.strip()[:MAX_REASON]


def _actor(context: Context) -> str:
    """Who calls, as the client says in metadata ``megascale-actor``."""
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("megascale-actor", "user")
    return (value.decode(errors="replace") if isinstance(value, bytes) else value)[:64]


def _from_node(node: str, error: grpc.aio.AioRpcError) -> RpcError:
    code = error.code()
    if code in (_NOT_FOUND, _INVALID, _PRECONDITION, grpc.StatusCode.ABORTED):
        return RpcError(code, "REFUSED_BY_NODE", f"node {node}: {error.details()}")
    return RpcError(
        grpc.StatusCode.UNAVAILABLE,
        "NODE_UNREACHABLE",
        f"node {node} does not answer: {code.name}: {error.details()}",
    )


def _page_size(size: int) -> int:
    if size < 0:
        raise invalid("page_size", f"{size} is negative; leave it out or give 1 to {MAX_PAGE}")
    return min(size or DEFAULT_PAGE, MAX_PAGE)


def _page(names: Sequence[str], size: int) -> tuple[Sequence[str], str]:
    """The first page of ``names`` and the token of the next: the last name given."""
    page = names[: _page_size(size)]
    return page, page[-1] if len(page) < len(names) else ""
