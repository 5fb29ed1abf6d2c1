"""A real S3 server that is not moto: Ceph's radosgw over a cluster of one monitor and one OSD.

Debian's packages, unpacked by ``make rgw-tools``. The OSD keeps objects in memory and there is no
authentication inside the cluster; nothing is measured with it. Conditional writes of single objects
are atomic among its threads; the completion of a multipart upload ignores conditions (16.2).
"""

from __future__ import annotations

import os
import socket
import subprocess
import urllib.request
import uuid
from pathlib import Path

from tests.harness.processes import cpu_ticks
from tests.harness.s3_server import BUCKET, S3Server
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_common.node.process import armed_command, child_environment

ROOT = Path(__file__).resolve().parents[2] / ".tools" / "ceph" / "root"
LIBRARIES = ROOT / "usr" / "lib" / "x86_64-linux-gnu"
SEARCHED = (LIBRARIES, LIBRARIES / "ceph", ROOT / "lib" / "x86_64-linux-gnu")
PYTHON = "/usr/bin/python3"  # for which Debian's python3-rados is built
_CONF = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms client mode = crc
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 2147483648
plugin dir = {libraries}/rados-classes
osd class dir = {libraries}/rados-classes
osd class load list = *
erasure code dir = {libraries}/ceph/erasure-code
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def missing() -> str:
    """What is missing to run it here, with the remedy; "" when nothing is."""
    if not (ROOT / "usr" / "bin" / "radosgw").exists():
        return "no radosgw: make rgw-tools"
    if not Path(PYTHON).exists():
        return f"no {PYTHON}, with which Ceph's command line runs"
    return ""


class RadosGateway(S3Server):
    """Monitor, OSD and gateway as processes, with one user and one empty bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._conf = folder, folder / "ceph.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        mon, mon_v1, port = _free_ports(3)
        fsid = str(uuid.uuid4())
        self._conf.write_text(
            _CONF.format(
                fsid=fsid, mon=mon, mon_v1=mon_v1, port=port, libraries=LIBRARIES, folder=folder
            )
        )
        monitors = f"[v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]"
        map_path = folder / "monmap"
        self._run("monmaptool", "--create", "--addv", "a", monitors, "--fsid", fsid, map_path)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_path)
        self._start("ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        self._ceph("osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0", "-f")
        self._start("radosgw", "-n", "client.rgw", "-f")
        self.endpoint = f"http://127.0.0.1:{port}"
        until(self._answers, "an answer of radosgw", self._cpu_ticks, story=self._logs)
        key = ("--access-key", "of-the-tests", "--secret-key", "of-the-tests")
        self._run("radosgw-admin", "user", "create", "--uid=t", "--display-name=t", *key)
        self.client().create_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        """End the processes."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(CALL_TIMEOUT_S)

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.endpoint, timeout=5).status == 200)
        except OSError:
            return False

    def _cpu_ticks(self) -> int:
        assert all(process.poll() is None for process in self._processes), self._logs()
        return cpu_ticks(process.pid for process in self._processes)

    def _logs(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in logs)

    def _environment(self) -> dict[str, str]:
        return child_environment(
            {
                "CEPH_CONF": str(self._conf),
                "LD_LIBRARY_PATH": os.pathsep.join(map(str, SEARCHED)),
                "PYTHONPATH": str(ROOT / "usr" / "lib" / "python3" / "dist-packages"),
            }
        )

    def _ceph(self, *arguments: str) -> None:
        """Ceph's command line, a Python program that waits for the monitor."""
        command = [PYTHON, str(ROOT / "usr" / "bin" / "ceph"), *arguments]
        self._call(command, arguments[0])

    def _run(self, name: str, *arguments: str | Path) -> None:
        self._call([str(ROOT / "usr" / "bin" / name), *map(str, arguments)], name)

    def _call(self, command: list[str], name: str) -> None:
        log = self._folder / f"call-{name}.log"
        with log.open("ab") as out:
            done = subprocess.run(
                command,
                check=False,
                timeout=CALL_TIMEOUT_S,
                stdout=out,
                stderr=out,
                env=self._environment(),
            )
        assert done.returncode == 0, f"{command}: {self._logs()}"

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"out-{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    armed_command([str(ROOT / "usr" / "bin" / name), *arguments]),
                    stdout=log,
                    stderr=log,
                    env=self._environment(),
                )
            )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
