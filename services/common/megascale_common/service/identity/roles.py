"""Which role may call which RPC: one table of all services, used where connections are mutual TLS.

Of DriverService the protos say it: a call whose ``idempotency_level`` is NO_SIDE_EFFECTS is for
everybody who looks, any other for operators. What is not in the table nobody may call. Beside that
a role is bound to its own name: a node's agent speaks for its node alone
(:mod:`megascale_driver.service.link_service`).
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import descriptor_pb2

from megascale.v1 import driver_pb2
from megascale_common.service.identity.peers import Role

_V, _O, _D, _E, _C = Role.VIEWER, Role.OPERATOR, Role.DRIVER, Role.EXECUTOR, Role.CHECKPOINT
_LOOK = frozenset({_V, _O, _D})
_ORDER = frozenset({_O, _D})
_NODES = frozenset({_E})
_DRIVERS = frozenset({_D})
_ALL = frozenset(Role)

_DRIVER = "/megascale.v1.DriverService/"
_LINK = "/megascale.v1.ExecutorLinkService/"
_EXECUTOR = "/megascale.v1.ExecutorService/"
_CHECKPOINT = "/megascale.v1.CheckpointService/"


def _driver_methods() -> dict[str, frozenset[Role]]:
    service = driver_pb2.DESCRIPTOR.services_by_name["DriverService"]
    looks = descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS
    return {
        _DRIVER + method.name: _LOOK if method.GetOptions().idempotency_level == looks else _ORDER
        for method in service.methods
    }


ALLOWED: Mapping[str, frozenset[Role]] = {
    **_driver_methods(),
    _LINK + "Connect": _NODES,
    _LINK + "ReportSteps": _NODES,
    _LINK + "ReportSpans": _NODES,
    # Operators reach a node without a driver, too: when there is none, they need it most.
    _EXECUTOR + "GetNodeStatus": _LOOK,
    _EXECUTOR + "RunNodeDiagnostics": _ORDER,
    _EXECUTOR + "CheckGroup": _DRIVERS,
    _EXECUTOR + "TailWorkerLogs": _LOOK,
    _CHECKPOINT + "OpenAttempt": _DRIVERS,
    _CHECKPOINT + "ReportPrepared": frozenset({_C}),
    _CHECKPOINT + "WatchProgress": frozenset({_D, _E, _O}),
    _CHECKPOINT + "ListCommits": _LOOK,
    _CHECKPOINT + "CheckStorage": _ORDER,
    # What every gRPC server has.
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}


def allows(method: str, role: Role) -> bool:
    """Whether the role may call the RPC, by its full name: ``/package.Service/Method``."""
    return role in ALLOWED.get(method, frozenset())
