"""A real checkpoint daemon as a process, and a worker's side of its socket, for tests."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.harness import program_start
from tests.harness.checkpoint_files import slot_bytes
from tests.harness.processes import cpu_ticks
from tests.harness.waiting import CALL_TIMEOUT_S, Standstill, until

from megascale_common.node import framing
from megascale_common.node.process import child_environment
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

Float32 = NDArray[np.float32]
CLUSTER, TOKEN = "test", "token-of-the-tests"
ROWS, COLUMNS = 8, 96


class DaemonProcess:
    """``python -m megascale_checkpoint`` of one node."""

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        incarnation: str = "i1",
        arguments: tuple[str, ...] = (),
        keep_address: bool = False,
        site: Path | None = None,
    ) -> None:
        """``site``: a folder whose sitecustomize.py the daemon runs first."""
        self.run_folder, self.node = folder / node, node
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.base = folder / "staging"
        self.staging = self.base / CLUSTER / node
        self.socket = self.run_folder / "checkpoint.sock"
        (self.run_folder / "token").write_text(TOKEN)
        self._address_file = self.run_folder / "checkpoint.address"
        written_before = 0
        if not keep_address:
            self._address_file.unlink(missing_ok=True)
        elif self._address_file.exists():
            written_before = self._address_file.stat().st_mtime_ns
        command = [
            sys.executable,
            "-m",
            "megascale_checkpoint",
            "--cluster",
            CLUSTER,
            "--node",
            node,
        ]
        command += [
            "--incarnation",
            incarnation,
            "--run-folder",
            str(self.run_folder),
            "--socket",
            str(self.socket),
        ]
        command += [
            "--token-file",
            str(self.run_folder / "token"),
            "--address-file",
            str(self._address_file),
        ]
        command += ["--staging-folder", str(self.base), *arguments]
        self.log = self.run_folder / "daemon.log"
        with self.log.open("a") as log:
            if site is None:
                self.process = program_start.start(
                    command, env=child_environment(), stdout=log, stderr=log
                )
            else:
                path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
                environment = {**child_environment(), "PYTHONPATH": path}
                self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.address = self._wait(written_before)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the process to end; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=CALL_TIMEOUT_S)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)

    def _wait(self, written_before: int) -> str:
        def address() -> str:
            assert self.process.poll() is None, f"the daemon ended: {self.log.read_text()}"
            if (
                self._address_file.exists()
                and self._address_file.stat().st_mtime_ns > written_before
            ):
                return self._address_file.read_text().strip()
            return ""

        try:
            return until(address, "the daemon's address", lambda: cpu_ticks([self.process.pid]))
        except Standstill:
            self.process.kill()
            raise


def layout_of(rank: int, world_size: int) -> ShardLayout:
    """Rows of one matrix, split over the ranks, and a vector that all hold and rank 0 writes."""
    first, last = ROWS * rank // world_size, ROWS * (rank + 1) // world_size
    rows = (last - first) * COLUMNS
    matrix = ShardPiece(
        "matrix",
        "master",
        "float32",
        (ROWS, COLUMNS),
        (first, 0),
        (last, COLUMNS),
        0,
        rows,
        0,
        primary=True,
    )
    bias = ShardPiece(
        "bias",
        "master",
        "float32",
        (COLUMNS,),
        (0,),
        (COLUMNS,),
        0,
        COLUMNS,
        rows * 4,
        primary=rank == 0,
    )
    return ShardLayout((matrix, bias), slot_bytes((matrix, bias)))


def state_of(rank: int, world_size: int, step: int) -> Float32:
    """The values of a rank's pieces after ``step``.

    The matrix counts up from 1000 * step, and the bias is step.
    """
    matrix = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * step
    first, last = ROWS * rank // world_size, ROWS * (rank + 1) // world_size
    return np.concatenate([matrix[first:last].reshape(-1), np.full(COLUMNS, step, np.float32)])


class WorkerClient:
    """A worker's side of the socket contract, blocking."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_TIMEOUT_S)
        self.sock.connect(str(daemon.socket))
        self.slots: list[Float32] = []

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One request and its answer."""
        framing.send(self.sock, {"kind": kind, **fields})
        answer = framing.receive(self.sock)
        assert answer is not None, "the daemon closed the connection"
        return answer[0]

    def register(
        self,
        *,
        job: str = "job",
        attempt: int = 1,
        rank: int = 0,
        world_size: int = 1,
        uri: str = "",
        committer: str = "",
        slots: int = 0,
        layout: ShardLayout | None = None,
        replicas: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Register and map the slots; returns the answer, which may be an error."""
        self.rank, self.world_size = rank, world_size
        layout = layout or layout_of(rank, world_size)
        message: dict[str, Any] = {
            "kind": "register",
            "version": framing.PROTOCOL_VERSION,
            "job": job,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "uri": uri,
            "committer_endpoint": committer,
            "slots": slots,
            "layout": layout.to_dict(),
            "layout_info": {"tp": world_size, "cp": 1, "dp": 1, "pp": 1},
            **fields,
        }
        if replicas is not None:
            message["replicas"] = {"target": "", "source": "", "bytes_per_s": 0, **replicas}
        framing.send(self.sock, message)
        received = framing.receive(self.sock)
        assert received is not None, "the daemon closed the connection"
        answer, descriptors = received
        for descriptor in descriptors:
            mapped = mmap.mmap(descriptor, int(answer["slot_bytes"]))
            self.slots.append(np.frombuffer(mapped, np.float32))
            os.close(descriptor)
        return answer

    def write(self, step: int, *, finite: bool = True, replicate: bool = True) -> dict[str, Any]:
        """Acquire a slot, copy the state of ``step`` into it, and seal it; returns the answer."""
        answer = self.ask("acquire", step=step)
        if answer["kind"] != "acquired":
            return answer
        values = state_of(self.rank, self.world_size, step)
        self.slots[answer["slot"]][: len(values)] = values
        small_state = {"position": step, "random": self.rank}
        return self.ask(
            "seal",
            slot=answer["slot"],
            step=step,
            small_state=small_state,
            finite=finite,
            replicate=replicate,
        )

    def replica_ended(self, step: int) -> bool:
        """Whether the daemon copies nothing of this rank to a peer, asked after ``step``."""
        return bool(self.ask("step_time", step=step, time_s=0.01)["replica_ended"])

    def drain(self, step: int, timeout_s: float = CALL_TIMEOUT_S / 2) -> dict[str, Any]:
        """Wait for the commit of ``step``."""
        return self.ask("drain", step=step, timeout_s=timeout_s)

    def drain_until_error(self, step: int, reason: str) -> None:
        """Ask for the commit of ``step``, which does not come, until ``reason`` is given for it."""

        def given() -> bool:
            answer = self.drain(step, timeout_s=0.2)
            assert answer["committed_step"] < step, answer
            return reason in answer["error"]

        until(given, f"{reason!r} as the reason of step {step}")

    def restore(
        self, source: str, step: int, attempt: int, manifest_uri: str = ""
    ) -> dict[str, Any]:
        """Request a state; returns the answer."""
        plan = {
            "source": source,
            "step": step,
            "written_by_attempt": attempt,
            "manifest_uri": manifest_uri,
        }
        return self.ask("restore", plan=plan)

    def holds(self, slot: int, step: int) -> bool:
        """Whether a slot holds this rank's state of ``step``, bit for bit."""
        values = state_of(self.rank, self.world_size, step)
        return bool(np.array_equal(self.slots[slot][: len(values)], values))

    def close(self) -> None:
        """Disconnect."""
        self.sock.close()

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
