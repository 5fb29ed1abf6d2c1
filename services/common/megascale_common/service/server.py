"""The gRPC server of every service: options, TLS, access, health and reflection.

A server binds to loopback unless it has TLS, and even there every call needs the cluster token
(:mod:`megascale_common.service.channel`). With an authority of the cluster (``--tls-ca``) callers
present a certificate of it instead, whose role decides what they may call
(:mod:`megascale_common.service.identity`). Health and reflection need a token or certificate too,
so that a stranger on the host learns nothing.

Note [Connections and descriptors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A connection takes a file descriptor before the server knows its caller, so strangers could use them
up, and the process could then open neither its log nor etcd. So connections that do not complete
their handshake, or make no call, end after a while, and their number is limited to less than the
process's descriptors. gRPC cannot limit them per address.
"""

from __future__ import annotations

import hmac
import resource
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from megascale_common.node.addresses import is_loopback, joined, split
from megascale_common.service.channel import MAX_MESSAGE_BYTES
from megascale_common.service.errors import OptionError, UnauthenticatedError
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.gate import CallRate, Gate
from megascale_common.service.identity.peers import HEADER, bearer, check_token
from megascale_common.service.identity.people import People
from megascale_common.service.start import require_bindable
from megascale_common.service.status import RequestReader, abort

HANDSHAKE_TIMEOUT_S = 20.0  # for TLS and the first frame of HTTP/2, while all nodes connect at once
IDLE_TIMEOUT_S = 300.0  # without a call; a client that calls again reconnects by itself
WANTED_DESCRIPTORS = 65_536
OWN_DESCRIPTORS = 1024  # reserved for the process: logs, etcd, nodes that it calls

# Both sides agree on pings: without these options a client's keepalive ends in GOAWAY
# too_many_pings.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


def most_connections(people: bool) -> int:
    """Limit on a server's connections, after raising the process's limit of descriptors.

    See Note [Connections and descriptors]. ``people``: the limit for the port for people, which is
    the second port of a process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED_DESCRIPTORS:
        soft = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
        soft = min(soft, WANTED_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limit = WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    usable = limit - min(OWN_DESCRIPTORS, limit // 2)
    return usable // 4 if people else usable - usable // 4


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry ``authorization: Bearer <token>``.

    Raises:
        ValueError: the token is too short to protect anything.
    """

    def __init__(self, token: str) -> None:
        check_token(token)
        self._expected = bearer(token).encode()

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort(
                context,
                UnauthenticatedError(
                    "the call carries no valid cluster token; send metadata "
                    "'authorization: Bearer TOKEN' (the token is in the file `token` of the "
                    "cluster's run folder)"
                ),
            )

        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Pass the call on when its token is right."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get(HEADER, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return self._refusal_for(handler)

    def _refusal_for(
        self, handler: grpc.RpcMethodHandler[Any, Any] | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        # The refusal has the form of the refused call's answer (one response or a stream), or the
        # caller of a stream would wait. It reads no request, so that a stranger who sends none is
        # refused too.
        if handler is not None and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        return grpc.stream_unary_rpc_method_handler(self._refuse)


class RpcServer:
    """A gRPC server with health, reflection, and the check of token or certificate.

    Use: construct, register servicers on :attr:`server`, ``start``.

    Args:
        insecure_network: the operator has declared the network safe from eavesdroppers.
        people: callers are people with tokens of their own; the cluster's token is not accepted.
        rate: limit on the calls of one identified caller; None: the default.
    """

    def __init__(
        self,
        token: str,
        *,
        tls: Certificates | None = None,
        insecure_network: bool = False,
        people: People | None = None,
        rate: CallRate | None = None,
    ) -> None:
        gate: grpc.aio.ServerInterceptor
        if people is not None:
            gate = Gate(people, rate)
        else:
            mutual = tls is not None and tls.mutual
            gate = Gate(rate=rate) if mutual else TokenInterceptor(token)
        options = [
            *_OPTIONS,
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
            ("grpc.max_connection_idle_ms", int(IDLE_TIMEOUT_S * 1000)),
            ("grpc.max_allowed_incoming_connections", most_connections(people is not None)),
        ]
        self.server = grpc.aio.server(interceptors=[gate, RequestReader()], options=options)
        self._tls = tls
        self._insecure_network = insecure_network
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, bind: str, service_names: Sequence[str], *, serving: bool = True) -> str:
        """Listen on ``bind`` ("host:port", port 0 picks one); returns the address with its port.

        The process ("") is SERVING from now on; ``serving`` sets the health of the services.

        Raises:
            OptionError: a non-loopback address without TLS on a network that is not trusted,
                unusable TLS files, or an address that is taken or not of this host.
        """
        host, _, _ = bind.rpartition(":")
        if self._tls is None and host and not self._insecure_network:
            _require_loopback(host)
        require_bindable("--bind", bind)
        host, wanted = split(bind)
        bind = joined(host, wanted)  # with the brackets that gRPC requires
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(bind)
            else:
                port = self.server.add_secure_port(bind, self._tls.server_credentials())
        except RuntimeError:  # newer releases of gRPC raise it where older ones return 0
            port = 0
        if port == 0:
            raise OptionError(f"--bind: cannot listen on {bind}: choose another port or address")
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        for name in ("", *service_names):
            await self.set_serving(name, serving or not name)
        await self.server.start()
        return joined(host, port)

    async def set_serving(self, service_name: str, serving: bool) -> None:
        """Set the health status of one service; "" is the process."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service_name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Report NOT_SERVING, give calls ``grace_s`` to end, then close."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise OptionError(
            f"refusing to listen on {host} without TLS: bind to 127.0.0.1, or give --tls-key and "
            "--tls-certificate"
        )
