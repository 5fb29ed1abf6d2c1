"""Errors of the services on the wire: google.rpc.Status with ErrorInfo, BadRequest for fields.

``reason`` of the ErrorInfo is stable for programs; the message is one sentence for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "megascale.v1"


class RpcError(Exception):
    """An error that a handler raises and that :func:`abort` puts on the wire.

    ``fields`` are (path, description) pairs for BadRequest; ``metadata`` goes into the ErrorInfo.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        fields: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.fields = tuple(fields)

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status of this error."""
        info = error_details_pb2.ErrorInfo(
            reason=self.reason, domain=DOMAIN, metadata=self.metadata
        )
        details = [_packed(info)]
        if self.fields:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
                for field, description in self.fields
            ]
            details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
        number = code_pb2.Code.Value(self.code.name)
        return status_pb2.Status(code=number, message=self.message, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RpcError) -> NoReturn:
    """End the call with ``error`` and its details."""
    status = rpc_status.to_status(error.to_status())
    await context.abort(status.code, status.details, status.trailing_metadata)


def read(error: grpc.aio.AioRpcError) -> RpcError:
    """The error that a server put on the wire; reason UNKNOWN when it carried no details."""
    details: dict[str, Any] = {}
    fields: list[tuple[str, str]] = []
    reason = "UNKNOWN"
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for item in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad = error_details_pb2.BadRequest()
            if item.Unpack(info):
                reason, details = info.reason, dict(info.metadata)
            elif item.Unpack(bad):
                fields = [
                    (violation.field, violation.description) for violation in bad.field_violations
                ]
    return RpcError(error.code(), reason, error.details() or "", metadata=details, fields=fields)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
