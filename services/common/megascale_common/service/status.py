"""Errors of the services as google.rpc.Status, with ErrorInfo and BadRequest, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from megascale_common.service.errors import ServiceError

DOMAIN = "megascale.v1"


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of ``error``."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            for field, description in error.fields
        ]
        details.append(_packed(error_details_pb2.BadRequest(field_violations=violations)))
    number = code_pb2.Code.Value(error.code)
    return status_pb2.Status(code=number, message=error.message, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End the call with ``error`` and its details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def read(error: grpc.aio.AioRpcError) -> ServiceError:
    """The error that a server put on the wire; reason UNKNOWN when it carried no details."""
    metadata: dict[str, str] = {}
    fields: list[tuple[str, str]] = []
    reason = "UNKNOWN"
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for item in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad = error_details_pb2.BadRequest()
            if item.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif item.Unpack(bad):
                fields = [(v.field, v.description) for v in bad.field_violations]
    message = error.details() or ""
    return of_code(error.code().name, reason, message, metadata=metadata, fields=fields)


def of_code(
    code: str,
    reason: str,
    message: str,
    *,
    fields: Sequence[tuple[str, str]] = (),
    metadata: Mapping[str, str] | None = None,
) -> ServiceError:
    """An error of another service as the class of its code, ServiceError where there is none."""
    # A class without a code of its own has its parent's, and is not what the code stands for.
    kinds = {kind.code: kind for kind in ServiceError.__subclasses__() if "code" in vars(kind)}
    kind = kinds.get(code, ServiceError)
    return kind(message, reason=reason, fields=fields, metadata=metadata)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
