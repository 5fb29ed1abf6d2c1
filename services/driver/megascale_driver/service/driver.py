"""Shared parts of DriverService's handlers: look-ups, orders to the engine, refusals, pages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict

import grpc
from google.protobuf.message import Message

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.service import status
from megascale_common.service.errors import (
    ExistsError,
    ExpiredError,
    LimitError,
    NotFoundError,
    NotLeaderError,
    PreemptedError,
    RequestError,
    ServiceError,
    StateError,
    UnavailableError,
    invalid,
)
from megascale_common.service.identity.gate import OpenStreams, caller
from megascale_driver.core import draft, machine
from megascale_driver.core.values.cluster import Liveness, Node
from megascale_driver.core.values.events import Mutation, Outcome, PlatformReport, RequestKey
from megascale_driver.core.values.job import Job
from megascale_driver.service import job_requests
from megascale_driver.shell.engine import Engine
from megascale_driver.shell.leadership import Leader
from megascale_driver.wire import messages as wire
from megascale_job.config import JobConfig
from megascale_job.visible import visible
from megascale_job.wire import spec as job_spec

DEFAULT_PAGE = 100
MAX_PAGE = 1000
MAX_REQUEST_ID = 128
MAX_REASON = 1024
# Concurrent readers of ranks' logs, per caller and in all: each holds a connection to a node.
MAX_LOG_STREAMS_OF_ONE, MAX_LOG_STREAMS = 128, 512
DAEMONS_TRIED = 3
MAX_SPEC_BYTES = 64 << 10  # etcd takes 1.5 MiB for a whole transaction
# Error type and default message for each refusal of the core, by reason.
_REFUSALS: dict[str, tuple[type[ServiceError], str]] = {
    "JOB_EXISTS": (
        ExistsError,
        "a job of that name exists already; choose another name",
    ),
    "JOB_UNREADABLE": (StateError, "the stored rows of the job cannot be read by this build"),
    "JOB_NOT_FOUND": (NotFoundError, "there is no such job; `megascale jobs` lists all"),
    "JOB_ENDED": (StateError, "the job has ended already"),
    "JOB_CANNOT_SAVE": (StateError, "the job has no checkpoints, so its steps would be lost"),
    "JOB_NOT_ENDED": (StateError, "the job has not ended; cancel it first"),
    **dict.fromkeys(job_requests.REFUSALS, (StateError, "the job cannot be profiled now")),
    "NO_PROFILE": (StateError, "no profile of the job is in progress"),
    "NODE_NOT_FOUND": (NotFoundError, "there is no such node; `megascale nodes` lists all"),
    "NODE_QUARANTINED": (StateError, "the node is quarantined already and gets no work"),
    "TOO_MANY_TENANTS": (LimitError, "there are too many tenants; use one that exists"),
    "REQUEST_ID_REUSED": (RequestError, "the request_id belongs to another request; use a new one"),
}
# Refusals that concern one field of the request.
_REFUSED_FIELDS = {
    "REQUEST_ID_REUSED": "request_id",
    "TOO_MANY_TENANTS": "tenant",
}
Context = grpc.aio.ServicerContext[Any, Any]


class Asked(TypedDict):
    """Fields that the events of all operator requests share."""

    now_s: float
    reason: str
    actor: str
    request: RequestKey | None


class Driver:
    """The engine and the leadership behind every call, and the steps that calls share."""

    def __init__(self, engine: Engine, leader: Leader, cluster: str) -> None:
        self.engine = engine
        self.leader = leader
        self.cluster = cluster
        self.log_streams = OpenStreams(MAX_LOG_STREAMS_OF_ONE, MAX_LOG_STREAMS)

    @property
    def note(self) -> str:
        """Sent with each answer while this driver has no term: its state is old. Else ""."""
        if self.engine.term is not None or not self.leader.shows_state:
            return ""
        why = self.leader.without_term or "it campaigns"
        age_s = self.engine.clock.now_s() - self.engine.term_ended_s
        return f"this driver does not lead: {why}; what it shows is {age_s:.0f} s old"

    def require_state(self) -> None:
        """Refuse the call if another driver's state may be newer than this one's."""
        if not self.leader.shows_state:
            raise self.leader.not_leading()

    def job(self, name: str) -> Job:
        self.require_state()
        if (problem := self.engine.state.unreadable.get(draft.unreadable_key(name))) is not None:
            raise StateError(draft.unreadable_sentence(name, problem), reason="JOB_UNREADABLE")
        if name not in self.engine.state.jobs:
            message = f"there is no job {name!r}; `megascale jobs` lists all"
            raise NotFoundError(message, reason="JOB_NOT_FOUND")
        return self.engine.state.jobs[name]

    def node(self, name: str) -> Node:
        self.require_state()
        if name not in self.engine.state.nodes:
            message = f"there is no node {name!r}; `megascale nodes` lists all"
            raise NotFoundError(message, reason="NODE_NOT_FOUND")
        return self.engine.state.nodes[name]

    def message(self, job: Job) -> driver_pb2.Job:
        feeds = self.engine.feeds
        return wire.job_message(
            job,
            feeds.record_of(job.name),
            self.engine.clock.now_s(),
            self.engine.state.nodes,
            feeds.evaluation_of(job.name),
            feeds.typical_step_of(job.name),
        )

    def job_message(self, name: str) -> driver_pb2.Job:
        return self.message(self.job(name))

    def node_message(self, name: str) -> driver_pb2.Node:
        last_beat_s = self.engine.presence.lane.last_beat_s(name)
        return wire.node_message(self.engine.state, self.node(name), last_beat_s)

    def epoch(self) -> types_pb2.Epoch:
        return self.engine.term.epoch if self.engine.term is not None else types_pb2.Epoch()

    async def call(self, event: Mutation | PlatformReport) -> None:
        """Hand the request to the engine; returns once it is committed to etcd.

        Raises:
            ServiceError: the core refuses the request, this driver does not lead, or etcd did not
                answer in time. In the last case the outcome is unknown. It is safe to repeat the
                request with the same request_id, because the core carries out each id only once.
        """
        try:
            outcome = await self.engine.call(event)
        except NotLeaderError as error:
            raise self.leader.not_leading() from error
        except TimeoutError as error:
            raise UnavailableError(
                "etcd has not confirmed the request in time, and may still do so; "
                "send it again with the same request_id",
                reason="ETCD_SILENT",
            ) from error
        raise_refusal(outcome)

    def asked(self, request: Any, context: Context) -> Asked:
        """The common fields of an operator request: time, reason, caller, request key.

        Raises:
            ServiceError: the reason is missing, the request_id is malformed, or this driver's
                state may be out of date.
        """
        reason, key = required_reason(request.reason), request_key(request, request.request_id)
        self.require_state()
        now_s = self.engine.clock.now_s()
        return {"now_s": now_s, "reason": reason, "actor": actor_of(context), "request": key}

    async def carried_out(self, request: Any, event: Mutation, line: str, what: str) -> str:
        """Carry out the event unless ``request`` is validate_only; returns the preview of it."""
        consequence = self.preview(event, line, what)
        if not request.validate_only:
            await self.call(event)
        return consequence

    def preview(self, event: Mutation, reason: str, what: str) -> str:
        """The outcome that the event would have: runs the core and discards the new state.

        Raises:
            ServiceError: the core would refuse the request.
        """
        _, outcome = machine.step(self.engine.state, event, self.engine.policy)
        raise_refusal(outcome)
        line = next((line for line in outcome.audit if line.reason == reason), None)
        if line is None:
            return f"nothing changes: the {what} is in that state already"
        return line.outcome

    def preview_leaving(self, event: Mutation) -> str:
        """Preview of an order to empty a node: the job leaves after a save, or at once."""
        _, outcome = machine.step(self.engine.state, event, self.engine.policy)
        raise_refusal(outcome)
        if any(line.reason == "NODE_DRAINING" for line in outcome.audit):
            return self.preview(event, "NODE_DRAINING", "node")
        return self.preview(event, "NODE_EVICTED", "node")

    async def commits(self, job: Job) -> list[driver_pb2.Checkpoint]:
        """The complete checkpoints of a job, newest first, read by a node's daemon.

        Raises:
            ServiceError: none of the daemons that were tried could read them.
        """
        nodes = [n for n in self.engine.state.nodes.values() if n.liveness is Liveness.ALIVE]
        # The job's own nodes first, in rank order: the daemon of the first node is the committer,
        # which writes the commit log and therefore has its newest record.
        slots = {node.name: job.slot_of(node.name) for node in nodes}
        nodes.sort(key=lambda node: (0, *slot.ranks) if (slot := slots[node.name]) else (1,))
        failure: ServiceError | None = None
        for node in nodes[:DAEMONS_TRIED]:
            try:
                return await self.engine.node_calls.list_commits(
                    node, job.name, job.config.checkpoint.uri
                )
            except grpc.aio.AioRpcError as error:
                failure = from_node(node.name, error)
        raise failure or UnavailableError(
            "no node is alive, so no checkpoint daemon can read the checkpoints",
            reason="NO_NODE",
        )


class Calls:
    """A group of calls about one subject; ``note`` is sent with each answer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._engine = driver.engine
        self._leader = driver.leader

    @property
    def note(self) -> str:
        """See :attr:`Driver.note`."""
        return self._driver.note


def raise_refusal(outcome: Outcome) -> None:
    """Raise the service error for the core's refusal, if there is one."""
    if outcome.refusal:
        kind, message = _REFUSALS[outcome.refusal]
        text, field = outcome.refusal_detail or message, _REFUSED_FIELDS.get(outcome.refusal)
        fields = [(field, text)] if field is not None else []
        raise kind(text, reason=outcome.refusal, fields=fields)


def expired(error: ExpiredError) -> ExpiredError:
    """The error for a resume or page token that points to lines no longer in memory."""
    remedy = "watch again without a token, and list events for what was missed"
    return ExpiredError(f"{error}: {remedy}")


def from_node(node: str, error: grpc.aio.AioRpcError) -> ServiceError:
    """Convert the error of a call to a node's agent or daemon for the driver's own caller."""
    refusal = status.read(error)
    if isinstance(refusal, (NotFoundError, RequestError, StateError, PreemptedError, LimitError)):
        text = f"node {node}: {refusal}"
        return status.of_code(
            refusal.code, "REFUSED_BY_NODE", text, fields=refusal.fields, metadata=refusal.metadata
        )
    return UnavailableError(
        f"node {node} does not answer: {error.code().name}: {error.details()}",
        reason="NODE_UNREACHABLE",
    )


def request_key(request: Message, request_id: str) -> RequestKey | None:
    """The key by which a repeated request is recognised; None without a ``request_id``."""
    if not request_id:
        return None
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable() or "/" in request_id:
        raise invalid(
            "request_id",
            "too long, or has characters that are not allowed",
            f"use at most {MAX_REQUEST_ID} printable characters without '/', preferably a UUID",
        )
    return RequestKey(
        request_id, hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    )


def checked_spec(
    request: driver_pb2.SubmitJobRequest | driver_pb2.UpdateJobRequest,
) -> JobConfig:
    """The configuration in the request; raises for one that is not valid."""
    if not request.HasField("spec"):
        raise invalid("spec", "missing", "give the job's specification")
    if request.spec.ByteSize() > MAX_SPEC_BYTES:
        problem = f"{request.spec.ByteSize()} bytes"
        raise invalid("spec", problem, f"use at most {MAX_SPEC_BYTES} bytes")
    return job_spec.from_proto(request.spec)


def required_reason(text: str) -> str:
    """The reason of a call that must have one, cut to MAX_REASON characters."""
    if not text.strip():
        raise invalid("reason", "missing", "give the reason, it goes to the audit log")
    return visible(text.strip()[:MAX_REASON])


def actor_of(context: Context) -> str:
    """The caller's name: from its certificate, else from the metadata ``megascale-actor``.

    Without either it is ``user``.
    """
    if (peer := caller()) is not None:
        return peer.name
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("megascale-actor", "user")
    return (value.decode(errors="replace") if isinstance(value, bytes) else value)[:64]


def page_size(size: int) -> int:
    """The requested page size, at most MAX_PAGE; 0 means the default."""
    if size < 0:
        raise invalid("page_size", f"{size} is negative", f"leave it out or give 1 to {MAX_PAGE}")
    return min(size or DEFAULT_PAGE, MAX_PAGE)


def first_page(names: Sequence[str], size: int) -> tuple[Sequence[str], str]:
    """The first page of ``names``, and the token of the next page: this page's last name."""
    page = names[: page_size(size)]
    return page, page[-1] if len(page) < len(names) else ""
