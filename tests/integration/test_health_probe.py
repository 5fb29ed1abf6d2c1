"""The probe that service managers run: what it asks, and what its exit status says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role
from megascale_common.service.server import RpcServer

TOKEN = "a-token-of-this-test-alone"
NAME = "megascale.v1.DriverService"


async def probe(folder: Path, *options: str) -> tuple[int | None, str]:
    """Exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megascale_common.service.health_probe"),
        *("--address-file", str(folder / "address"), "--token-file", str(folder / "token")),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_probe_says_what_the_server_says(tmp_path: Path, mutual: bool) -> None:
    (tmp_path / "token").write_text(TOKEN)
    files: Certificates | None = None
    if mutual:
        authority.create(tmp_path / "tls", "test")
        files = authority.issue(tmp_path / "tls", "test", Role.EXECUTOR, "n1")
    options = files.options() if files is not None else []
    server = RpcServer(TOKEN, tls=files)
    assert (await probe(tmp_path, *options))[0] == 1, "no address yet"
    address = await server.start("127.0.0.1:0", [NAME], serving=False)
    (tmp_path / "address").write_text(f"{address}\n")
    try:
        assert await probe(tmp_path, *options) == (0, "SERVING\n")
        assert await probe(tmp_path, "--service", NAME, *options) == (1, "NOT_SERVING\n")
        if mutual:
            status, output = await probe(tmp_path)
            assert status == 1 and "UNAVAILABLE" in output
    finally:
        await server.stop(0)
    status, output = await probe(tmp_path, *options)
    assert status == 1 and "UNAVAILABLE" in output
    (tmp_path / "token").write_text("short")
    assert (await probe(tmp_path, *options))[0] == 2
