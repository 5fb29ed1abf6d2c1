"""Decorators for the methods of DriverService, and streams that can be ended from outside.

``answers`` and ``streams`` turn an RpcError into the status on the wire, and an unexpected
exception into INTERNAL with a line in the driver's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from megascale_common.service import logs
from megascale_common.service.errors import RpcError, abort

Answer = TypeVar("Answer")
Context = grpc.aio.ServicerContext[Any, Any]
_log = logs.get(__name__)


def answers(
    method: Callable[[Any, Any, Context], Awaitable[Answer]],
) -> Callable[[Any, Any, Context], Awaitable[Answer]]:
    """For methods that return one response."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> Answer:
        try:
            return await method(self, request, context)
        except RpcError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            _log.exception("a call failed", call=method.__name__)
            await abort(
                context,
                RpcError(
                    grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; see the driver's log"
                ),
            )

    return handler


def streams(
    method: Callable[[Any, Any, Context], AsyncIterator[Answer]],
) -> Callable[[Any, Any, Context], AsyncIterator[Answer]]:
    """For methods that return a stream of responses."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> AsyncIterator[Answer]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except RpcError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            _log.exception("a call failed", call=method.__name__)
            await abort(
                context,
                RpcError(
                    grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; see the driver's log"
                ),
            )

    return handler


def invalid(field: str, problem: str) -> RpcError:
    """The error of a request with a wrong field."""
    return RpcError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BAD_REQUEST",
        f"{field}: {problem}",
        fields=[(field, problem)],
    )


async def until_set(event: asyncio.Event, answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
    """Pass ``answers`` on until they end or ``event`` is set, whatever they wait for then."""
    ended = asyncio.ensure_future(event.wait())
    coming: asyncio.Future[Answer] | None = None
    try:
        while not ended.done():
            # A task of its own: the wait for the next answer may last for ever, and it is abandoned
            # when the event comes first.
            coming = asyncio.ensure_future(anext(answers))
            await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            try:
                answer = coming.result()
            except StopAsyncIteration:
                return
            yield answer
    finally:
        ended.cancel()
        if coming is not None and not coming.done():
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming
