"""Puts errors on the wire as google.rpc.Status, for handlers and for unreadable requests.

A Status carries ErrorInfo, BadRequest and RetryInfo. The decorators give the methods of a gRPC
service one style of error, by the table in :mod:`megascale_common.service.errors`. An exception
that is not in it is INTERNAL on the wire, and its traceback is in the service's log.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from megascale_common.service import logs
from megascale_common.service.errors import RequestError, ServiceError, on_the_wire
from megascale_job.problems import JobError

DOMAIN = "megascale.v1"
# A call's metadata may have 8 KiB; beyond that gRPC drops the answer, and the caller never sees a
# reason. The message is in the metadata twice, once with up to nine characters for a character that
# is not ASCII; the details become a third longer.
MAX_MESSAGE_BYTES, MAX_FIELDS_BYTES, MAX_FIELD_BYTES = 2000, 2200, 600


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of ``error``, cut to fit into the trailing metadata of a call."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    refused = error_details_pb2.BadRequest()
    for field, description in error.fields:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(field, MAX_FIELD_BYTES), description=_cut(description, MAX_FIELD_BYTES)
        )
        if refused.ByteSize() + violation.ByteSize() > MAX_FIELDS_BYTES:
            break  # the caller has to correct the first ones in any case
        refused.field_violations.append(violation)
    if error.fields:
        details.append(_packed(refused))
    if error.retry_after_s > 0:
        wait = error_details_pb2.RetryInfo()
        wait.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(wait))
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End the call with ``error`` and its details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def read(error: grpc.aio.AioRpcError) -> ServiceError:
    """The error that a server put on the wire; reason UNKNOWN if it carried no details."""
    metadata: dict[str, str] = {}
    fields: list[tuple[str, str]] = []
    reason, retry_after_s = "UNKNOWN", 0.0
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for item in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad = error_details_pb2.BadRequest()
            wait = error_details_pb2.RetryInfo()
            if item.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif item.Unpack(bad):
                fields = [(v.field, v.description) for v in bad.field_violations]
            elif item.Unpack(wait):
                retry_after_s = wait.retry_delay.ToNanoseconds() / 1e9
    found = of_code(
        error.code().name, reason, error.details() or "", metadata=metadata, fields=fields
    )
    found.retry_after_s = retry_after_s
    return found


def of_code(
    code: str,
    reason: str,
    message: str,
    *,
    fields: Sequence[tuple[str, str]] = (),
    metadata: Mapping[str, str] | None = None,
) -> ServiceError:
    """An error of another service as the class of its code, or else ServiceError."""
    # A class without a code of its own inherits its parent's and does not represent it.
    kinds = {kind.code: kind for kind in ServiceError.__subclasses__() if "code" in vars(kind)}
    kind = kinds.get(code, ServiceError)
    return kind(message, reason=reason, fields=fields, metadata=metadata)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, size: int) -> str:
    """The text, cut with three dots to at most ``size`` bytes after gRPC's escaping."""
    if _escaped_bytes(text) <= size:
        return text
    kept = text[: size - 3]
    while _escaped_bytes(kept) > size - 3:
        kept = kept[: min(len(kept) - 1, len(kept) * size // _escaped_bytes(kept))]
    return f"{kept}..."


def _escaped_bytes(text: str) -> int:
    """Bytes of the text in a header: %XX for each byte that is not printable ASCII, and for %."""
    plain = sum(" " <= char <= "~" and char != "%" for char in text)
    return plain + 3 * (len(text.encode(errors="replace")) - plain)


Context = grpc.aio.ServicerContext[Any, Any]
# By request and response streaming: how gRPC makes a handler, and the attribute with its function.
HANDLERS = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


class _Unreadable(Exception):
    """A request cannot be parsed as the method's type."""


class RequestReader(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT, BAD_MESSAGE to requests that cannot be read."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Parse requests in place of gRPC; a handler that takes bytes parses them itself."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        make, name = HANDLERS[bool(handler.request_streaming), bool(handler.response_streaming)]
        read = _reader(handler.request_deserializer, several=bool(handler.request_streaming))
        return make(_reading(getattr(handler, name), read), None, handler.response_serializer)


def _reader(deserialize: Callable[[bytes], Any], *, several: bool) -> Callable[[Any], Any]:
    """A function from the bytes of a request to the request, or from a stream to a stream."""

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


Answer = TypeVar("Answer")
# Trailing metadata of an answer: the service's attribute ``note``, if it has one.
NOTE_KEY = "megascale-note"
_log = logs.get(__name__)


def answers(
    method: Callable[[Any, Any, Context], Awaitable[Answer]],
) -> Callable[[Any, Any, Context], Awaitable[Answer]]:
    """Decorates methods that return one response."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> Answer:
        try:
            answer = await method(self, request, context)
            if note := getattr(self, "note", ""):
                text = note.encode("ascii", "replace").decode()
                context.set_trailing_metadata(((NOTE_KEY, text),))
            return answer
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _fail(context, method.__name__, error)

    return handler


def streams(
    method: Callable[[Any, Any, Context], AsyncIterator[Answer]],
) -> Callable[[Any, Any, Context], AsyncIterator[Answer]]:
    """Decorates methods that return a stream of responses."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> AsyncIterator[Answer]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _fail(context, method.__name__, error)

    return handler


async def _fail(context: Context, call: str, error: Exception) -> NoReturn:
    if not isinstance(error, (ServiceError, JobError)):
        _log.error("a call failed", call=call, exc_info=error)
    await abort(context, on_the_wire(error))
