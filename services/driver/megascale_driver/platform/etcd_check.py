"""Checks that etcd answers, before a process that needs it is started."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import SOCKET, TlsConfig
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable
from megascale_common.service.errors import ClusterError, OptionError, UnavailableError

TIMEOUT_S = 5.0


def check_endpoints(option: str, endpoints: Sequence[str]) -> None:
    """Check that ``endpoints`` are host:port or unix:///PATH.

    Raises:
        OptionError: one has another form.
    """
    for endpoint in endpoints:
        if endpoint.startswith(SOCKET):
            continue
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise OptionError(
                f"{option}: {endpoint!r} is not host:port, such as 127.0.0.1:2379, or {SOCKET}PATH"
            )


async def require_etcd(
    option: str,
    endpoints: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    tls: TlsConfig | None = None,
) -> None:
    """Return once a member of etcd answers.

    Raises:
        OptionError: an endpoint is not host:port or unix:///PATH.
        UnavailableError: no member answers within ``timeout_s``.
        ClusterError: etcd refuses the client.
    """
    check_endpoints(option, endpoints)
    names = ",".join(endpoints)
    try:
        async with EtcdClient(endpoints, timeout_s=timeout_s, tls=tls) as client:
            await client.status()
    except EtcdUnavailable:
        raise UnavailableError(
            f"{option}: no etcd answers at {names} within {timeout_s:g} s: start it, or correct "
            "the addresses",
            reason="ETCD_DOWN",
        ) from None
    except EtcdError as error:
        raise ClusterError(f"{option}: etcd at {names} refuses: {error}") from None
