"""Admits a call if the role of its caller may make it and the caller makes not too many.

One table has the roles that may call each RPC; it applies to servers with mutual TLS. For
DriverService the protos decide: a call whose ``idempotency_level`` is NO_SIDE_EFFECTS is open to
viewers too, any other only to operators. An RPC that is not in the table is closed to all. A role
is also bound to its own name: a node's agent acts for its own node only
(:mod:`megascale_driver.service.link_service`).

The rate is a token bucket per peer, with a bound on the number of buckets. It keeps a faulty
program from taking a server's time from all others. Messages within a stream are not counted;
gRPC's flow control and the bounds of their readers limit those.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2

from megascale.v1 import driver_pb2
from megascale_common.service.errors import ForbiddenError, LimitError, ServiceError
from megascale_common.service.identity.peers import Peer, Role, peer_of
from megascale_common.service.status import HANDLERS, Context, abort
from megascale_job.visible import counted

_V, _O, _D, _E, _C = Role.VIEWER, Role.OPERATOR, Role.DRIVER, Role.EXECUTOR, Role.CHECKPOINT
_LOOK = frozenset({_V, _O, _D})
_ORDER = frozenset({_O, _D})
_NODES = frozenset({_E})
_DRIVERS = frozenset({_D})
_ALL = frozenset(Role)

_DRIVER = "/megascale.v1.DriverService/"
_LINK = "/megascale.v1.ExecutorLinkService/"
_EXECUTOR = "/megascale.v1.ExecutorService/"
_CHECKPOINT = "/megascale.v1.CheckpointService/"


def _driver_methods() -> dict[str, frozenset[Role]]:
    service = driver_pb2.DESCRIPTOR.services_by_name["DriverService"]
    looks = descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS
    return {
        _DRIVER + method.name: _LOOK if method.GetOptions().idempotency_level == looks else _ORDER
        for method in service.methods
    }


ALLOWED: Mapping[str, frozenset[Role]] = {
    **_driver_methods(),
    _LINK + "Connect": _NODES,
    _LINK + "ReportSteps": _NODES,
    _LINK + "ReportSpans": _NODES,
    # Operators can reach a node directly too: they need that most when there is no driver.
    _EXECUTOR + "GetNodeStatus": _LOOK,
    _EXECUTOR + "RunNodeDiagnostics": _ORDER,
    _EXECUTOR + "CheckGroup": _DRIVERS,
    _EXECUTOR + "TailWorkerLogs": _LOOK,
    _CHECKPOINT + "OpenAttempt": _DRIVERS,
    _CHECKPOINT + "ReportPrepared": frozenset({_C}),
    _CHECKPOINT + "WatchProgress": frozenset({_D, _E, _O}),
    _CHECKPOINT + "ListCommits": _LOOK,
    _CHECKPOINT + "CheckStorage": _ORDER,
    # Services of every gRPC server.
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}


def allows(method: str, role: Role) -> bool:
    """Whether the role may call the RPC with the full name ``/package.Service/Method``."""
    return role in ALLOWED.get(method, frozenset())


CALLS_PER_S = 200.0
BURST_CALLS = 1000.0
# More than the links that a driver holds. Beyond it the peer that called longest ago is forgotten,
# and has a full bucket when it returns.
MAX_PEERS = 65_536


class CallRate:
    """Rates of the calls of all peers of one server."""

    def __init__(
        self,
        calls_per_s: float = CALLS_PER_S,
        burst_calls: float = BURST_CALLS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls_per_s = calls_per_s
        self._burst_calls = burst_calls
        self._now_s = now_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # calls left, when

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, peer: str) -> None:
        """Count a call.

        Raises:
            LimitError: the peer has begun too many; it may call again after a moment.
        """
        now_s = self._now_s()
        left, at_s = self._buckets.pop(peer, (self._burst_calls, now_s))
        left = min(self._burst_calls, left + (now_s - at_s) * self._calls_per_s)
        allowed = left >= 1.0
        self._buckets[peer] = (left - 1.0 if allowed else left, now_s)
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        if not allowed:
            raise LimitError(
                f"{peer} begins more than {counted(self._calls_per_s, 'call')} a second: "
                "wait a second, and keep channels and streams open instead of calling again",
                reason="TOO_MANY_CALLS",
            )


class OpenStreams:
    """Limits the streams of one kind that are open at once, because each takes memory.

    Args:
        most_of_one: limit per caller; callers without certificates count as one caller.
        most: limit for all callers together.
    """

    def __init__(self, most_of_one: int, most: int) -> None:
        self._most_of_one = most_of_one
        self._most = most
        self._open: Counter[str] = Counter()

    def problem(self, caller: object) -> str:
        """Why the caller may not open another stream; "" if it may."""
        own, total = self._open[str(caller)], self._open.total()
        if own < self._most_of_one and total < self._most:
            return ""
        return (
            f"{total} of such streams are open here, {own} of them are yours: one caller may "
            f"have {self._most_of_one} and all together {self._most}; close some"
        )

    @contextlib.contextmanager
    def one_more(self, caller: object) -> Iterator[None]:
        """Count one more stream while the block lasts."""
        self._open[str(caller)] += 1
        try:
            yield
        finally:
            self._open[str(caller)] -= 1
            self._open += Counter()  # drops callers without streams


_caller: ContextVar[Peer | None] = ContextVar("caller", default=None)


def caller() -> Peer | None:
    """The caller of the present call; None if callers show no certificate."""
    return _caller.get()


async def of_certificate(context: Context) -> Peer:
    """The caller by its certificate; raises ForbiddenError for one without an identity."""
    return peer_of(context.auth_context())


class Gate(grpc.aio.ServerInterceptor):
    """Checks role and rate of each caller.

    ``identify`` finds the caller: :func:`of_certificate` for servers with mutual TLS.
    """

    def __init__(
        self,
        identify: Callable[[Context], Awaitable[Peer]] = of_certificate,
        rate: CallRate | None = None,
    ) -> None:
        self._identify = identify
        self._rate = CallRate() if rate is None else rate

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make, name = HANDLERS[bool(handler.request_streaming), bool(handler.response_streaming)]
        inner = getattr(handler, name)
        wrapped = self._guarded(handler_call_details.method, inner)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _guarded(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def enter(context: Context) -> None:
            try:
                peer = await self._identify(context)
                self._rate.take(str(peer))
                if not allows(method, peer.role):
                    raise _refusal(method, peer)
            except ServiceError as error:
                await abort(context, error)
            _caller.set(peer)

        if inspect.isasyncgenfunction(inner):

            async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
                await enter(context)
                async for answer in inner(request, context):
                    yield answer

            return generate

        async def answer(request: Any, context: Context) -> Any:
            await enter(context)
            return await inner(request, context)

        return answer


def _refusal(method: str, peer: Peer) -> ForbiddenError:
    roles = ", ".join(sorted(ALLOWED.get(method, ()))) or "none"
    name = method.rpartition("/")[2]
    return ForbiddenError(
        f"{peer} may not call {name}: it needs the role {roles}",
        reason="ROLE_NOT_ALLOWED",
        metadata={"role": peer.role, "method": method},
    )
