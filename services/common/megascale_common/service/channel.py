"""Channels between the parts of a cluster. Every call carries the cluster token.

A process with certificates (:func:`present`) opens all its channels with TLS and presents them.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import HEADER, bearer

MAX_MESSAGE_BYTES = 4 << 20  # the same limit as on the server's side
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Despite its name, the timeout of one attempt to connect: a busy peer needs time, a dead port
    # refuses at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Proxies of the environment are never used between the parts of one cluster.
    ("grpc.enable_http_proxy", 0),
]


_presented: list[Certificates] = []  # of this process: none, or its one identity


def present(certificates: Certificates | None) -> None:
    """Present these certificates on new channels of this process; None: present none.

    Certificates without an authority are not presented, because servers could not be verified.
    """
    _presented[:] = [certificates] if certificates is not None and certificates.mutual else []


def presented() -> Certificates | None:
    """The certificates of this process, for connections other than channels."""
    return _presented[0] if _presented else None


def open_channel(address: str, token: str, *, shares: bool = True) -> grpc.aio.Channel:
    """An asyncio channel whose calls carry ``token``; reconnects with a back-off of 0.2 to 2 s.

    Channels of a process to one address share a connection. With ``shares`` false a channel has its
    own, so that its messages do not delay others.

    Raises:
        OptionError: the certificates of this process can no longer be used.
    """
    interceptors: list[grpc.aio.ClientInterceptor] = [
        _UnaryUnary(token),
        _UnaryStream(token),
        _StreamUnary(token),
        _StreamStream(token),
    ]
    options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", int(not shares))]
    if not _presented:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    credentials = _presented[0].channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options, None, interceptors)


class _TokenSender:
    """Adds the token to the metadata of a call."""

    def __init__(self, token: str) -> None:
        self._value = bearer(token)

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(HEADER, self._value)
        return details._replace(metadata=metadata)  # type: ignore[attr-defined, no-any-return]


# gRPC uses an interceptor for the first interface that it implements, so one class with all four
# would serve only unary calls.
class _UnaryUnary(_TokenSender, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _UnaryStream(_TokenSender, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamUnary(_TokenSender, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


class _StreamStream(_TokenSender, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)
