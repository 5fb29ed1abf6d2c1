"""What a host needs beside its ranks: data loader and checkpoint daemon, as children of rank 0.

They are those that an agent starts, with the same options. They end with the process that started
them, and are in no process group of the terminal: Ctrl-C must not end them before the ranks have
saved.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megascale_common.node import framing
from megascale_common.node.addresses import is_loopback
from megascale_common.node.messages import (
    Accepted,
    AskSaves,
    AttemptOpened,
    HandAnswer,
    OpenAttempt,
    Refused,
    RequestFailed,
    Saves,
)
from megascale_common.node.process import child_environment, new_incarnation
from megascale_common.node.unix_sockets import create_socket_folder
from megascale_job import loading
from megascale_job.config import JobConfig
from megascale_trainer.launch.place import LOOPBACK

CLUSTER = "by-hand"
START_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 60.0  # the daemon itself gives up a storage after 18 s
SAVES_TIMEOUT_S = 15.0  # and the commit log after 8 s
STOP_GRACE_S = 16.0  # the daemon drains for 2 s, and ends retention within 10 s
MOST_RESTARTS = 4  # of the daemon
_POLL_S = 0.05

A = TypeVar("A", AttemptOpened, Saves)
_ANSWERS: Accepted[HandAnswer] = Accepted(
    "a run by hand", AttemptOpened, Saves, Refused, RequestFailed
)


class ServiceFailed(RuntimeError):
    """A child cannot start, or has refused; ``final``: the next start would find the same."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(slots=True)
class Child:
    """A process that this one has started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ended(self) -> str:
        """How it ended and the last line of its log; "" while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return f"the {self.name} {how}: {last or 'its log is empty'}"


@dataclass(slots=True)
class HostServices:
    """The children of one host.

    ``folder`` is the job's, ``host`` counts the hosts, ``token`` is that of the checkpoint daemons
    ("" without one).
    """

    config: JobConfig
    folder: Path
    host: int
    sockets: Path = field(init=False)
    _children: dict[str, Child] = field(default_factory=dict)
    _incarnation: str = field(default_factory=new_incarnation)
    _listens_on: str = LOOPBACK
    restarts: int = 0
    token: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets = create_socket_folder(CLUSTER, self.config.name, self._incarnation)

    @property
    def loader_socket(self) -> Path:
        """Where the ranks get their batches."""
        return self.sockets / "loader.sock"

    @property
    def checkpoint_socket(self) -> Path:
        """Where the ranks reach the checkpoint daemon."""
        return self.sockets / "checkpoint.sock"

    def start_loader(self) -> None:
        """Start the data loader; the ranks wait for its socket."""
        config = self.sockets / "config.json"
        config.write_text(loading.to_json(self.config))
        command = ["megascale_trainer.data.loader", "--socket", str(self.loader_socket)]
        self._spawn("data loader", [*command, "--config", str(config)], "loader")

    def start_daemon(self, token: str, host: str = LOOPBACK) -> None:
        """Start the checkpoint daemon; the daemons of all hosts have one ``token``.

        It listens on the address ``host``; on another than a loopback one, whoever started the run
        has said that the network is trusted.
        """
        self._listens_on = host
        self.token = token
        file = self.sockets / "token"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            opened.write(token + "\n")
        self._start_daemon()

    def _start_daemon(self) -> None:
        options = {
            "--cluster": CLUSTER,
            "--node": f"host-{self.host}",
            "--incarnation": f"{self._incarnation}-{self.restarts}",
            "--run-folder": str(self.folder),
            "--socket": str(self.checkpoint_socket),
            "--token-file": str(self.sockets / "token"),
            "--address-file": str(self.sockets / "checkpoint.address"),
            "--host": f"[{self._listens_on}]" if ":" in self._listens_on else self._listens_on,
        }
        words = [word for pair in options.items() for word in pair]
        if not is_loopback(self._listens_on):
            words.append("--insecure-network")
        self._spawn("checkpoint daemon", ["megascale_checkpoint", *words], "checkpoint")

    def open_attempt(self, *, read_only: bool = False) -> AttemptOpened:
        """Have the daemon open the next attempt of the job, as its committer.

        With ``read_only`` nothing is written: the answer says what an attempt would restore.

        Raises:
            ServiceFailed: it cannot start, or refuses; the message has its reason.
        """
        request = OpenAttempt(
            version=framing.PROTOCOL_VERSION,
            config=loading.to_json(self.config),
            read_only=read_only,
        )
        self.await_daemon()
        return self._answer(request, AttemptOpened, OPEN_TIMEOUT_S)

    def saves(self, attempt: int, *, look: bool = False) -> Saves:
        """What became of the attempt's saves; ``look`` asks the commit log for a later attempt.

        Raises:
            ServiceFailed, OSError: the daemon does not answer now.
        """
        uri = self.config.checkpoint.uri
        request = AskSaves(job=self.config.name, attempt=attempt, uri=uri, look=look)
        return self._answer(request, Saves, SAVES_TIMEOUT_S)

    def _answer(self, request: OpenAttempt | AskSaves, kind: type[A], timeout_s: float) -> A:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self.checkpoint_socket))
            framing.send(connection, request)
            received = framing.receive(connection)
        if received is None:
            raise ServiceFailed("the checkpoint daemon closed the connection")
        answer = _ANSWERS.read(received[0])
        if isinstance(answer, kind):
            return answer
        final = isinstance(answer, Refused) and answer.error_kind == "BAD_JOB"
        raise ServiceFailed(getattr(answer, "error", f"answered {answer}"), final=final)

    def await_daemon(self) -> None:
        """Wait until the daemon serves; raises ServiceFailed where it does not."""
        self._await((self.sockets / "checkpoint.address").exists, "checkpoint daemon")

    def daemon_problem(self) -> str:
        """How the checkpoint daemon has ended, once for each end; it is started again.

        Training continues meanwhile: ranks that find it gone register again at their next snapshot,
        and it listens at the same address again.
        """
        daemon = self._children.get("checkpoint")
        if daemon is None or not (ended := daemon.ended):
            return ""
        if self.restarts == MOST_RESTARTS:
            del self._children["checkpoint"]
            return f"{ended}; it ended {MOST_RESTARTS + 1} times: nothing is saved any more"
        self.restarts += 1
        self._start_daemon()
        return f"{ended}; it is started again, and training continues"

    def problem(self) -> str:
        """What ends the run: the loader has ended."""
        loader = self._children.get("loader")
        return loader.ended if loader is not None else ""

    def stop(self) -> None:
        """End the children and remove their sockets."""
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        for child in self._children.values():
            try:
                child.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _await(self, ready: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            for child in self._children.values():
                if child.name == name and child.ended:
                    raise ServiceFailed(child.ended)
            if time.monotonic() > deadline:
                raise ServiceFailed(f"the {name} does not serve after {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _spawn(self, name: str, module: list[str], log: str) -> None:
        suffix = f"-{self.host}" if self.host else ""
        path = self.folder / f"{log}{suffix}.log"
        with path.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                process_group=0,
            )
        self._children[log] = Child(name, process, path)


def new_token() -> str:
    """A random word that the daemons of one run share."""
    return secrets.token_urlsafe(32)
