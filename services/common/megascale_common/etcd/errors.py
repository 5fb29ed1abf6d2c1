"""The errors of the etcd client: one small tree, mapped from gRPC status codes.

A caller needs to know whether a write happened. Every class except ``UnknownOutcome`` means that
the failed call changed nothing.
"""

from __future__ import annotations

import grpc


class EtcdError(Exception):
    """Base of all errors of the client; the class itself is any other refusal by the server."""


class EtcdUnavailable(EtcdError):
    """No endpoint answered in time. The call was not sent, or it was a read."""


class UnknownOutcome(EtcdError):
    """A write was sent and no answer came, so it may or may not have been applied.

    Settle it with ``megascale_common.etcd.settled.txn_settled``, never with a plain read: see Note
    [Settle by resubmission] there.
    """


class InvalidEtcdRequest(EtcdError):
    """The request is wrong: fix the caller."""


class AccessDenied(EtcdError):
    """etcd's authentication or authorisation refused the call."""


class ResourceExhausted(EtcdError):
    """Quota exceeded (NOSPACE), too many requests, or a message over the size limit."""


class LeaseNotFound(EtcdError):
    """The lease has expired, was revoked, or never existed."""


class Compacted(EtcdError):
    """History before ``compact_revision`` was discarded.

    List again, and watch from the listing's revision + 1. ``compact_revision`` is 0 if the server
    does not report it (range requests).
    """

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


# For these codes the server read the request, refused it and changed nothing. For any other code
# the outcome of a write is unknown.
_REFUSALS: dict[grpc.StatusCode, type[EtcdError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidEtcdRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidEtcdRequest,
    grpc.StatusCode.UNIMPLEMENTED: InvalidEtcdRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidEtcdRequest,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: EtcdError,
    grpc.StatusCode.NOT_FOUND: EtcdError,
    # Only for "corrupt cluster": while the alarm CORRUPT is raised, no member applies writes.
    grpc.StatusCode.DATA_LOSS: EtcdError,
}
_OWN_WORDS = "etcdserver: "


def refusal(error: grpc.aio.AioRpcError, what: str) -> EtcdError | None:
    """The typed error for a definite refusal of call ``what``; None if the outcome is unknown."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseNotFound(f"{what}: {details}")
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return Compacted(f"{what}: {details}")
    kind = _REFUSALS.get(code)
    return None if kind is None else kind(f"{what}: {code.name}: {details}")


def answer_of(error: grpc.aio.AioRpcError) -> str:
    """The code of a failed call, and etcd's own words if it sent some."""
    code, details = error.code().name, error.details() or ""
    return f"{code}: {details}" if details.startswith(_OWN_WORDS) else code


def own_words(error: EtcdError) -> str:
    """Etcd's own words in an error, without the call and the code; "" without any."""
    _, found, words = str(error).rpartition(_OWN_WORDS)
    return words if found else ""
