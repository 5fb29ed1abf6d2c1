"""Ranks of a job as real processes, cheaply: forks of one single-threaded template process that imported torch once.

``RankPool.run`` starts one process per rank, calls a function of an importable module in each, and returns what they
return. Importing torch in eight fresh processes on two cores takes seconds; forking the template takes milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale_common.process import arm_parent_death, child_environment

REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0  # after one rank failed, how long its peers may take to notice before they are killed


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds every rank's own account."""


class RankPool:
    """A template process. Use as a context manager; leaving it ends the template and whatever still runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.ranks"],
            cwd=REPOSITORY,
            env=child_environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, world_size: int, folder: Path, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Call ``module:function`` as ``function(rank, world_size, folder, **arguments)`` in ``world_size`` processes.

        Arguments and results travel as JSON. ``folder`` must be fresh: rendezvous files and results go there.

        Raises:
            RankFailed: a rank did not return.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "program": program,
            "world_size": world_size,
            "folder": str(folder),
            "timeout_s": timeout_s,
            "arguments": arguments,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RankFailed("the template process died")
        failed = json.loads(answer)["failed"]
        if failed:
            accounts = [f"rank {rank}: {_read(folder / f'{rank}.error') or how}" for rank, how in failed.items()]
            raise RankFailed("\n".join(accounts))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]

    def close(self) -> None:
        """End the template; its children die with it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def rank_pool() -> Iterator[RankPool]:
    """A pool for the body of a ``with`` statement."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _child(request: dict[str, Any], rank: int, template: int) -> None:
    """One rank; never returns. ``os._exit`` spares the interpreter's teardown, which takes seconds after torch."""
    arm_parent_death(expected_parent_pid=template)
    folder = Path(request["folder"])
    code = 0
    try:
        module, function = request["program"].split(":")
        result = getattr(importlib.import_module(module), function)(
            rank, request["world_size"], folder, **request["arguments"]
        )
        (folder / f"{rank}.json").write_text(json.dumps(result))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _serve(request: dict[str, Any]) -> dict[str, str]:
    """Fork the ranks and wait for them; returns the ranks that failed and how."""
    importlib.import_module(request["program"].split(":")[0])
    template = os.getpid()
    running: dict[int, int] = {}
    for rank in range(request["world_size"]):
        child = os.fork()
        if child == 0:
            _child(request, rank, template)
        running[child] = rank
    deadline = time.monotonic() + request["timeout_s"]
    failed: dict[str, str] = {}
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = running.pop(child)
            if status:
                failed[str(rank)] = f"exit status {os.waitstatus_to_exitcode(status)}"
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        elif time.monotonic() > deadline:
            for child, rank in running.items():
                os.kill(child, signal.SIGKILL)
                failed.setdefault(str(rank), "killed: out of time")
            deadline = float("inf")
        else:
            time.sleep(0.005)
    return failed


def _template() -> None:
    arm_parent_death()
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps({"failed": _serve(json.loads(line))}), flush=True)


if __name__ == "__main__":
    _template()
