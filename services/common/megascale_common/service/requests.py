"""Reads the requests of calls, so that one that cannot be read gets a clear answer.

gRPC reads a request before its handler runs. What fails there is INTERNAL or UNKNOWN with the name
of an exception, and a traceback in the log, though nothing is wrong in the service.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from megascale_common.service.errors import RequestError
from megascale_common.service.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
_MAKE = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


class _Unreadable(Exception):
    """A request is not of the method's type."""


class RequestReader(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT, BAD_MESSAGE to requests that cannot be read."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Read in place of gRPC; a handler that takes bytes reads them itself."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        make, name = _MAKE[bool(handler.request_streaming), bool(handler.response_streaming)]
        read = _reader(handler.request_deserializer, several=bool(handler.request_streaming))
        return make(_reading(getattr(handler, name), read), None, handler.response_serializer)


def _reader(deserialize: Callable[[bytes], Any], *, several: bool) -> Callable[[Any], Any]:
    """From the bytes of a request to the request, or from a stream of them to a stream."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            raise _Unreadable from None

    async def read_each(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield read(data)

    return read_each if several else read


def _reading(inner: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(inner):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async for answer in inner(read(request), context):
                    yield answer
            except _Unreadable:
                await abort(context, _refusal())

        return generate

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await inner(read(request), context)
        except _Unreadable:
            await abort(context, _refusal())

    return answer


def _refusal() -> RequestError:
    return RequestError(
        "the request is not a message of this method: build it from the protos of this release",
        reason="BAD_MESSAGE",
    )
