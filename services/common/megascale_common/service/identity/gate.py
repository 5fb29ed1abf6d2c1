"""Lets a call in when the role of its caller may make it, and the caller has not made too many.

Who calls is in the certificate, or found by a token. Both are known only within a call, so the gate
wraps each handler, in the shape that the handler has: unary or stream on each side, a coroutine
that writes or a generator that yields.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from megascale_common.service.errors import ForbiddenError, ServiceError
from megascale_common.service.identity.peers import Peer, peer_of
from megascale_common.service.identity.rates import CallRate
from megascale_common.service.identity.roles import ALLOWED, allows
from megascale_common.service.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
_MAKE = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}
_caller: ContextVar[Peer | None] = ContextVar("caller", default=None)


def caller() -> Peer | None:
    """Who makes the present call; None where callers show no certificate."""
    return _caller.get()


async def of_certificate(context: Context) -> Peer:
    """The caller by its certificate; raises ForbiddenError for one without identity."""
    return peer_of(context.auth_context())


class Gate(grpc.aio.ServerInterceptor):
    """Asks each caller for its role.

    ``identify`` finds who calls: :func:`of_certificate` for servers with mutual TLS.
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
        make, name = _MAKE[bool(handler.request_streaming), bool(handler.response_streaming)]
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
    roles = ", ".join(sorted(ALLOWED.get(method, ()))) or "nobody"
    name = method.rpartition("/")[2]
    return ForbiddenError(
        f"{peer} may not call {name}: it needs the role {roles}",
        reason="ROLE_NOT_ALLOWED",
        metadata={"role": peer.role, "method": method},
    )
