"""A real agent process for tests, and a look at the process table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.harness import program_start
from tests.harness.processes import living_processes_of_group, until_gone
from tests.harness.waiting import until

from megascale_common.node.process import child_environment

TOKEN = "token-of-the-tests"
_SCRIPTED = Path(__file__).with_name("scripted_template.py")


@dataclass(slots=True)
class AgentProcess:
    """A started agent in a process group of its own."""

    process: subprocess.Popen[bytes]
    run_folder: Path
    node: str

    @property
    def node_folder(self) -> Path:
        """Where it keeps its files."""
        return self.run_folder / "nodes" / self.node

    def group(self) -> list[int]:
        """Living processes of its group."""
        return living_processes_of_group(self.process.pid)

    def log(self) -> str:
        """What it wrote on stderr."""
        return (self.node_folder / "agent.log").read_text()

    def end(self) -> None:
        """SIGTERM, which must leave no process and no shared memory; SIGKILL if it does not end."""
        group = self.group()
        self.process.terminate()
        try:
            until(lambda: self.process.poll() is not None, "the agent's end", self.group)
            until_gone(group, "processes of the agent")
        finally:
            self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL everything at once, as the loss of a node."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def start_agent(
    run_folder: Path,
    *,
    node: str = "n0",
    cluster: str = "test",
    devices: str = "0,1",
    template: str | None = None,
    options: tuple[str, ...] = (),
) -> AgentProcess:
    """Start an agent that reads the driver's address from ``run_folder``/driver.address.

    ``template`` is the command of the training side: by default the scripted one; "" is the real
    one. ``options`` are added to the command line.
    """
    folder = run_folder / "nodes" / node
    folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "token").write_text(TOKEN + "\n")
    command = [
        sys.executable,
        "-m",
        "megascale_executor.agent",
        "--cluster",
        cluster,
        "--node",
        node,
    ]
    command += [
        "--driver-file",
        str(run_folder / "driver.address"),
        "--token-file",
        str(run_folder / "token"),
    ]
    command += [
        "--device",
        "cpu",
        "--devices",
        devices,
        "--run-folder",
        str(run_folder),
        "--topology",
        "switch=s0",
    ]
    command += ["--address-file", str(folder / "executor.address"), *options]
    command += [
        "--template-command",
        f"{sys.executable} {_SCRIPTED}" if template is None else template,
    ]
    with (folder / "agent.log").open("ab") as log:
        process = program_start.start(
            command, stdout=log, stderr=log, env=child_environment(), start_new_session=True
        )
    return AgentProcess(process, run_folder, node)
