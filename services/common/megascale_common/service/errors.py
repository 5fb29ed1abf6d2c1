"""Errors of the services: one tree, which also maps each error to its form on the wire.

The class determines the gRPC code, ``reason`` (of google.rpc.ErrorInfo) is stable for programs, and
the message is for people: the fact, the field, the remedy. A service raises these errors, and
:mod:`megascale_common.service.status` puts them on the wire.

This module does not import grpc, because the agent imports it before it sets the environment
variables that gRPC reads at import.

    ServiceError                   INTERNAL, INTERNAL: something failed in the service
    ├── RequestError               INVALID_ARGUMENT, BAD_REQUEST: an argument is refused
    │   ├── OptionError            BAD_OPTION: an option on a service's command line
    │   ├── AssignmentError        BAD_ASSIGNMENT: an assignment that contradicts the node
    │   └── ClusterError           CLUSTER: a local cluster cannot start or continue
    ├── ExpiredError               OUT_OF_RANGE, TOKEN_EXPIRED: a token's position is gone
    ├── NotFoundError              NOT_FOUND, NOT_FOUND: no such job, node, file or attempt
    ├── ExistsError                ALREADY_EXISTS, EXISTS: the name is taken
    ├── StateError                 FAILED_PRECONDITION, WRONG_STATE: not in a state for this
    │   ├── SupersededError        SUPERSEDED: a later attempt was opened
    │   ├── StaleStateError        STALE_STATE: a desired state of an ended term
    │   └── UnusableError          UNUSABLE: no checkpoint of the job can be restored
    ├── PreemptedError             ABORTED, PREEMPTED: ended for work of higher priority
    ├── LimitError                 RESOURCE_EXHAUSTED, LIMIT: no room, or a limit is reached
    ├── UnauthenticatedError       UNAUTHENTICATED, NO_TOKEN: no valid cluster token
    ├── ForbiddenError             PERMISSION_DENIED, FORBIDDEN: no permission
    ├── UnavailableError           UNAVAILABLE, UNAVAILABLE: not now, try again
    │   ├── NotLeaderError         NOT_LEADER: another driver leads, or none
    │   ├── NotReadyError          NOT_READY: it may be known soon
    │   └── LinkError              LINK: the driver's link cannot be used
    ├── TimedOutError              DEADLINE_EXCEEDED, TIMED_OUT: the other side took too long
    ├── DataLossError              DATA_LOSS, DATA_LOSS: stored data cannot be read
    │   ├── DamagedError           DAMAGED: a file or slot has other bytes than were written
    │   │   └── MissingFileError   MISSING_FILE: a file is gone
    │   ├── NewerVersionError      NEWER_VERSION: a newer build wrote it
    │   └── CodecError             BAD_STORED_VALUE: a value in etcd
    ├── CoverageError              NOT_COVERED: pieces do not cover a tensor
    ├── TemplateError              TEMPLATE: the template process failed
    └── DeviceQueryError           DEVICE_QUERY: the devices cannot be listed

A class without a code of its own has its parent's. The reason shown is the class's default. On the
wire (:func:`on_the_wire`) a JobError is INVALID_ARGUMENT with reason BAD_JOB_SPEC and its fields,
and any other exception is a defect: INTERNAL, without details.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from megascale_job.problems import JobError


class ServiceError(Exception):
    """The root. ``fields`` are (path, description) pairs; ``metadata`` goes into the ErrorInfo.

    ``retry_after_s``: seconds after which the caller should try again (RetryInfo); 0: unspecified.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        fields: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.fields = tuple(fields)
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class RequestError(ServiceError):
    """An argument is refused; ``fields`` lists the refused ones, if single fields are."""

    code = "INVALID_ARGUMENT"
    default_reason = "BAD_REQUEST"


class OptionError(RequestError):
    """An option on a service's command line is refused."""

    default_reason = "BAD_OPTION"


class AssignmentError(RequestError):
    """The driver's assignment does not fit this node."""

    default_reason = "BAD_ASSIGNMENT"


class ExpiredError(ServiceError):
    """A resume or page token names a position that is no longer held."""

    code = "OUT_OF_RANGE"
    default_reason = "TOKEN_EXPIRED"


class NotFoundError(ServiceError):
    """The requested object does not exist."""

    code = "NOT_FOUND"
    default_reason = "NOT_FOUND"


class ExistsError(ServiceError):
    """The name is taken."""

    code = "ALREADY_EXISTS"
    default_reason = "EXISTS"


class StateError(ServiceError):
    """The object exists, but its state does not allow the request."""

    code = "FAILED_PRECONDITION"
    default_reason = "WRONG_STATE"


class SupersededError(StateError):
    """A later attempt of the job was opened, so this one can no longer commit anything."""

    default_reason = "SUPERSEDED"


class StaleStateError(StateError):
    """A desired state from a driver whose term has ended."""

    default_reason = "STALE_STATE"


class UnusableError(StateError):
    """No checkpoint of the job can be restored, and the job must not start over by itself."""

    default_reason = "UNUSABLE"


class PreemptedError(ServiceError):
    """The call was ended for something of higher priority."""

    code = "ABORTED"
    default_reason = "PREEMPTED"


class LimitError(ServiceError):
    """There is no room, or a limit is reached."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "LIMIT"


class UnauthenticatedError(ServiceError):
    """The call carries no valid cluster token."""

    code = "UNAUTHENTICATED"
    default_reason = "NO_TOKEN"


class ForbiddenError(ServiceError):
    """The caller, or the user that the service runs as, lacks the permission."""

    code = "PERMISSION_DENIED"
    default_reason = "FORBIDDEN"


class UnavailableError(ServiceError):
    """The request cannot be served now; the same call can succeed later."""

    code = "UNAVAILABLE"
    default_reason = "UNAVAILABLE"


class NotLeaderError(UnavailableError):
    """This driver is not the leader, or no longer."""

    default_reason = "NOT_LEADER"


class NotReadyError(UnavailableError):
    """The answer is not known yet, but may be soon."""

    default_reason = "NOT_READY"


class LinkError(UnavailableError):
    """The driver cannot be reached, or its link cannot be used."""

    default_reason = "LINK"


class TimedOutError(ServiceError):
    """The other side took longer than the call allows."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "TIMED_OUT"


class DataLossError(ServiceError):
    """Stored data cannot be read."""

    code = "DATA_LOSS"
    default_reason = "DATA_LOSS"


class NewerVersionError(DataLossError):
    """A newer build wrote the stored data, so this one must neither read it nor append to it."""

    default_reason = "NEWER_VERSION"


class DamagedError(DataLossError):
    """``file`` is missing, truncated, or has other bytes than were written."""

    default_reason = "DAMAGED"

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}", metadata={"file": file} if file else None)
        self.file = file
        self.problem = problem


class MissingFileError(DamagedError):
    """``file`` does not exist."""

    default_reason = "MISSING_FILE"


class CodecError(DataLossError):
    """A stored value does not have the form that this build reads."""

    default_reason = "BAD_STORED_VALUE"


class CoverageError(ServiceError):
    """The pieces of a checkpoint do not cover what a rank needs."""

    default_reason = "NOT_COVERED"


class ClusterError(RequestError):
    """A local cluster cannot start or continue in this environment."""

    default_reason = "CLUSTER"


class TemplateError(ServiceError):
    """The template process ended, or did not carry out a request."""

    default_reason = "TEMPLATE"


class DeviceQueryError(ServiceError):
    """The devices of this host cannot be listed."""

    default_reason = "DEVICE_QUERY"


def invalid(field: str, problem: str, remedy: str) -> RequestError:
    """The refusal of one field of a request."""
    description = _description(problem, remedy)
    return RequestError(f"{field}: {description}", fields=[(field, description)])


def on_the_wire(error: Exception) -> ServiceError:
    """``error`` as an error of the tree; a defect becomes INTERNAL without details."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, JobError):
        fields = [(p.field, _description(p.problem, p.remedy)) for p in error.problems]
        return RequestError(str(error), reason="BAD_JOB_SPEC", fields=fields)
    return ServiceError("internal error; see the service's log")


def _description(problem: str, remedy: str) -> str:
    """Description of a refused field in BadRequest; clients read the text after "; " as remedy."""
    return f"{problem.replace('; ', ', ')}; {remedy}"
