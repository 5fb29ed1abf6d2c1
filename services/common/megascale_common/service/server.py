"""Start a gRPC server, open a channel: options, token, health and reflection are the same in every
service.

Servers bind to loopback unless they are given TLS, and even there every call needs the cluster
token, a random word in a 0600 file that `megascale up` writes and clients read. Health and
reflection need the token as well, so that a stranger on the host learns nothing; grpcurl takes it
with ``-H "authorization: Bearer $(cat FILE)"``.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_MESSAGE_BYTES = 4 << 20
# Both sides agree on pings: without the server's options a client's keepalive ends in GOAWAY
# too_many_pings.
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
MIN_TOKEN_CHARS = 16
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, how long one attempt to connect may take: a busy peer needs time, a dead
    # port refuses at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Proxies of the environment never stand between the parts of one cluster.
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a server: key and certificate chain; ``client_ca`` asks clients for a
    certificate.
    """

    key: Path
    certificate: Path
    client_ca: Path | None = None


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry ``authorization: Bearer <token>``.

    Raises:
        ValueError: the token is too short to protect anything.
    """

    def __init__(self, token: str) -> None:
        check_token(token)
        self._expected = f"Bearer {token}".encode()

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the call carries no valid cluster token; send metadata 'authorization: Bearer TOKEN' "
                "(the token stands in the file `token` of the cluster's run folder)",
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
        given = metadata.get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return self._refusal_for(handler)

    def _refusal_for(
        self, handler: grpc.RpcMethodHandler[Any, Any] | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        # The refusal has the shape of the refused call, or gRPC would hang on a stream.
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        shape = (False, False)
        if handler is not None:
            shape = (bool(handler.request_streaming), bool(handler.response_streaming))
        return make[shape](self._refuse)


class RpcServer:
    """A gRPC server with health, reflection and the token check. Use: construct, register
    servicers, ``start``.
    """

    def __init__(self, token: str, *, tls: Tls | None = None) -> None:
        self.server = grpc.aio.server(
            interceptors=[TokenInterceptor(token)], options=_SERVER_OPTIONS
        )
        self._tls = tls
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, bind: str, service_names: Sequence[str], *, serving: bool = True) -> str:
        """Listen on ``bind`` ("host:port", port 0 picks one) and return the address with its real
        port.

        Health of the process ("") is SERVING from now on, that of the services is what ``serving``
        says.

        Raises:
            ValueError: a non-loopback address without TLS.
            OSError: the address is taken or not of this host.
        """
        host, _, _ = bind.rpartition(":")
        if self._tls is None:
            _require_loopback(host)
            port = self.server.add_insecure_port(bind)
        else:
            port = self.server.add_secure_port(bind, _credentials(self._tls))
        if port == 0:
            raise OSError(f"cannot listen on {bind}: the address is taken or not of this host")
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        for name in ("", *service_names):
            await self.set_serving(name, serving or not name)
        await self.server.start()
        return f"{host}:{port}"

    async def set_serving(self, service_name: str, serving: bool) -> None:
        """Set the health status of one service ("" is the process)."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service_name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Say NOT_SERVING, let calls end within ``grace_s``, close."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def open_channel(
    address: str, token: str, *, root_certificate: Path | None = None
) -> grpc.aio.Channel:
    """An asyncio channel whose calls all carry the token. Reconnects with bounded back-off (0.2 to
    2 s).
    """
    interceptors = [
        _UnaryToken(token),
        _StreamToken(token),
        _StreamUnaryToken(token),
        _StreamStreamToken(token),
    ]
    if root_certificate is not None:
        credentials = grpc.ssl_channel_credentials(root_certificate.read_bytes())
        return grpc.aio.secure_channel(
            address, credentials, options=_CHANNEL_OPTIONS, interceptors=interceptors
        )
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS, interceptors=interceptors)


def read_or_create_token(path: Path) -> str:
    """The cluster token in ``path``; a new random one with mode 0600 when there is none.

    Raises:
        ValueError: the file holds no token.
    """
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(temporary, path)  # whole or not at all, and the first of several wins
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    token = path.read_text().strip()
    check_token(token)
    return token


def check_token(token: str) -> None:
    """Refuse a token that protects nothing.

    Raises:
        ValueError: it is shorter than MIN_TOKEN_CHARS.
    """
    if len(token) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"the token has {len(token)} characters, at least {MIN_TOKEN_CHARS} are needed: the token file is empty "
            "or damaged; delete it and restart the cluster"
        )


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add("authorization", f"Bearer {token}")
    return details._replace(metadata=metadata)  # type: ignore[attr-defined, no-any-return]


class _UnaryToken(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _StreamToken(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _StreamUnaryToken(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request_iterator)


class _StreamStreamToken(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request_iterator)


def _require_loopback(host: str) -> None:
    name = host.strip("[]")
    if name == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"refusing to listen on {host} without TLS: bind to 127.0.0.1, or give --tls-key and --tls-certificate"
        )


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    if tls.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], tls.client_ca.read_bytes(), require_client_auth=True)
