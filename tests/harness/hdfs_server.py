"""A real HDFS of one NameNode and one DataNode: the jars that ``make hdfs-tools`` unpacks.

They are Hadoop 2.7.3, whose semantics of create, rename and delete are those of today's; nothing is
measured with them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.processes import cpu_ticks
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_common.node.process import armed_command, child_environment

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "hdfs"
JARS = TOOLS / "lib"
# Hadoop 2.7.3 is older than the modules of Java 9, which keep it out of the JDK's internals.
_OPENED = ("lang", "util", "net", "nio")
_OPEN = [
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
]
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOG4J = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c: %m%n
"""


def missing() -> str:
    """What is missing to run HDFS here, with the remedy; "" when nothing is."""
    if shutil.which("java") is None:
        return "no java: install your system's default-jre-headless"
    if not JARS.is_dir():
        return "no jars of HDFS: make hdfs-tools"
    return ""


class HdfsServer:
    """A NameNode and a DataNode as processes, with an empty file system.

    The user that starts them is the superuser, and permissions are checked for all others.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._conf = folder, folder / "conf"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._configure()
        self._processes: list[subprocess.Popen[bytes]] = []
        subprocess.run(
            self._java(_NAME_NODE, "-format", "-nonInteractive"),
            check=True,
            timeout=CALL_TIMEOUT_S,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "format.log").open("w"),
            env=child_environment(),
        )
        self._start(_NAME_NODE, "name.log")
        self._start(_DATA_NODE, "data.log")
        until(self._stores, "a live DataNode of HDFS", self._cpu_ticks, story=self._logs)

    @property
    def uri(self) -> str:
        """hdfs://host:port."""
        return f"hdfs://127.0.0.1:{self.port}"

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The NameNode keeps its connections and answers nothing meanwhile."""
        self._processes[0].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[0].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.wait(CALL_TIMEOUT_S)

    def _stores(self) -> bool:
        """Whether a file can be written and read."""
        import hdfs_native

        assert all(process.poll() is None for process in self._processes), self._logs()
        try:
            client = hdfs_native.Client(self.uri)
            with client.create("/ready", hdfs_native.WriteOptions(overwrite=True)) as file:
                file.write(b"1")
            return bool(client.read("/ready").read() == b"1")
        except (OSError, RuntimeError):
            return False

    def _configure(self) -> None:
        for name in ("hdfs", "datanode"):
            web = self._conf / "webapps" / name / "WEB-INF"
            web.mkdir(parents=True)
            (web / "web.xml").write_text("<web-app/>\n")
        self._write("core-site.xml", {"fs.defaultFS": self.uri, "hadoop.tmp.dir": "FOLDER/tmp"})
        anywhere = "127.0.0.1:0"
        self._write(
            "hdfs-site.xml",
            {
                "dfs.replication": "1",
                "dfs.namenode.safemode.extension": "0",
                "dfs.namenode.http-address": anywhere,
                "dfs.namenode.name.dir": "FOLDER/name",
                "dfs.datanode.data.dir": "FOLDER/data",
                "dfs.datanode.address": anywhere,
                "dfs.datanode.http.address": anywhere,
                "dfs.datanode.ipc.address": anywhere,
                "dfs.namenode.fs-limits.min-block-size": "4096",
                "dfs.heartbeat.interval": "1",
            },
        )
        (self._conf / "log4j.properties").write_text(_LOG4J)

    def _write(self, name: str, values: dict[str, str]) -> None:
        lines = [
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in values.items()
        ]
        text = "\n".join(["<configuration>", *lines, "</configuration>\n"])
        (self._conf / name).write_text(text.replace("FOLDER", f"file://{self._folder}"))

    def _java(self, main: str, *arguments: str) -> list[str]:
        path = os.pathsep.join([str(self._conf), f"{JARS}/*"])
        return ["java", "-Xmx256m", *_OPEN, "-cp", path, main, *arguments]

    def _start(self, main: str, log: str) -> None:
        with (self._folder / log).open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    armed_command(self._java(main)),
                    stdout=output,
                    stderr=output,
                    env=child_environment(),
                )
            )

    def _cpu_ticks(self) -> int:
        return cpu_ticks(process.pid for process in self._processes)

    def _logs(self) -> str:
        return "\n".join(
            f"{name}: {(self._folder / name).read_text()[-2000:]}"
            for name in ("format.log", "name.log", "data.log")
            if (self._folder / name).exists()
        )
