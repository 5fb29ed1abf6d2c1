"""Decorators for the methods of a gRPC service: all errors reach the wire in one style.

:mod:`megascale_common.service.errors` has the table. An exception that is not in it is INTERNAL on
the wire, and its traceback is in the service's log.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from megascale_common.service import logs
from megascale_common.service.errors import ServiceError, on_the_wire
from megascale_common.service.status import abort
from megascale_job.problems import JobError

Answer = TypeVar("Answer")
Context = grpc.aio.ServicerContext[Any, Any]
# In the trailing metadata of an answer: the service's attribute ``note``, where it has one.
NOTE_KEY = "megascale-note"
_log = logs.get(__name__)


def answers(
    method: Callable[[Any, Any, Context], Awaitable[Answer]],
) -> Callable[[Any, Any, Context], Awaitable[Answer]]:
    """For methods that return one response."""

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
    """For methods that return a stream of responses."""

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
