"""All errors that a call can raise, as one tree.

    MegascaleError
    ├── InvalidRequest      an argument is refused; ``problems`` lists the fields
    │   └── InvalidJob      the job is refused; ``problems`` lists fields and remedies
    ├── NotFound            no such job, node, rank or attempt
    ├── AlreadyExists       the name is taken
    ├── NotPossible         it is in no state for this (FAILED_PRECONDITION, ABORTED)
    ├── NotAllowed          no valid token, or not the role for it
    ├── DamagedCheckpoint   a file of a checkpoint is not what was committed
    ├── LimitReached        a bound of the service is reached; later it may work
    ├── TimedOut            what was waited for has not happened in the time given
    ├── Unavailable         no driver answered within the time allowed for retries
    │   └── ClusterNotFound no cluster in the run folder
    └── ServiceFailure      the service failed; the message is the service's

`from_rpc` maps google.rpc.Status (code, ErrorInfo, BadRequest) to this tree, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.rpc import error_details_pb2

if TYPE_CHECKING:  # not at the start of the command line, of which it would be a fifth
    import grpc.aio

# Key of ErrorInfo.metadata in which a standby driver names the leader's address.
LEADER_KEY = "leader"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One refused field: its dotted path, what is wrong, and what to do (may be empty)."""

    field: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: {self.problem}" if self.field else self.problem
        return f"{text}; {self.remedy}" if self.remedy else text


class MegascaleError(Exception):
    """Root of the tree. ``reason`` is the stable UPPER_SNAKE reason of ErrorInfo, or empty."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRequest(MegascaleError):
    """An argument is refused; ``problems`` lists the refused fields, if the service sent them."""

    def __init__(
        self, message: str, *, problems: Iterable[FieldProblem] = (), reason: str = ""
    ) -> None:
        super().__init__(message, reason=reason)
        self.problems = tuple(problems)


class InvalidJob(InvalidRequest):
    """The job is refused; ``problems`` lists the refused fields, each with the reason."""

    def __init__(
        self, problems: Iterable[FieldProblem], *, source: str = "", reason: str = ""
    ) -> None:
        listed = tuple(problems)
        head = f"{source}: the job is refused" if source else "the job is refused"
        super().__init__(
            "\n  ".join([f"{head}:", *map(str, listed)]), problems=listed, reason=reason
        )
        self.source = source


class NotFound(MegascaleError):
    """No such job, node, rank or attempt."""


class AlreadyExists(MegascaleError):
    """The name is taken."""


class NotPossible(MegascaleError):
    """The thing is in no state for this call."""


class NotAllowed(MegascaleError):
    """No valid cluster token, or not the role for this call."""


class DamagedCheckpoint(MegascaleError):
    """A file of a checkpoint is not what was committed; the message names it."""


class LimitReached(MegascaleError):
    """A bound of the service is reached."""


class TimedOut(MegascaleError, TimeoutError):
    """What was waited for has not happened in the time given."""


class Unavailable(MegascaleError):
    """No driver answered within the time allowed for retries."""


class ClusterNotFound(Unavailable):
    """There is no cluster in the run folder."""


class ServiceFailure(MegascaleError):
    """The service failed."""


_BY_CODE: dict[str, type[MegascaleError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": NotPossible,
    "ABORTED": NotPossible,
    "UNAUTHENTICATED": NotAllowed,
    "PERMISSION_DENIED": NotAllowed,
    "RESOURCE_EXHAUSTED": LimitReached,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": Unavailable,
}


@dataclass(frozen=True, slots=True)
class RpcDetails:
    """What a failed call carries beside its code.

    ``leader`` is the leader's address, empty if there is no hint; ``problems`` are refused fields.
    """

    reason: str = ""
    leader: str = ""
    problems: tuple[FieldProblem, ...] = ()

    @property
    def from_a_node(self) -> bool:
        """Whether the driver answered, and a node that it called did not."""
        return self.reason == "NODE_UNREACHABLE"


class CallFailed(Exception):
    """A failed call, which is retried or becomes an error of the tree (:func:`from_rpc`).

    Attributes:
        code: name of the gRPC status code.
        message: the service's text, or the code.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code().name
        self.message = error.details() or self.code
        self.details = _details_of(error)
        super().__init__(self.message)


def _details_of(error: grpc.aio.AioRpcError) -> RpcDetails:
    """The google.rpc details of a failed call; empty if the server sent none."""
    from grpc_status import rpc_status

    try:
        # types-grpcio has only the synchronous call; an AioRpcError has the same three methods.
        status = rpc_status.from_call(error)
    except ValueError:  # the status contradicts the call's code: use the code alone
        status = None
    if status is None:
        return RpcDetails()
    reason, leader = "", ""
    problems: list[FieldProblem] = []
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if packed.Unpack(info):
            reason, leader = info.reason, info.metadata.get(LEADER_KEY, "")
        elif packed.Unpack(bad):
            problems += map(_problem, bad.field_violations)
    return RpcDetails(reason, leader, tuple(problems))


def _problem(violation: error_details_pb2.BadRequest.FieldViolation) -> FieldProblem:
    return _described(violation.field, violation.description)


def _described(field: str, description: str) -> FieldProblem:
    # A service describes a field as "problem; remedy".
    problem, _, remedy = description.partition("; ")
    return FieldProblem(field, problem, remedy or "give another value")


def from_rpc(error: CallFailed) -> MegascaleError:
    """The error of this tree for a failed call."""
    details = error.details
    if error.code == "INVALID_ARGUMENT" and details.problems:
        text = "; ".join(map(str, details.problems))
        return InvalidRequest(text, problems=details.problems, reason=details.reason)
    return _BY_CODE.get(error.code, ServiceFailure)(error.message, reason=details.reason)


def from_service(error: Exception) -> MegascaleError | None:
    """The error of this tree for one that a service's own code raised in this process.

    Such an error has a ``reason`` and may have the name of a gRPC code as ``code``, and ``fields``
    that are refused; without a code, as for a file that cannot be read, it is an InvalidRequest.
    None for any other exception, which is a defect.
    """
    reason, code = getattr(error, "reason", None), getattr(error, "code", None)
    if isinstance(error, MegascaleError):
        return error
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return InvalidRequest(f"{where}{error.strerror or error}", reason="FILE")
    if not isinstance(reason, str):
        return None
    if isinstance(code, str):
        kind = _BY_CODE.get(code, ServiceFailure)
        if issubclass(kind, InvalidRequest):
            fields = getattr(error, "fields", ())
            problems = [_described(field, description) for field, description in fields]
            return kind(str(error), problems=problems, reason=reason)
        return kind(str(error), reason=reason)
    return InvalidRequest(str(error), reason=reason)
