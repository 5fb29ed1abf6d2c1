"""A driver whose etcd wants certificates: it starts, and new ones count without a restart."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from tests.harness.driver import DriverProcess
from tests.harness.etcd import CuttableProxy, etcd, etcd_prefix, etcd_server, etcd_side
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import driver_pb2
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import TlsConfig
from megascale_common.etcd.keeper_process import KeeperProcess, now_s
from megascale_common.etcd.lease import Lease
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.files import replace_file
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role

__all__ = ["etcd", "etcd_prefix", "etcd_server"]  # fixtures
# The keeper renews the lease as if it ended after TOLD_S, so that a pause of it does not end it.
TTL_S, TOLD_S = 120, 6


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


async def test_new_credentials_of_etcd_count_without_a_restart(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    first, second, files = authorities(tmp_path)
    driver = None
    try:
        async with CuttableProxy(etcd_server.endpoint, tls=etcd_side(first)) as before:
            port = int(before.endpoint.rpartition(":")[2])
            driver = DriverProcess(tmp_path, before.endpoint, None, "driver", *etcd_options(files))
            await driver.start()
        # From now on etcd shows and believes certificates of the second authority alone.
        async with CuttableProxy(etcd_server.endpoint, tls=etcd_side(second), port=port):
            put(second, files)

            async def stored() -> bool:
                request = driver_pb2.SetQuotaRequest(
                    tenant="team", devices=8, reason="tried by a test"
                )
                try:
                    await driver.stub.SetQuota(request, timeout=CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return False
                return True

            await eventually(stored, "a change is stored", story=driver.log)
    finally:
        if driver is not None:
            await driver.close()


async def test_the_keeper_of_a_lease_takes_new_credentials(
    etcd_server: EtcdServer, etcd: EtcdClient, tmp_path: Path
) -> None:
    first, second, files = authorities(tmp_path)
    assert files.ca is not None
    tls = TlsConfig(files.ca, files.certificate, files.key)
    async with CuttableProxy(etcd_server.endpoint, tls=etcd_side(first)) as before:
        endpoint = before.endpoint
        keeper = KeeperProcess([endpoint], tls)
        with keeper:
            async with await Lease.grant(etcd, TTL_S, keeper=keeper) as lease:
                keeper.keep(lease.lease_id, TOLD_S)
                await eventually(lambda: renewed_since(keeper, lease, 0.0), "a renewal")
                await before.__aexit__()
                port = int(endpoint.rpartition(":")[2])
                async with CuttableProxy(etcd_server.endpoint, tls=etcd_side(second), port=port):
                    put(second, files)
                    swapped_s = now_s()
                    await eventually(
                        lambda: renewed_since(keeper, lease, swapped_s), "a renewal with new files"
                    )


def renewed_since(keeper: KeeperProcess, lease: Lease, since_s: float) -> bool:
    found = keeper.newest()
    return found is not None and found.lease_id == lease.lease_id and found.sent_s > since_s


def authorities(folder: Path) -> tuple[Certificates, Certificates, Certificates]:
    """Certificates of two authorities, and the files in use, which have those of the first."""
    made = []
    for name in ("first", "second"):
        authority.create(folder / name, "test")
        made.append(authority.issue(folder / name, "test", Role.DRIVER, "one"))
    used = folder / "used"
    used.mkdir()
    files = Certificates(used / "key", used / "certificate", used / "ca")
    put(made[0], files)
    return made[0], made[1], files


def put(source: Certificates, target: Certificates) -> None:
    """Replace the files of ``target``."""
    for name in ("key", "certificate", "ca"):
        replace_file(getattr(target, name), getattr(source, name).read_text())
