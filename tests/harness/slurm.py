"""A real SLURM on this machine: munge, one controller, and several node daemons.

Each node daemon has a name of its own (`slurmd -N`) and one port. Nothing is written outside a
folder; the commands find the cluster through ``SLURM_CONF``. Needs root, since SLURM starts jobs as
their users, and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.processes import free_port
from tests.harness.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES_OF_A_SWITCH = 2


def missing() -> str:
    """What this machine lacks for a SLURM of its own; "" for nothing."""
    if os.geteuid() != 0:
        return "needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"needs {', '.join(absent)}: make slurm-tools" if absent else ""


class SlurmCluster:
    """Nodes n1 to nN on switches of two; as a context manager it ends all processes."""

    def __init__(self, folder: Path, nodes: int, kill_wait_s: int = 5) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._ports = [free_port("127.0.0.1") for _ in range(nodes + 1)]
        self._kill_wait_s = kill_wait_s
        self._munge = folder / "munge"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin"

    def __enter__(self) -> Self:
        try:
            self._start_munge()
            self._write_configuration()
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for name in self.names:
                self.start_node(name)
            until(
                lambda: self.states().count("idle") == len(self.names),
                "the nodes of SLURM are idle",
                story=self.trouble,
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (self.folder / "slurm.conf").exists():
            subprocess.run(
                ["scancel", "--user=root", "--full"], env=self.environment, check=False, timeout=30
            )
        for name in self.names:
            self._kill_steps(name)
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def command(self, *words: str) -> str:
        """What a command of SLURM prints."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def states(self) -> list[str]:
        """Each node's state, as `sinfo` has it."""
        try:
            return self.command("sinfo", "-h", "-N", "-o", "%T").split()
        except subprocess.CalledProcessError:
            return []  # the controller starts

    def reason(self, node: str) -> str:
        """Why a node is drained or down."""
        return self.command("sinfo", "-h", "-n", node, "-o", "%E").strip()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node; SLURM takes it back by itself (ReturnToService)."""
        self._start("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """End a node as a power cut would: its daemon, and all that runs on it."""
        process = self._processes[f"slurmd {node}"]
        process.kill()
        process.wait()
        self._kill_steps(node)

    def _kill_steps(self, node: str) -> None:
        """SIGKILL to every process that a step started on a node, and to the steps themselves."""
        mark = f"SLURMD_NODENAME={node}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in environment
            if ours and mark in environment and b"slurm_script" not in b" ".join(words):
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def trouble(self) -> str:
        """The ends of the logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in logs)

    def _start_munge(self) -> None:
        self._munge.mkdir(mode=0o700, parents=True)
        self.folder.chmod(0o755)
        self._munge.chmod(0o755)
        key = self._munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self._munge}/socket", f"--pid-file={self._munge}/pid",
            f"--log-file={self._munge}/log", f"--seed-file={self._munge}/seed",
        )  # fmt: skip
        until((self._munge / "socket").exists, "munged serves", story=self.trouble)

    def _write_configuration(self) -> None:
        host, folder = socket.gethostname(), self.folder
        switches = -(-len(self.names) // NODES_OF_A_SWITCH)
        lines = [
            "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self._ports[0]}", "AuthType=auth/munge",
            f"AuthInfo=socket={self._munge}/socket,cred_expire=10",
            "SlurmUser=root", "SlurmdUser=root",
            f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/ctld.pid", f"SlurmdPidFile={folder}/d-%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "MpiDefault=none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2",
            "SchedulerType=sched/backfill", "TopologyPlugin=topology/tree", "SlurmdTimeout=10",
            f"KillWait={self._kill_wait_s}", "MinJobAge=300", "JobRequeue=1", "OverTimeLimit=0",
            "SchedulerParameters=requeue_setup_env_fail,sched_interval=5",
        ]  # fmt: skip
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for name, port in zip(self.names, self._ports[1:], strict=True)
        ]
        lines += [f"PartitionName=all Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE"]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        leaves = [
            f"SwitchName=s{n} Nodes={','.join(self.names[n * 2 : n * 2 + 2])}"
            for n in range(switches)
        ]
        top = f"SwitchName=top Switches={','.join(f's{n}' for n in range(switches))}"
        (folder / "topology.conf").write_text("\n".join([*leaves, top]) + "\n")

    def _start(self, program: str, *arguments: str) -> None:
        name = f"slurmd {arguments[2]}" if program == "slurmd" else program
        with (self.folder / f"{name.replace(' ', '-')}-out.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
