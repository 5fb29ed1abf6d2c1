"""Errors of the services as google.rpc.Status, with ErrorInfo, BadRequest, RetryInfo, and back."""

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
# A call's metadata has 8 KiB; gRPC drops the answer with more, and its caller never sees a reason.
# The message is in it twice, once with nine characters for one that is not ASCII; the details are
# a third longer there.
MAX_MESSAGE_BYTES, MAX_FIELDS_BYTES, MAX_FIELD_BYTES = 2000, 2200, 600


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of ``error``, cut to what the trailing metadata of a call takes."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    refused = error_details_pb2.BadRequest()
    for field, description in error.fields:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(field, MAX_FIELD_BYTES), description=_cut(description, MAX_FIELD_BYTES)
        )
        if refused.ByteSize() + violation.ByteSize() > MAX_FIELDS_BYTES:
            break  # the first ones have to be corrected before the others in any case
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
    """The error that a server put on the wire; reason UNKNOWN when it carried no details."""
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
    """An error of another service as the class of its code, ServiceError where there is none."""
    # A class without a code of its own has its parent's, and is not what the code stands for.
    kinds = {kind.code: kind for kind in ServiceError.__subclasses__() if "code" in vars(kind)}
    kind = kinds.get(code, ServiceError)
    return kind(message, reason=reason, fields=fields, metadata=metadata)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, size: int) -> str:
    """The text, cut with three dots to so many bytes as gRPC escapes them."""
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
