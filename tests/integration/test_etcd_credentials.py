"""A driver whose etcd wants certificates: it starts, and new ones count without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path

from tests.harness.driver import DriverProcess
from tests.harness.etcd import CuttableProxy, etcd_server

from megascale_common.etcd.server import EtcdServer
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role

__all__ = ["etcd_server"]  # a fixture


def etcd_side(files: Certificates) -> ssl.SSLContext:
    """What etcd shows, and whom it believes: certificates of its own authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def etcd_options(files: Certificates) -> tuple[str, ...]:
    """How the driver is told."""
    return (
        *("--etcd-ca", str(files.ca), "--etcd-certificate", str(files.certificate)),
        *("--etcd-key", str(files.key)),
    )


async def test_a_driver_starts_on_an_etcd_that_wants_a_certificate(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    authority.create(tmp_path / "etcd", "test")
    files = authority.issue(tmp_path / "etcd", "test", Role.DRIVER, "one")
    async with CuttableProxy(etcd_server.endpoint, tls=etcd_side(files)) as proxy:
        driver = DriverProcess(tmp_path, proxy.endpoint, None, "driver", *etcd_options(files))
        try:
            await driver.start()
        finally:
            await driver.close()
